"""Finds where two images differ: configuration keys, files in layers, bytes."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.common.document import Part
from builder.images.rootfs.tar import FILE, LayerTar, Unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.images.registry.model import Descriptor, ImageConfig, ImageSource
    from builder.publishing.subject import Image

#: How many files are compared by byte, and their maximum size in bytes.
_LOOKED_AT = 8
_LARGEST = 64 << 20
_LONGEST_VALUE = 200


class Difference(Part, frozen=True, kw_only=True):
    """One difference: its blob, the key or file, and the value on each side."""

    blob: str
    where: str
    what: str


@dataclass(frozen=True)
class ComparedImage:
    """One of the two images, and the source of its blobs."""

    source: ImageSource
    image: Image


def compare_images(published: ComparedImage, rebuilt: ComparedImage) -> list[Difference]:
    """All differences between two images; empty if their manifests are identical.

    Raises:
        RemoteError: a blob cannot be read.
    """
    if published.image.digest == rebuilt.image.digest:
        return []
    found = [
        *compare_documents(
            _without_blobs(published.image.manifest.json()),
            _without_blobs(rebuilt.image.manifest.json()),
            f"manifest {published.image.digest}",
        )
    ]
    if published.image.config.digest != rebuilt.image.config.digest:
        found += compare_documents(
            _without_layers(published.image.settings),
            _without_layers(rebuilt.image.settings),
            f"config {published.image.config.digest}",
        )
    return found + compare_layers(published, rebuilt)


def _without_blobs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in ("config", "layers")}


def _without_layers(config: ImageConfig) -> dict[str, Any]:
    """The configuration without its list of layers, which are compared themselves."""
    return {**config.document, "config": by_variable(config.settings), "rootfs": None}


def by_variable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an image with environment variables by name, so that a difference names one."""
    env = settings.get("Env")
    if not isinstance(env, list) or not all(isinstance(line, str) for line in env):
        return dict(settings)
    return {**settings, "Env": dict(line.partition("=")[::2] for line in env)}


