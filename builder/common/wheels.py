"""Reads released wheels by HTTP range, so that few files of a 500 MB wheel are downloaded."""

from __future__ import annotations

import contextlib
import dataclasses
import email.parser
import hashlib
import re
import shutil
import struct
import zipfile
import zlib
from functools import cache, cached_property
from typing import TYPE_CHECKING

import msgspec
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder.applier.receipts import OWN_RECORD
from builder.applier.sources import DAMAGED, FILE_BYTES, Member, RangeFile, wheel_members
from builder.applier.trees import Distribution, distribution_of
from builder.applier.values import ApplyError, normalize, sha256_hex
from builder.common.console import Bar, console, megabytes
from builder.common.deflate import Inflater
from builder.common.files import write_atomically
from builder.common.hints import CACHE, TEMPORARY, os_hint
from builder.common.paths import cache_dir, package_file
from builder.common.pypi import download, downloaded
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from email.message import Message
    from pathlib import Path

    from builder.common.pypi import PackageIndex, WheelFile


#: Size of the first range, from the end: the central directory of a vLLM wheel has about 600 kB.
_TAIL_LARGE, _TAIL_SMALL = 768 << 10, 96 << 10
#: Files closer than this are read in one range, which is cheaper than another request.
_GAP = 256 << 10
#: Bytes of a range of a large file.
_PIECE = 16 << 20
#: Bytes of METADATA that are parsed; vLLM's has 40 kB.
_METADATA_BYTES = 4 << 20
#: Bytes of a file's header in a zip archive, before its name (APPNOTE.TXT, 4.3.7).
_LOCAL_HEADER = 30


