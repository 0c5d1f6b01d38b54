"""Reads released wheels by HTTP range, so that few files of a 500 MB wheel are downloaded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import zipfile
import zlib
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from builder.applier.digests import sha256_hex
from builder.applier.sources import Member
from builder.applier.trees import Distribution, distribution_of
from builder.applier.wheels import RangeFile, wheel_members
from builder.errors import RemoteError, UsageError
from builder.net.messages import no_answer
from builder.pypi.download import download, downloaded
from builder.pypi.index import write_atomically
from builder.util.console import console, megabytes
from builder.util.hints import TEMPORARY, os_hint
from builder.util.paths import cache_dir
from builder.util.progress import Bar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from builder.pypi.index import PackageIndex, WheelFile

#: Size of the first range, from the end: the central directory of a vLLM wheel has about 600 kB.
_TAIL_LARGE, _TAIL_SMALL = 768 << 10, 96 << 10
#: Files closer than this are read in one range, which is cheaper than another request.
_GAP = 256 << 10
#: Bytes of a range of a large file, and between progress updates of a download.
_PIECE, _STEP = 16 << 20, 256 << 10


class RemoteWheel:
    """A wheel on the index.  Read parts are cached, and checked on every read."""

    def __init__(self, file: WheelFile, index: PackageIndex) -> None:
        self.file = file
        self._index = index
        self._cache = cache_dir() / "wheels" / file.sha256
        self._memory: dict[str, bytes] = {}
        #: bytes of the current read
        self._bar = Bar("", None, "bytes")

    # -- the archive

    def _fetch(self, start: int, stop: int) -> bytes:
        import requests

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        pieces = []
        url = self._index.address(self.file)
        try:
            session = self._index.session
            with session.get(url, headers=headers, stream=True) as response:
                for piece in response.iter_content(_STEP) if response.status_code == 206 else ():
                    pieces.append(piece)
                    self._bar.advance(len(piece))
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{self.file.filename}: the download broke off: {no_answer(error, url)}",
                hint="run the same command again; completed downloads are reused",
            ) from error
        data = b"".join(pieces)
        if response.status_code != 206 or len(data) != stop - start:
            raise RemoteError(
                f"{self.file.filename}: the index answered {response.status_code} with "
                f"{len(data)} bytes instead of {stop - start}"
            )
        self._index.bytes_read += len(data)
        return data

    @cached_property
    def size(self) -> int:
        """Size of the whole wheel, requested from the index if its page has none."""
        if self.file.size:
            return self.file.size
        import requests

        kept = self._cache / "size"
        with contextlib.suppress(OSError, ValueError):
            return int(kept.read_bytes())
        url = self._index.address(self.file)
        try:
            response = self._index.session.head(url, allow_redirects=True)
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{self.file.filename}: the index does not give its size: {no_answer(error, url)}"
            ) from error
        if not response.ok or "Content-Length" not in response.headers:
            raise RemoteError(f"{self.file.filename}: the index does not give its size")
        size = int(response.headers["Content-Length"])
        write_atomically(kept, b"%d" % size)
        return size

    @cached_property
    def _stream(self) -> RangeFile:
        size = self.size
        stream = RangeFile(size, self._fetch, block=16 << 10)
        tail = _TAIL_LARGE if size > 50_000_000 else _TAIL_SMALL
        stream.prefetch(max(0, size - tail), size)
        return stream

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        console.detail(f"reading {self.file.filename} ({megabytes(self.size)}) by range")
        try:
            return zipfile.ZipFile(self._stream)
        except zipfile.BadZipFile as error:
            raise RemoteError(f"{self.file.filename} is not a wheel: {error}") from error

    # -- the interface

    @cached_property
    def members(self) -> dict[str, Member]:
        """Files by path."""
        cached = self._cache / "members.json"
        with contextlib.suppress(OSError, ValueError):
            members = msgspec.json.decode(cached.read_bytes(), type=list[Member])
            return {m.path: m for m in members}
        members = wheel_members(self._archive)
        write_atomically(cached, msgspec.json.encode(members))
        return {m.path: m for m in members}

    @cached_property
    def info_dir(self) -> str:
        """The wheel's own ``.dist-info`` directory, not a vendored one."""
        own = (p for p in self.members if p.endswith(".dist-info/METADATA") and p.count("/") == 1)
        return next(own).split("/")[0]

    def read(self, path: str) -> bytes:
        """One file, checked against RECORD.

        Raises:
            RemoteError: the download fails, or the bytes do not match RECORD.
        """
        self.preload([path])
        return self._memory[path]

    def preload(self, paths: Iterable[str]) -> None:
        """Read many files with few range requests."""
        missing = []
        for path in paths:
            if path in self._memory or path not in self.members:
                continue
            with contextlib.suppress(OSError):
                data = (self._cache / "files" / quote(path, safe="")).read_bytes()
                if sha256_hex(data) == self.members[path].sha256:
                    self._memory[path] = data
                    continue
            missing.append(path)
        if missing:
            self._prefetch(missing)
        for path in missing:
            data = self._checked(path)
            write_atomically(self._cache / "files" / quote(path, safe=""), data)
            self._memory[path] = data

    def _checked(self, path: str) -> bytes:
        try:
            data = self._archive.read(path)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
        if sha256_hex(data) != self.members[path].sha256:
            raise RemoteError(f"{self.file.filename}:{path} does not match its RECORD")
        return data

    def _prefetch(self, paths: Sequence[str], bar: Bar | None = None) -> None:
        infos = sorted((self._archive.getinfo(p) for p in paths), key=lambda i: i.header_offset)
        runs: list[tuple[int, int]] = []
        for info in infos:
            start = info.header_offset
            # local header: 30 bytes, the name, and an extra field that is short in wheels
            stop = start + 30 + len(info.filename.encode()) + 256 + info.compress_size
            if runs and start - runs[-1][1] < _GAP:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        title, total = f"reading {self.file.release}", sum(stop - start for start, stop in runs)
        own = console.progress(title, total, said=False)
        with own if bar is None else contextlib.nullcontext(bar) as self._bar:
            for start, stop in runs:
                self._stream.prefetch(start, stop)

    def extract(self, path: str, target: Path) -> None:
        """Stream one large file to disk, without caching it.

        Raises:
            RemoteError: the download fails, or the bytes do not match RECORD.
        """
        title = f"reading {path.rpartition('/')[2]} out of {self.file.release}"
        with console.progress(title, self.packed_size(path)) as self._bar:
            self._extract(path, target)

    def _extract(self, path: str, target: Path) -> None:
        info = self._archive.getinfo(path)
        head = self._fetch(info.header_offset, info.header_offset + 30)
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        stop = start + info.compress_size
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        stored = info.compress_type == zipfile.ZIP_STORED
        digest = hashlib.sha256()
        try:
            with target.open("wb") as out:
                for at in range(start, stop, _PIECE):
                    piece = self._fetch(at, min(stop, at + _PIECE))
                    plain = piece if stored else inflate.decompress(piece)
                    digest.update(plain)
                    out.write(plain)
        except zlib.error as error:
            raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
        except OSError as error:
            raise UsageError(
                f"cannot write {path} to {target.parent}: {error.strerror}",
                hint=os_hint(error, TEMPORARY),
            ) from error
        if digest.hexdigest() != self.members[path].sha256:
            raise RemoteError(f"{self.file.filename}:{path} does not match its RECORD")

    def packed_size(self, path: str) -> int:
        """Compressed size of one file in the wheel."""
        return self._archive.getinfo(path).compress_size

    def unpack(self, paths: Iterable[str], folder: Path, bar: Bar) -> None:
        """Write files below a folder, each checked against RECORD, without caching them.

        ``bar`` counts compressed bytes.

        Raises:
            RemoteError: the download fails, or the bytes do not match RECORD.
        """
        ordered = sorted(paths, key=lambda path: self.members[path].size)
        self._prefetch([path for path in ordered if self.members[path].size <= _PIECE], bar)
        for path in ordered:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.members[path].size > _PIECE:
                self._extract(path, target)
            else:
                target.write_bytes(self._checked(path))
            target.chmod(self.members[path].mode)

    def download(self) -> Path:
        """Download the whole wheel, checked against its sha256; shows progress.

        Raises:
            RemoteError: the download fails, or its digest does not match.
        """
        kept = downloaded(self.file)  # the index need not say how large it is
        return kept or download(dataclasses.replace(self.file, size=self.size), self._index)