def compare_documents(old: Any, new: Any, blob: str, path: str = "") -> list[Difference]:
    """Keys of two JSON values that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        pairs = [(f"{path}.{key}".lstrip("."), old.get(key), new.get(key)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(old, new, strict=True))]
    elif old == new:
        return []
    else:
        return [Difference(blob=blob, where=path, what=f"{_short(old)}, rebuilt {_short(new)}")]
    return [d for where, a, b in pairs for d in compare_documents(a, b, blob, where)]


def _short(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def compare_layers(published: ComparedImage, rebuilt: ComparedImage) -> list[Difference]:
    """Layer by layer, from the bottom up."""
    old, new = published.image.layers, rebuilt.image.layers
    found = []
    if len(old) != len(new):
        what = f"{len(old)} layers, rebuilt {len(new)}"
        found.append(Difference(blob=published.image.digest, where="layers", what=what))
    for number, (one, other) in enumerate(zip(old, new, strict=False)):
        if one.digest != other.digest:
            found += _compare_layer(number, (published.source, one), (rebuilt.source, other))
    return found


def _compare_layer(
    number: int, old: tuple[ImageSource, Descriptor], new: tuple[ImageSource, Descriptor]
) -> list[Difference]:
    blob = f"layer {number} {old[1].digest}"
    (old_tar, old_rows), (new_tar, new_rows) = _rows(*old), _rows(*new)
    found, changed = compare_rows(old_rows, new_rows, blob)
    for path in changed[:_LOOKED_AT]:
        pair = _content(*old, path), _content(*new, path)
        found.append(Difference(blob=blob, where=path, what=byte_range(*pair)))
    found += [
        Difference(blob=blob, where=path, what="other content") for path in changed[_LOOKED_AT:]
    ]
    if not found and old_tar == new_tar:
        what = "the same tar, compressed to other bytes: another build of zlib"
        found.append(Difference(blob=blob, where="gzip", what=what))
    elif not found:
        what = "the same files; times or order in the tar differ"
        found.append(Difference(blob=blob, where="tar", what=what))
    return found


def compare_rows(
    old: Mapping[str, tuple[Any, ...]], new: Mapping[str, tuple[Any, ...]], blob: str
) -> tuple[list[Difference], list[str]]:
    """Differences of names, kinds, modes and owners; and the files whose content differs.

    A row is ``(kind, mode, uid, gid, link, sha256)``.
    """
    found, changed = [], []
    for path in sorted({*old, *new}):
        one, other = old.get(path), new.get(path)
        if one is None or other is None:
            what = "not in the image" if one is None else "not in the rebuilt one"
            found.append(Difference(blob=blob, where=path, what=what))
            continue
        if one[:-1] != other[:-1]:
            what = f"{_row(one)}, rebuilt {_row(other)}"
            found.append(Difference(blob=blob, where=path, what=what))
        if one[-1] != other[-1]:
            changed.append(path)
    return found, changed


def _row(row: tuple[Any, ...]) -> str:
    kind, mode, uid, gid, link, _ = row
    return f"{kind} {mode:04o} {uid}:{gid}{f' -> {link}' if link else ''}"


def byte_range(old: bytes | None, new: bytes | None) -> str:
    """The bytes of a file that differ; offsets start at 0, and the end is inclusive."""
    if old is None or new is None:
        return "other content, too large to compare"
    size = f"{len(old)} bytes, rebuilt {len(new)}"
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if first is None:
        return f"{size}: one is the beginning of the other"
    longest = min(len(old), len(new)) - first
    same_end = 0
    while same_end < longest and old[-1 - same_end] == new[-1 - same_end]:
        same_end += 1
    old_end, new_end = len(old) - same_end, len(new) - same_end
    if old_end == first:
        return f"{new_end - first} bytes are missing at {first} ({size})"
    word = "are not in the rebuilt one" if new_end == first else "differ"
    return f"bytes {first}-{old_end - 1} {word} ({size})"


@contextmanager
def _tar(source: ImageSource, blob: Descriptor) -> Iterator[tuple[LayerTar, _Counted]]:
    where = f"{source.name}: {blob.digest}"
    with source.open(blob) as stream:
        counted = _Counted(Unpacked(stream, where))
        yield LayerTar(counted, where), counted  # type: ignore[arg-type]


class _Counted:
    """Unpacked bytes with their sha256, which is the layer's diff_id at the end."""

    def __init__(self, inner: Unpacked) -> None:
        self._inner, self._sha = inner, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._inner.read(size)
        self._sha.update(data)
        return data

    def skip(self, size: int) -> bool:
        while size > 0:
            data = self.read(min(size, 1 << 20))
            if not data:
                return False
            size -= len(data)
        return True

    def finish(self) -> str:
        while self.read(1 << 20):
            pass
        return self._sha.hexdigest()


def _rows(source: ImageSource, blob: Descriptor) -> tuple[str, dict[str, tuple[Any, ...]]]:
    """The layer's diff_id, and a row for each tar entry."""
    rows: dict[str, tuple[Any, ...]] = {}
    with _tar(source, blob) as (tar, counted):
        for member in tar:
            digest = hashlib.sha256()
            for piece in tar.chunks():
                digest.update(piece)
            content = digest.hexdigest() if member.kind == FILE else ""
            rows[f"/{member.path}"] = (
                member.kind, member.mode, member.uid, member.gid, member.link, content,
            )  # fmt: skip
        return counted.finish(), rows


def _content(source: ImageSource, blob: Descriptor, path: str) -> bytes | None:
    with _tar(source, blob) as (tar, _):
        for member in tar:
            if f"/{member.path}" == path and member.kind == FILE:
                return None if member.size > _LARGEST else b"".join(tar.chunks())
    return None