class RemoteWheel:
    """A wheel on the index, or its whole copy in the cache.

    What is read by range is held against the wheel's RECORD, which is not tied to the wheel's
    sha256 unless its own sha256 is pinned.  So it is cached by index and wheel, and never taken
    for what another index has.
    """

    def __init__(self, file: WheelFile, index: PackageIndex) -> None:
        if not file.sha256:
            raise RemoteError(f"the package index gives no sha256 for {file.filename}")
        self.file = file
        self._index = index
        self._ranges = cache_dir() / "ranges" / f"{index.key_of(file.distribution)}-{file.sha256}"
        self._memory: dict[str, bytes] = {}
        #: bytes of the current read
        self._bar = Bar("", None, "bytes")

    # -- the archive

    def _fetch(self, start: int, stop: int) -> bytes:
        import requests

        from builder.common.net import blocks, no_answer

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        pieces, size = [], 0
        url = self._index.address(self.file)
        try:
            session = self._index.session
            with session.get(url, headers=headers, stream=True) as response:
                wanted = stop - start if response.status_code == 206 else -1
                for piece in blocks(response, wanted + 1):
                    pieces.append(piece)
                    size += len(piece)
                    self._bar.advance(len(piece))
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{self.file.filename}: the download broke off: {no_answer(error, url)}",
                hint="run the same command again; completed downloads are reused",
            ) from error
        if size != wanted:
            more = "more than " if size > wanted > 0 else ""
            raise RemoteError(
                f"{self.file.filename}: the index answered {response.status_code} with "
                f"{more}{min(size, stop - start)} bytes instead of {stop - start}"
            )
        self._index.bytes_read += size
        return b"".join(pieces)

    @cached_property
    def size(self) -> int:
        """Size of the whole wheel, requested from the index if its page has none."""
        if self.file.size:
            return self.file.size
        import requests

        from builder.common.net import no_answer

        cached = self._ranges / "size"
        with contextlib.suppress(OSError, ValueError):
            return int(cached.read_bytes())
        url = self._index.address(self.file)
        try:
            response = self._index.session.head(url, allow_redirects=True)
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{self.file.filename}: the index does not give its size: {no_answer(error, url)}"
            ) from error
        length = response.headers.get("Content-Length", "")
        if not response.ok or not re.fullmatch(r"[1-9][0-9]{0,17}", length):
            raise RemoteError(f"{self.file.filename}: the index does not give its size")
        write_atomically(cached, length.encode())
        return int(length)

    @property
    def _whole(self) -> Path | None:
        return self._index.local.get(self.file.sha256) or downloaded(self.file)

    @cached_property
    def _stream(self) -> RangeFile:
        size = self.size
        stream = RangeFile(size, self._fetch, block=16 << 10)
        tail = _TAIL_LARGE if size > 50_000_000 else _TAIL_SMALL
        stream.prefetch(max(0, size - tail), size)
        return stream

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        try:
            if whole := self._whole:
                return zipfile.ZipFile(whole)
            console.detail(f"reading {self.file.filename} ({megabytes(self.size)}) by range")
            archive = zipfile.ZipFile(self._stream)
        except DAMAGED as error:
            raise RemoteError(f"{self.file.filename} is not a wheel: {error}") from error
        self._stream.limit = FILE_BYTES
        return archive

    # -- the interface

    @cached_property
    def members(self) -> dict[str, Member]:
        """Files by path.

        Raises:
            RemoteError: the download fails, or it is not a wheel of that name, or not the one
                whose RECORD is pinned.
        """
        cached = self._list_file
        if cached is None:
            return self._checked_members(self._listed())
        with contextlib.suppress(OSError, ValueError):
            rows = msgspec.json.decode(cached.read_bytes(), type=list[Member])
            return self._checked_members(rows)
        listed = self._listed()
        members = self._checked_members(listed)
        write_atomically(cached, msgspec.json.encode(listed))
        return members

    @property
    def _list_file(self) -> Path | None:
        """The place of the list of files: beside the whole wheel, else with its ranges.

        None for a wheel in a folder of the user's.  Whoever serves ranges does not decide what a
        whole wheel has, so the two are apart.
        """
        if whole := downloaded(self.file):
            return whole.with_name("contents.json")
        return None if self._whole else self._ranges / "members.json"

    def _listed(self) -> list[Member]:
        try:
            return wheel_members(self._archive)
        except ApplyError as error:
            raise RemoteError(f"{self.file.filename}: {error}") from error

    def _checked_members(self, listed: Iterable[Member]) -> dict[str, Member]:
        """The files by path, if the wheel is what its file name says, and its RECORD as pinned."""
        members = {member.path: member for member in listed}
        info_dir = _info_dir(members)
        dist = distribution_of(info_dir)
        name, version, *_ = parse_wheel_filename(self.file.filename)
        if dist is None or (dist.name, _version(dist.version)) != (normalize(name), version):
            raise RemoteError(f"{self.file.filename} has the metadata of another: {info_dir}")
        pinned, record = self._pinned, members[f"{info_dir}/RECORD"].sha256
        if pinned and record != pinned:
            raise RemoteError(
                f"{self.file.filename}: the sha256 of its RECORD is {record}, pinned is {pinned}: "
                "the package index serves other contents under the wheel's sha256",
                hint="pip config list",
            )
        self._index.records[self.file.sha256] = record
        return members

    @property
    def _pinned(self) -> str:
        return self.file.record or released_records().get(self.file.sha256, "")

    @cached_property
    def info_dir(self) -> str:
        """The wheel's own ``.dist-info`` directory, not a vendored one."""
        return _info_dir(self.members)

    @property
    def record(self) -> str:
        """The sha256 of its RECORD, which identifies the bytes of every file."""
        return self.members[f"{self.info_dir}/RECORD"].sha256

    @property
    def is_known(self) -> bool:
        """Whether its files were hashed: as the whole wheel, or down from a pinned RECORD."""
        return self._whole is not None or (bool(self._pinned) and self.record == self._pinned)

    def metadata(self) -> Message:
        """The headers of its METADATA.

        Raises:
            RemoteError: it is missing, or names another distribution or version.
        """
        path = f"{self.info_dir}/METADATA"
        data = self.read(path)
        if self._whole and not (kept := self._range_file(path)).exists():
            write_atomically(kept, data)  # each plan reads it, so the archive is not opened again
        if len(data) > _METADATA_BYTES:
            raise RemoteError(f"{self.file.filename}: its METADATA has {len(data)} bytes")
        text = data.decode("utf-8", "replace")
        headers = email.parser.Parser().parsestr(text, headersonly=True)
        name, version, *_ = parse_wheel_filename(self.file.filename)
        named = str(headers.get("Name", "")), str(headers.get("Version", ""))
        if (normalize(named[0]), _version(named[1])) != (normalize(name), version):
            raise RemoteError(
                f"{self.file.filename}: its METADATA is that of {named[0][:80]!r} {named[1][:80]!r}"
            )
        return headers

    def read(self, path: str) -> bytes:
        """One file, checked against RECORD.

        Raises:
            RemoteError: the download fails, there is no such file, or the bytes do not match
                RECORD.
        """
        if path not in self.members:
            raise RemoteError(f"{self.file.filename} has no {path}")
        self.preload([path])
        return self._memory[path]

    def read_whole(self, path: str) -> bytes:
        """One file of the whole wheel, which is downloaded if it is not there.

        Raises:
            RemoteError: the download fails, or there is no such file.
        """
        self.download()
        if path not in self.members:
            raise RemoteError(f"{self.file.filename} has no {path}")
        _whole_wheels[self.file.filename] = self
        return self._checked(path)

    def deflated(self, path: str) -> bytes | None:
        """The compressed bytes of a file of the whole wheel; None if it is not compressed."""
        info = self._info(path)
        if self._whole is None or info.compress_type != zipfile.ZIP_DEFLATED:
            return None
        with self._whole.open("rb") as archive:
            archive.seek(info.header_offset)
            archive.seek(_begin(info, archive.read(_LOCAL_HEADER)))
            return archive.read(info.compress_size)

    def preload(self, paths: Iterable[str]) -> None:
        """Read many files with few range requests."""
        missing = []
        for path in paths:
            if path in self._memory or path not in self.members:
                continue
            with contextlib.suppress(OSError):
                data = self._range_file(path).read_bytes()
                if sha256_hex(data) == self.members[path].sha256:
                    self._memory[path] = data
                    continue
            missing.append(path)
        if missing:
            self._prefetch(missing)
        for path in missing:
            data = self._checked(path)
            if not self._whole:
                write_atomically(self._range_file(path), data)
            self._memory[path] = data

    def _range_file(self, path: str) -> Path:
        """The place of a file that was read by range: by what it holds."""
        return self._ranges / "files" / self.members[path].sha256

    def _checked(self, path: str) -> bytes:
        if self.members[path].size > FILE_BYTES:
            raise RemoteError(f"{self.file.filename}:{path} is too large to be read at once")
        try:
            data = self._archive.read(path)
        except DAMAGED as error:
            raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
        if sha256_hex(data) != self.members[path].sha256:
            raise RemoteError(f"{self.file.filename}:{path} does not match its RECORD")
        return data

    def _info(self, path: str) -> zipfile.ZipInfo:
        """Where a file lies, if the archive still lists it as when its members were cached."""
        info = self._archive.NameToInfo.get(path)
        moved = info is None or info.file_size != self.members[path].size
        if info is None or moved or info.header_offset < 0:
            raise RemoteError(f"{self.file.filename}:{path} is not as listed before")
        return info

    def _prefetch(self, paths: Sequence[str], bar: Bar | None = None) -> None:
        infos = sorted((self._info(p) for p in paths), key=lambda i: i.header_offset)
        if self._whole:
            return
        runs: list[tuple[int, int]] = []
        for info in infos:
            start = info.header_offset
            # the local header, the name, and an extra field that is short in wheels
            stop = start + _LOCAL_HEADER + len(info.filename.encode()) + 256 + info.compress_size
            if runs and start - runs[-1][1] < _GAP:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        title, total = f"reading {self.file.release}", sum(stop - start for start, stop in runs)
        if total > FILE_BYTES:
            raise RemoteError(
                f"{self.file.filename}: {total} bytes are too many to be read at once"
            )
        own = console.progress(title, total, leaves_line=False)
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
        digest = hashlib.sha256()
        try:
            with target.open("wb") as out:
                for plain in self._pieces(path):
                    digest.update(plain)
                    out.write(plain)
        except DAMAGED as error:
            raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
        except OSError as error:
            raise UsageError(
                f"cannot write {path} to {target.parent}: {error.strerror}",
                hint=os_hint(error, TEMPORARY),
            ) from error
        if digest.hexdigest() != self.members[path].sha256:
            raise RemoteError(f"{self.file.filename}:{path} does not match its RECORD")

    def _pieces(self, path: str) -> Iterator[bytes]:
        """The bytes of a file, never more than its size."""
        info = self._info(path)
        if self._whole:
            with self._archive.open(info) as stream:
                while piece := stream.read(_PIECE):
                    yield piece
            return
        head = self._fetch(info.header_offset, info.header_offset + _LOCAL_HEADER)
        start = _begin(info, head)
        stop = start + info.compress_size
        inflater, left = Inflater(-zlib.MAX_WBITS), info.file_size
        for at in range(start, stop, _PIECE):
            piece = self._fetch(at, min(stop, at + _PIECE))
            if info.compress_type == zipfile.ZIP_STORED:
                yield piece[:left]
                left -= len(piece[:left])
                continue
            more = True
            while more and left > 0:
                plain = inflater.decompress(piece, min(left, _PIECE))
                piece, more = b"", not inflater.needs_input and bool(plain)
                left -= len(plain)
                yield plain

    def packed_size(self, path: str) -> int:
        """Compressed size of one file in the wheel."""
        return self._info(path).compress_size

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
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if self.members[path].size > _PIECE:
                    self._extract(path, target)
                else:
                    target.write_bytes(self._checked(path))
                target.chmod(self.members[path].mode)
            except OSError as error:
                raise UsageError(
                    f"cannot write {path} to {folder}: {error.strerror}",
                    hint=os_hint(error, CACHE),
                ) from error

    def download(self) -> Path:
        """Download the whole wheel, checked against its sha256; shows progress.

        Raises:
            RemoteError: the download fails, its digest does not match, or the index gave other
                contents by range.
        """
        if self._whole:  # the index need not say how large it is
            return self._whole
        by_range = self.__dict__.pop("members", None)
        path = download(dataclasses.replace(self.file, size=self.size), self._index)
        self.__dict__.pop("_archive", None)
        if by_range is not None and by_range != self.members:
            shutil.rmtree(self._ranges, ignore_errors=True)
            raise RemoteError(
                f"{self.file.filename}: by range, the package index served other contents than "
                "those of the whole wheel",
                hint="pip config list",
            )
        return path


