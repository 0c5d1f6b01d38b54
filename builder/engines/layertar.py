"""Writes layer tars; the same files give the same bytes.

Entries sorted by name, one timestamp, no user names; gzip level 6 in members of 4 MiB each, with no
name and no time in their headers.  Other zlib builds may compress to different bytes; the tar,
and so the diff_id, is the same.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.applier.trees import Content

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
