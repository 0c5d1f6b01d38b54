"""Adds an image to an OCI layout, and keeps other images and files in it.

Blobs first, ``index.json`` last and atomically: a killed run leaves the layout unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import RemoteError, UsageError
from builder.registry.layout import REF_NAME, LayoutDirectory
from builder.registry.manifests import blobs, entries, is_index
from builder.registry.model import MANIFEST_LIMIT
from builder.util.console import console
from builder.util.leftovers import identity, noted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ELSEWHERE = "choose another place with --output oci:DIR"
#: Prefix of temporary folders.
_WORK = ".spark-build-"
_BLOBS = Path("blobs") / "sha256"
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


def check_layout_target(target: Path) -> None:
    """Refuse a target that is neither new nor an OCI layout.

    Raises:
        UsageError: that; or it is a layout, and its index is damaged.
    """
    if not os.path.lexists(target):
        return
    marker = target / "oci-layout"
    if marker.is_file():
        if (target / "index.json").exists():
            LayoutDirectory(target).index()
        return
    if not target.is_dir():
        raise UsageError(
            f"{target} is not a folder, so no image can be written there", hint=_ELSEWHERE
        )
    if any(not path.name.startswith(_WORK) for path in target.iterdir()):
        raise UsageError(
            f"{target} has files but is not an OCI layout, so no image can be written there",
            hint=_ELSEWHERE,
        )


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A temporary folder on the disk of ``target``; also removes those of killed runs."""
    parent, prefix = target, _WORK
    if not target.is_dir():
        parent, prefix = target.parent, f".{target.name}{_WORK}"
        parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # open before the folder: a signal may come at any time
        with LayoutDirectory(target).lock():
            for old in parent.glob(f"{prefix}*"):
                handle = os.open(old, os.O_RDONLY)
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old, ignore_errors=True)
                os.close(handle)
            work = parent / f"{prefix}{identity() or os.getpid()}-{os.urandom(4).hex()}"
            stack.enter_context(noted(work))
            work.mkdir(0o700)
            handle = os.open(work, os.O_RDONLY)
            stack.callback(os.close, handle)
            with contextlib.suppress(OSError):  # where it cannot be locked, no other run removes it
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work


class LayoutWriter(LayoutDirectory):
    """A layout being written; blobs are linked from ``near`` if it has them."""

    def __init__(self, path: Path, near: Path) -> None:
        super().__init__(path)
        self._near = near

    def has(self, digest: str) -> bool:
        """Whether the blob exists; a hard link keeps it from being removed meanwhile."""
        if super().has(digest):
            return True
        with contextlib.suppress(OSError):
            os.link(self._near / self.blob_path(digest), self.path / self.blob_path(digest))
        return super().has(digest)


def add_image(made: Path, target: Path, name: str) -> None:
    """Move the only image of a new layout into ``target`` under a name.

    An image that had the name is removed, with the blobs that only it needs.

    Raises:
        UsageError: see ``check_layout_target``.
        OSError: the disk does not take it; ``target`` is as it was.
    """
    there = LayoutDirectory(target)
    (entry,) = LayoutDirectory(made).index()["manifests"]
    entry = {**entry, "annotations": {**entry.get("annotations", {}), REF_NAME: name}}
    with there.lock():
        check_layout_target(target)
        index, replaced = there.with_entry(entry)
        (made / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        if not os.path.lexists(target):
            made.rename(target)
            return
        _move(made, target)
        gone = [old["digest"] for old in replaced if old.get("digest") != entry["digest"]]
        if gone:
            console.say(f"  {name} was {', '.join(gone)} in {target}, and is replaced")
        _sweep(there, replaced, index["manifests"])
    if len(index["manifests"]) > 1:
        console.say(
            f"  {target} contains {len(index['manifests'])} images; this one is named {name}"
        )


def _move(made: Path, target: Path) -> None:
    new: list[Path] = []

    def move(name: Path | str) -> None:
        if not (target / name).exists():
            new.append(target / name)
        (made / name).replace(target / name)

    folders = [path for path in (target / _BLOBS, target / "blobs") if not path.exists()]
    try:
        if not (target / "oci-layout").exists():  # from here on it is a layout, without an image
            move("oci-layout")
        (target / _BLOBS).mkdir(parents=True, exist_ok=True)
        for blob in sorted((made / _BLOBS).iterdir()):
            move(_BLOBS / blob.name)
        move("index.json")
    except BaseException:
        if (made / "index.json").exists():  # else it was interrupted when all was done
            _take_back(new, folders)
        raise


def _take_back(new: Iterable[Path], folders: Iterable[Path]) -> None:
    for path in new:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _sweep(
    layout: LayoutDirectory, replaced: Iterable[Mapping[str, Any]], kept: Sequence[Any]
) -> None:
    """Remove blobs that only the replaced images needed; nothing if one cannot be read."""
    gone: set[str] = set()
    try:
        for entry in replaced:
            gone |= _parts(layout, str(entry.get("digest")))
    except (RemoteError, UsageError):
        return
    if not gone:
        return
    needed = _mentioned(layout, json.dumps(kept).encode())
    for digest in gone - needed:
        with contextlib.suppress(OSError):
            (layout.path / layout.blob_path(digest)).unlink(missing_ok=True)


def _parts(layout: LayoutDirectory, digest: str) -> set[str]:
    """The digests of a manifest and its blobs; for an index also those of listed manifests here."""
    found = {digest}
    manifest = layout.manifest(digest)
    if not is_index(manifest):
        return found | {blob.digest for blob in blobs(manifest)}
    for entry in entries(manifest):
        if layout.has(entry.digest):
            found |= _parts(layout, entry.digest)
    return found


def _mentioned(layout: LayoutDirectory, text: bytes) -> set[str]:
    """Every digest that a document mentions, directly or through the documents it mentions.

    This can keep too much, but no document of an unknown kind loses a part.
    """
    found: set[str] = set()
    texts = [text]
    while texts:
        for digest in {name.decode() for name in _DIGEST.findall(texts.pop())} - found:
            found.add(digest)
            with contextlib.suppress(OSError):
                path = layout.path / layout.blob_path(digest)
                if path.stat().st_size <= MANIFEST_LIMIT:
                    texts.append(path.read_bytes())
    return found
