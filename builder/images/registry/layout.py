"""An OCI image layout directory, read and written like a repository.

An image is added to a layout with its blobs first, ``index.json`` last and atomically: a killed run
leaves the layout, its other images and files unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from builder.applier.files import open_regular, read_regular
from builder.common.cache import locked
from builder.common.console import console
from builder.common.hints import ELSEWHERE, instead, os_hint
from builder.common.leftovers import identity, making, noted
from builder.errors import RemoteError, UsageError
from builder.images.registry.client import verified
from builder.images.registry.model import (
    MANIFEST_LIMIT,
    OCI_INDEX,
    TEXT,
    Descriptor,
    RawManifest,
    blobs,
    check_document,
    check_entry,
    check_fields,
    check_manifest,
    entries,
    is_index,
    parse_json,
)
from builder.images.registry.reference import is_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from builder.common.retry import RequestFailed
    from builder.images.registry.model import ImageSource

REF_NAME = "org.opencontainers.image.ref.name"
_NOT_A_LAYOUT = "name a folder that an image was written to with --output oci:DIR"
_VERSION = {"imageLayoutVersion": "1.0.0"}
_MARKER = json.dumps(_VERSION).encode() + b"\n"
_MARKER_LIMIT = 4096
_EMPTY_INDEX: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
_BLOCK = 1 << 20


class LayoutDirectory:
    """One layout.  It has no ``index.json`` until its first image is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"oci:{path}"
        self._lock = threading.Lock()

    # -- reading

    def references(self) -> tuple[str, ...]:
        """The names of images in its index."""
        names = (entry.annotations.get(REF_NAME, "") for entry in self._entries())
        return tuple(dict.fromkeys(name for name in names if name))

    def name_of(self, digest: str) -> str:
        """The first name of an image in the index; empty if it has none."""
        names = (e.annotations.get(REF_NAME, "") for e in self._entries() if e.digest == digest)
        return next(filter(None, names), "")

    def manifest(self, reference: str) -> RawManifest:
        """The manifest or index with this name or digest; ``""`` means the only one.

        Raises:
            UsageError: the name does not identify a single image.
            RemoteError: it does not exist, or does not match its digest.
        """
        digest = self.resolve(reference)
        with self._blob(digest) as file:
            data = file.read(MANIFEST_LIMIT + 1)
        manifest = check_manifest(
            data, content_type="", digest=digest, where=f"{self.name}: manifest {digest}"
        )
        if (self.path / "index.json").exists():  # not while its first image is written
            listed = (item for item in self.index()["manifests"] if isinstance(item, dict))
            for item in listed:
                if item.get("digest") == digest:
                    check_entry(Descriptor.parse(item, self.name), manifest, self.name)
        return manifest

    def resolve(self, reference: str) -> str:
        """The digest for a name, a digest, or ``""`` for the only image.

        Raises:
            UsageError: the name does not identify a single image.
            RemoteError: the index is damaged.
        """
        if is_digest(reference):
            return reference
        name = reference
        entries = self._entries()
        digests = {
            entry.digest for entry in entries if not name or entry.annotations.get(REF_NAME) == name
        }
        if len(digests) == 1:
            return digests.pop()
        names = self.references()
        what = f"no single image {name!r}" if name else f"{len(digests)} images"
        raise UsageError(
            f"{self.name} has {what}; its names: {', '.join(names[:8]) or 'none'}",
            hint=instead(
                f"{self.name}:{name}" if name else self.name,
                f"{self.name}:{names[0]}" if names else f"{self.name}@sha256:...",
            ),
        )

    def _entries(self) -> tuple[Descriptor, ...]:
        return tuple(Descriptor.parse(item, self.name) for item in self.index()["manifests"])

    def index(self) -> dict[str, Any]:
        """The parsed ``index.json``.

        Raises:
            UsageError: it does not exist, or is not an index.
        """
        path = self.path / "index.json"
        try:
            with open_regular(path) as file:
                data = file.read(MANIFEST_LIMIT + 1)
            index = parse_json(data) if len(data) <= MANIFEST_LIMIT else None
        except OSError as error:
            raise UsageError(
                f"{self.path} is not an OCI layout: {path} cannot be read: {error.strerror}",
                hint=_NOT_A_LAYOUT,
            ) from None
        except ValueError:
            index = None
        if not isinstance(index, dict) or not isinstance(index.get("manifests"), list):
            raise UsageError(
                f"{self.path} is not an OCI layout: {path} has no list of manifests",
                hint=_NOT_A_LAYOUT,
            )
        check_document(index, f"{self.name}: index.json", is_index=True)
        self._check_marker()
        return index

    def _check_marker(self) -> None:
        """Check the file ``oci-layout``, without which runtimes read nothing."""
        path = self.path / "oci-layout"
        try:
            with open_regular(path) as file:
                marker = parse_json(file.read(_MARKER_LIMIT))
        except (OSError, ValueError):
            marker = None
        if isinstance(marker, dict):
            check_fields(marker, {"imageLayoutVersion": TEXT}, f"{self.name}: oci-layout")
        if not isinstance(marker, dict) or not _VERSION.items() <= marker.items():
            raise UsageError(
                f"{self.path} is not an OCI layout: {path} does not state version 1.0.0",
                hint=_NOT_A_LAYOUT,
            )

    def _place(self, digest: str) -> Path:
        if not is_digest(digest):
            raise RemoteError(f"{self.name}: {digest!r} is not a sha256 digest")
        return self.path / self.blob_path(digest)

    @staticmethod
    def blob_path(digest: str) -> str:
        """The path of a blob in a layout."""
        return f"blobs/sha256/{digest.removeprefix('sha256:')}"

    def _blob(self, digest: str) -> IO[bytes]:
        try:
            return open_regular(self._place(digest))
        except OSError as error:
            raise RemoteError(f"{self.name}: {digest}: {error.strerror}") from None

    @contextlib.contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        """A blob as a stream; see :func:`builder.images.registry.client.verified`."""

        def give_up(lost: RequestFailed) -> None:
            raise RemoteError(f"{self.name}: {blob.digest} is damaged: {lost}")

        def open_at(_offset: int) -> IO[bytes]:
            return self._blob(blob.digest)

        stream = verified(blob, self.name, open_at, lost=give_up, moved=lambda _count: None)
        try:
            yield stream
        finally:
            stream.close()

    # -- writing

    def has(self, digest: str) -> bool:
        """Whether the blob exists; it was checked when it was written."""
        try:
            return stat.S_ISREG(self._place(digest).lstat().st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from None

    def gives(self, blob: Descriptor) -> bool:
        """Whether the blob exists with its expected size."""
        return self.has(blob.digest) and self._place(blob.digest).lstat().st_size == blob.size

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Write a blob; nothing remains if its bytes do not match its digest.

        Raises:
            RemoteError: the bytes do not match the digest.
            UsageError: the disk does not take them.
        """
        target = self._place(blob.digest)
        with self._writing(target) as out:
            sha, size = hashlib.sha256(), 0
            while size <= blob.size and (data := content.read(_BLOCK)):
                sha.update(data)
                size += len(data)
                with self._told(target):
                    out.write(data)
            digest = f"sha256:{sha.hexdigest()}"
            if size != blob.size or digest != blob.digest:
                raise RemoteError(
                    f"{self.name}: {blob.digest} of {blob.size} bytes was expected, but the data "
                    f"is {digest} of {size} bytes or more"
                )

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:  # noqa: ARG002
        """Always False: a layout has its own copy of every blob."""
        return False

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        """Write a manifest, and unless ``reference`` is its digest, name it in the index.

        ``""`` lists it without a name.  An image that had the name loses it.

        Raises:
            UsageError: the disk does not take it.
        """
        with self._writing(self._place(manifest.digest)) as out, self._told(self.path):
            out.write(manifest.data)
        if is_digest(reference):
            return
        listed = {
            **manifest.descriptor.as_json(),
            **({"annotations": {REF_NAME: reference}} if reference else {}),
        }
        with self._lock, self.lock():
            index, _ = self.with_entry(listed)
            text = json.dumps(index, indent=1, sort_keys=True) + "\n"
            for name, data in (("oci-layout", _MARKER), ("index.json", text.encode())):
                with self._writing(self.path / name) as out, self._told(self.path):
                    out.write(data)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """The lock for changes to the index."""
        return locked(str(self.path.resolve()))

    def with_entry(self, entry: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The index with one more entry, and the entries that it replaces."""
        index = self.index() if (self.path / "index.json").exists() else _EMPTY_INDEX
        name, digest = _name_of(entry), entry["digest"]
        replaced = [
            old
            for old in index["manifests"]
            if _name_of(old) == name and (name or old.get("digest") == digest)
        ]
        others = [old for old in index["manifests"] if old not in replaced]
        return {**index, "manifests": [*others, entry]}, replaced

    @contextlib.contextmanager
    def _writing(self, target: Path) -> Iterator[IO[bytes]]:
        """A new file that replaces ``target`` at the end of the block; removed on an error."""
        with self._told(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with making(target) as partial:
            with self._told(target):
                out = partial.open("xb")
            try:
                yield out
                with self._told(target):
                    out.close()  # which also writes what was kept back
                    partial.chmod(0o644)
                    partial.replace(target)
            finally:
                with contextlib.suppress(OSError):
                    out.close()

    @contextlib.contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        """Name the file that cannot be written."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}; no partial output was left",
                hint=os_hint(error, ELSEWHERE),
            ) from None


def _name_of(entry: object) -> str:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return str(annotations.get(REF_NAME, "")) if isinstance(annotations, dict) else ""


# --------------------------------------------------------------------------- an image in two places


class FallbackSource:
    """Reads from a layout, and what the layout lacks from the base's location."""

    def __init__(self, own: LayoutDirectory, base: ImageSource) -> None:
        self.own, self.base = own, base
        self.name = base.name

    def manifest(self, reference: str) -> RawManifest:
        """The manifest of a digest.

        Raises:
            RemoteError: neither location has it.
        """
        return (self.own if self.own.has(reference) else self.base).manifest(reference)

    def open(self, blob: Descriptor) -> AbstractContextManager[IO[bytes]]:
        """A blob as a stream; see ``ImageSource.open``."""
        return self.origin(blob).open(blob)

    def gives(self, blob: Descriptor) -> bool:
        """Whether a blob can be read from its location."""
        return self.origin(blob).gives(blob)

    def origin(self, blob: Descriptor) -> ImageSource:
        """The location of a blob, so that its registry can mount it."""
        return self.own if self.own.has(blob.digest) else self.base


# ---------------------------------------------------------------------------------- adding an image


_ELSEWHERE = "choose another place with --output oci:DIR"
#: Prefix of temporary folders.
_WORK = ".spark-build-"
_BLOBS = Path("blobs") / "sha256"
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


def check_layout_target(target: Path) -> None:
    """Refuse a target that is neither new nor an OCI layout.

    Raises:
        UsageError: the target is something else, or a layout whose index is damaged.
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


def add_image(new: Path, target: Path, name: str) -> None:
    """Move the only image of a new layout into ``target`` under a name.

    An image that had the name is removed, with the blobs that only it needs.

    Raises:
        UsageError: see ``check_layout_target``.
        OSError: the disk does not take it; ``target`` is as it was.
    """
    there = LayoutDirectory(target)
    (entry,) = LayoutDirectory(new).index()["manifests"]
    entry = {**entry, "annotations": {**entry.get("annotations", {}), REF_NAME: name}}
    with there.lock():
        check_layout_target(target)
        index, replaced = there.with_entry(entry)
        (new / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        if not os.path.lexists(target):
            new.rename(target)
            return
        _move(new, target)
        gone = [old["digest"] for old in replaced if old.get("digest") != entry["digest"]]
        if gone:
            console.say(f"  {name} was {', '.join(gone)} in {target}, and is replaced")
        _sweep(there, replaced, index["manifests"])
    if len(index["manifests"]) > 1:
        console.say(
            f"  {target} contains {len(index['manifests'])} images; this one is named {name}"
        )


def _move(source: Path, target: Path) -> None:
    new: list[Path] = []

    def move(name: Path | str) -> None:
        if not (target / name).exists():
            new.append(target / name)
        (source / name).replace(target / name)

    folders = [path for path in (target / _BLOBS, target / "blobs") if not path.exists()]
    try:
        if not (target / "oci-layout").exists():  # from here on it is a layout, without an image
            move("oci-layout")
        (target / _BLOBS).mkdir(parents=True, exist_ok=True)
        for blob in sorted((source / _BLOBS).iterdir()):
            move(_BLOBS / blob.name)
        move("index.json")
    except BaseException:
        if (source / "index.json").exists():  # else it was interrupted when all was done
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
    layout: LayoutDirectory, replaced: Iterable[Mapping[str, Any]], entries: Sequence[Any]
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
    needed = _mentioned(layout, json.dumps(entries).encode())
    for digest in gone - needed:
        with contextlib.suppress(OSError):
            (layout.path / layout.blob_path(digest)).unlink(missing_ok=True)


def _parts(layout: LayoutDirectory, digest: str) -> set[str]:
    """The digests of a manifest and its blobs; for an index also those of listed manifests here."""
    digests = {digest}
    manifest = layout.manifest(digest)
    if not is_index(manifest):
        return digests | {blob.digest for blob in blobs(manifest)}
    for entry in entries(manifest):
        if layout.has(entry.digest):
            digests |= _parts(layout, entry.digest)
    return digests


def _mentioned(layout: LayoutDirectory, text: bytes) -> set[str]:
    """Every digest that a document mentions, directly or through the documents it mentions.

    This can keep too much, but no document of an unknown kind loses a part.
    """
    mentioned: set[str] = set()
    texts = [text]
    while texts:
        for digest in {name.decode() for name in _DIGEST.findall(texts.pop())} - mentioned:
            mentioned.add(digest)
            with contextlib.suppress(OSError):
                path = layout.path / layout.blob_path(digest)
                texts.append(read_regular(path, MANIFEST_LIMIT))
    return mentioned
