"""Writes the layers of a new image: their tars, a cache of them, and the layout they go into.

The same files give the same bytes: entries sorted by name, one timestamp, no user names; gzip level
6 in members of 4 MiB each, with no name and no time in their headers.  Other zlib builds may
compress to different bytes; the tar, and so the diff_id, is the same.

A layer with the same inputs is reused: ``blobs/KEY/`` holds a compressed layer and a record of it.
The key is a digest of everything that decides the layer's bytes: its part of the plan, every tar
entry, the timestamp, and the compression.  It does not depend on other layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import struct
import tarfile
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from builder.applier.digests import canonical_json, sha256_hex
from builder.common.console import console, counted, megabytes
from builder.common.document import plain
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.paths import cache_dir
from builder.images.engines.metadata import content_bytes
from builder.images.registry.model import OCI_INDEX, OCI_LAYER_GZIP, RawManifest, sha256_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.trees import Content
    from builder.common.model.plan import BuildPlan, LayerDecision

# --------------------------------------------------------------------------------------------- tars


WHITEOUT = ".wh."
#: Deflate's own default; 9 takes three times as long for 1 % less of Python source.
LEVEL = 6
#: Bytes of the tar in one gzip member; RFC 1952 lets a file have many.
PIECE = 4 << 20
#: ``[mode, uid, gid]`` by default.
FOLDER = (0o755, 0, 0)


class _Hashed:
    """Forwards bytes, and computes their sha256 and count."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write, self._sha, self.size = write, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._sha.update(data)
        self.size += len(data)
        self._write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"


class _Counted(io.BytesIO):
    """Reports the bytes read."""

    def __init__(self, data: bytes, moved: Callable[[int], object]) -> None:
        super().__init__(data)
        self._moved = moved

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._moved(len(data))
        return data


def _member(data: bytes) -> bytes:
    """One gzip member; its header does not depend on the machine (RFC 1952, section 2.3)."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = packer.compress(data) + packer.flush()
    sums = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + body + sums


class _Packer:
    """Compresses fixed-size pieces in parallel; the output is the same on any machine."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write, self._buffer = write, bytearray()
        self._workers = min(os.cpu_count() or 1, 16)
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="gzip")
        self._pending: deque[Future[bytes]] = deque()

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PIECE:
            self._submit(bytes(self._buffer[:PIECE]))
            del self._buffer[:PIECE]

    def _submit(self, piece: bytes) -> None:
        self._pending.append(self._pool.submit(_member, piece))
        while len(self._pending) > 2 * self._workers:
            self._write(self._pending.popleft().result())

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        try:
            if kind is None:
                self._submit(bytes(self._buffer))
                while self._pending:
                    self._write(self._pending.popleft().result())
        finally:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Owners:
    """``[mode, uid, gid]`` by absolute path: of folders, and of files that are not root's."""

    folder: Callable[[str], Sequence[int]] = lambda _path: FOLDER
    files: Mapping[str, Sequence[int]] | None = None

    def of(self, path: str, content: Content | None) -> Sequence[int]:
        """Mode and owner of a file's entry; a whiteout (None) is an empty file owned by root."""
        if content is None:
            return (0o644, 0, 0)
        known = (self.files or {}).get(path)
        return known if known is not None else (content.mode, 0, 0)


def tar_layer(
    out: IO[bytes],
    files: Mapping[str, Content | None],
    epoch: int,
    owners: Owners | None = None,
    moved: Callable[[int], object] = lambda _size: None,
) -> tuple[str, str, int]:
    """Write a gzipped layer tar; returns ``(digest, diff_id, compressed size)``.

    ``moved`` is called with the number of bytes written.

    ``files`` maps absolute paths to content, or None for a removed file (a whiteout).
    Every parent folder has an entry, so that runtimes need not guess its mode.
    """
    owners = owners or Owners()
    compressed = _Hashed(out.write)
    with _Packer(compressed.write) as packer:
        plain = _Hashed(packer.write)
        with tarfile.open(
            None, "w|", fileobj=cast("IO[bytes]", plain), format=tarfile.PAX_FORMAT
        ) as tar:
            for name, path, content in entries(files):
                info = tarfile.TarInfo(name)
                info.mtime = epoch
                if content == "dir":
                    info.type = tarfile.DIRTYPE
                    info.mode, info.uid, info.gid = owners.folder(path)
                    tar.addfile(info)
                    continue
                info.mode, info.uid, info.gid = owners.of(path, content)
                info.size = 0 if content is None else content.size
                read = None if content is None else _Counted(content.read(), moved)
                tar.addfile(info, read)
    return compressed.digest, plain.digest, compressed.size