def _begin(info: zipfile.ZipInfo, head: bytes) -> int:
    """Where a file's bytes begin in the archive, by its local header."""
    name, extra = struct.unpack_from("<HH", head, 26)
    return info.header_offset + _LOCAL_HEADER + int(name) + int(extra)


#: Wheels of which files were read with `RemoteWheel.read_whole` in this process, by file name.
_whole_wheels: dict[str, RemoteWheel] = {}


def deflated(origin: str) -> bytes | None:
    """The compressed bytes of a file that was read of a whole wheel: ``filename:path``, or None."""
    filename, _, path = origin.partition(":")
    wheel = _whole_wheels.get(filename)
    return wheel.deflated(path) if wheel is not None and path in wheel.members else None


def _info_dir(members: Mapping[str, Member]) -> str:
    records = (path for path in members if path.endswith("/RECORD"))
    return next(path for path in records if OWN_RECORD.fullmatch(path)).partition("/")[0]


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except ValueError:
        return None


@cache
def released_records() -> Mapping[str, str]:
    """The sha256 of the RECORD of released wheels, by the sha256 of the wheel.

    ``builder/data/records.txt`` has one line for each: both, and the file name.
    """
    lines = package_file("data", "records.txt").read_text("ascii").splitlines()
    words = (line.split() for line in lines if not line.startswith("#"))
    return {wheel: record for wheel, record, _ in words}


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

    def wheel_of(self, path: str) -> RemoteWheel | None:
        """The wheel that a file comes from."""
        return self._owner.get(path)

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
        by_name: dict[str, Distribution] = {}
        for wheel in self.wheels:
            dist = distribution_of(wheel.info_dir)
            assert dist is not None
            by_name[dist.name] = dist
        return by_name