class WheelTree:
    """Site-packages as an installer would unpack these wheels, one after the other."""

    def __init__(self, wheels: Sequence[RemoteWheel]) -> None:
        self.wheels = wheels

    @cached_property
    def _owner(self) -> dict[str, RemoteWheel]:
        owner: dict[str, RemoteWheel] = {}
        for wheel in self.wheels:
            owner.update(dict.fromkeys(wheel.members, wheel))
        return owner

    @cached_property
    def _children(self) -> dict[str, set[str]]:
        children: dict[str, set[str]] = {}
        for path in self._owner:
            parent, _, name = path.rpartition("/")
            while parent not in children:  # a new folder, so it is new in the one around it too
                children[parent] = {name}
                parent, _, name = parent.rpartition("/")
            children[parent].add(name)
        return children

    def read(self, path: str) -> bytes | None:
        wheel = self._owner.get(path)
        return None if wheel is None else wheel.read(path)

    def preload(self, paths: Iterable[str]) -> None:
        """Read many files with few range requests."""
        of_wheel: dict[RemoteWheel, list[str]] = {}
        for path in paths:
            if path in self._owner:
                of_wheel.setdefault(self._owner[path], []).append(path)
        for wheel, members in of_wheel.items():
            wheel.preload(members)

    def extract(self, path: str, target: Path) -> None:
        """Stream one large file to disk."""
        self._owner[path].extract(path, target)

    def digest(self, path: str) -> str | None:
        wheel = self._owner.get(path)
        return None if wheel is None else wheel.members[path].sha256

    def mode(self, path: str) -> int:
        return self._owner[path].members[path].mode

    def children(self, directory: str) -> list[str]:
        return sorted(self._children.get(directory, ()))

    def distributions(self) -> dict[str, Distribution]:
        found = {}
        for wheel in self.wheels:
            dist = distribution_of(wheel.info_dir)
            assert dist is not None
            found[dist.name] = dist
        return found