def entries(files: Mapping[str, Content | None]) -> Iterable[tuple[str, str, Any]]:
    """Name in the tar, absolute path, and content: folders before their files, all sorted."""
    named: dict[str, tuple[str, Any]] = {}
    for path, content in files.items():
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            named.setdefault(above, (f"/{above}", "dir"))
        if content is None:
            named["/".join([*parts[:-1], WHITEOUT + parts[-1]])] = (path, None)
        else:
            named["/".join(parts)] = (path, content)
    return [(name, *what) for name, what in sorted(named.items())]


# ------------------------------------------------------------------------------------ cached layers


#: Increased when the same entries would give different bytes.
RECIPE = 1
#: Size limit of all cached layers; the least recently used are removed first.
MOST_BYTES = 2 << 30
#: A layer is cached only if this many times its size is free, because the build needs space too.
_ROOM = 4
_CHUNK = 1 << 20
_PLANNED = ("digest", "variant", "inputs", "files")


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of an image layer: patch layers of a plan, or baked-in files."""

    platform: str
    names: tuple[str, ...]
    planned: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, plan: BuildPlan, names: Sequence[str]) -> LayerInputs:
        """The part of a plan for some of its layers.

        Only what the bytes depend on is included: the layer's digest, its variant
        and pinned inputs, and the hash of each file before and after.
        """
        planned = tuple(_planned(d) for d in plan.needed if d.name in names)
        return cls(plan.base.platform.oci, tuple(names), planned)


def _planned(decision: LayerDecision) -> dict[str, Any]:
    fields = plain(decision.document)
    return {name: fields[name] for name in _PLANNED if name in fields}


@dataclass(frozen=True)
class CachedLayer:
    """A finished layer: digest and size of the compressed tar, and its diff_id."""

    digest: str
    diff_id: str
    size: int


def layer_key(
    made_of: LayerInputs, files: Mapping[str, Content | None], epoch: int, owners: Owners
) -> str:
    """The key of a layer, from its entries and its part of the plan; reads no content."""
    rows: list[list[Any]] = []
    for name, path, content in entries(files):
        if content == "dir":
            rows.append([name, "dir", *owners.folder(path)])
        else:
            held = None if content is None else content.sha256
            rows.append([name, held, *owners.of(path, content)])
    value = {
        "recipe": RECIPE,
        "compression": ["gzip", LEVEL, PIECE, zlib.ZLIB_RUNTIME_VERSION],
        "platform": made_of.platform,
        "planned": [dict(part) for part in made_of.planned],
        "epoch": epoch,
        "entries": rows,
    }
    return sha256_hex(canonical_json(value))


def _folder(key: str) -> Path:
    return cache_dir() / "blobs" / key


def take_cached_layer(key: str, target: Path) -> CachedLayer | None:
    """Copy a cached layer to ``target``, checked against its digest; None if there is none.

    A damaged one is reported and removed.
    """
    folder = _folder(key)
    try:
        record = json.loads((folder / "record.json").read_bytes())
        kept = CachedLayer(**{name: record[name] for name in CachedLayer.__dataclass_fields__})
        if record["check"] != _check(key, kept):
            raise ValueError("its record is damaged")
        with (folder / "layer").open("rb") as source, target.open("wb") as out:
            found, size = _copied(source, out)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _damaged(folder, str(error))
        return None
    if (found, size) != (kept.digest, kept.size):
        target.unlink()
        _damaged(folder, f"its digest is {found}, expected {kept.digest}")
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    return kept


def _damaged(folder: Path, how: str) -> None:
    console.warn(f"a cached layer is damaged and will be rebuilt: {folder}: {how}")
    shutil.rmtree(folder, ignore_errors=True)


def _check(key: str, kept: CachedLayer) -> str:
    return sha256_hex(canonical_json([key, kept.digest, kept.diff_id, kept.size]))


def _copied(source: IO[bytes], out: IO[bytes]) -> tuple[str, int]:
    sha, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        sha.update(chunk)
        out.write(chunk)
        size += len(chunk)
    return f"sha256:{sha.hexdigest()}", size


def cache_layer(key: str, kept: CachedLayer, source: Path) -> None:
    """Cache a new layer; a full disk is not an error."""
    folder = _folder(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if kept.size > MOST_BYTES or free < _ROOM * kept.size:
            console.detail(f"not cached: {megabytes(kept.size)}")
            return
        _make_room(folder.parent, kept.size)
        with making(folder) as work:
            work.mkdir()
            shutil.copyfile(source, work / "layer")
            record = {**vars(kept), "check": _check(key, kept)}
            (work / "record.json").write_text(json.dumps(record))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
    except OSError as error:
        console.detail(f"not cached: {error}")


def _make_room(parent: Path, size: int) -> None:
    """Remove the least recently used layers until one more fits."""
    found = sorted(
        (p for p in parent.iterdir() if (p / "layer").is_file()), key=lambda p: p.stat().st_mtime
    )
    total = size + sum((p / "layer").stat().st_size for p in found)
    for oldest in found:
        if total <= MOST_BYTES:
            return
        total -= (oldest / "layer").stat().st_size
        shutil.rmtree(oldest, ignore_errors=True)


# -------------------------------------------------------------- the layout that they are written to


@dataclass(frozen=True)
class Blob:
    """A blob in the layout; ``diff_id`` is the digest of a layer's uncompressed tar."""

    digest: str
    size: int
    media_type: str
    diff_id: str = ""
    #: whether it came from the cache
    cached: bool = False

    def descriptor(self) -> dict[str, str | int]:
        """The OCI content descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


def say_layer(name: str, files: int, blob: Blob) -> None:
    """Print one line about an added layer."""
    kept = "  (kept from an earlier build)" if blob.cached else ""
    number = counted(files, "file")
    console.say(f"  {name:<28.28}{number:>11} {megabytes(blob.size):>10}{kept}")


class Scratch:
    """A layout being written next to its destination, or in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: (platform, patch layer) -> whether it came from the cache
        self.cached: dict[tuple[str, str], bool] = {}
        (root / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add_layer(
        self,
        files: Mapping[str, Content | None],
        epoch: int,
        made_of: LayerInputs,
        owners: Owners | None = None,
    ) -> Blob:
        """Add a layer from absolute paths, or reuse the cached layer with the same inputs."""
        partial = self.root / "blobs" / "partial"
        owners = owners or Owners()
        key = layer_key(made_of, files, epoch, owners)
        with locked(f"layer {key}"):
            kept = take_cached_layer(key, partial)
            cached = kept is not None
            if kept is None:
                title, total = f"writing {'+'.join(made_of.names)}", content_bytes(files)
                with console.progress(title, total, said=False) as bar, partial.open("wb") as out:
                    digest, diff_id, size = tar_layer(out, files, epoch, owners, bar.advance)
                kept = CachedLayer(digest, diff_id, size)
                cache_layer(key, kept, partial)
        partial.replace(self._path(kept.digest))
        self.cached |= {(made_of.platform, name): cached for name in made_of.names}
        return Blob(kept.digest, kept.size, OCI_LAYER_GZIP, kept.diff_id, cached)

    def add_json(self, value: object, media_type: str) -> Blob:
        """Add a JSON blob."""
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        digest = sha256_digest(data)
        self._path(digest).write_bytes(data)
        return Blob(digest, len(data), media_type)

    def add_manifest(self, value: object, media_type: str) -> RawManifest:
        """Add a manifest or an index."""
        blob = self.add_json(value, media_type)
        return RawManifest(data=self._path(blob.digest).read_bytes(), media_type=media_type)

    def finish(self, manifest: RawManifest, platform: Mapping[str, str], name: str) -> None:
        """Write ``index.json`` and ``oci-layout``; ``platform`` is empty for an index."""
        entry = {
            **manifest.descriptor.as_json(),
            **({"platform": dict(platform)} if platform else {}),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        (self.root / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
