"""Reads wheels: their members by RECORD, remote ones by byte ranges."""

from __future__ import annotations

import csv
import io
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

from builder.applier.digests import is_sha256, sha256_hex
from builder.applier.failures import EXIT_REMOTE, ApplyError
from builder.applier.receipts import is_inside
from builder.applier.records import OWN_RECORD, RecordRow, parse_record
from builder.applier.sources import Member

if TYPE_CHECKING:
    from collections.abc import Callable


#: Bytes of a RECORD, and of its lines; the largest on the index that layers use has 2 MB.
_RECORD_BYTES, _RECORD_LINES = 32 << 20, 400_000
#: Bytes of the list of an archive's files, or of one file of it, that are read at once.
LIST_BYTES, FILE_BYTES = 16 << 20, 512 << 20
#: A file of more than this many bytes must not shrink to less than a hundredth.
_LARGE, _MOST_RATIO = 16 << 20, 100
#: What a damaged or hostile archive makes ``zipfile`` raise.
DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, RuntimeError,
    csv.Error, ArithmeticError,
)  # fmt: skip
#: Bytes of a name that Linux's file systems take.
_NAME_BYTES = 255
_STORED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SIGNATURES = (".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")


def wheel_members(archive: zipfile.ZipFile) -> list[Member]:
    """The files of a wheel, with their RECORD hashes.

    Raises:
        ApplyError: archive and RECORD do not list the same files, a path leaves the tree, or a
            file is encrypted, or larger than its packed bytes explain.
    """
    # an empty name has no last letter, which ``is_dir`` takes
    names = [info for info in archive.infolist() if not info.filename.endswith("/")]
    records = {n.filename for n in names if OWN_RECORD.fullmatch(n.filename)}
    if not records:  # a vendored distribution may bring a RECORD of its own
        raise ApplyError("the wheel has no RECORD", EXIT_REMOTE)
    if len(records) > 1:
        several = ", ".join(sorted(records)[:3])
        raise ApplyError(f"the wheel has several RECORDs: {several}", EXIT_REMOTE)
    (record_name,) = records
    try:
        data = _record(archive, record_name)
        rows = {row.path: row for row in parse_record(data)}
    except DAMAGED as error:
        raise ApplyError(f"the wheel's RECORD is damaged: {error}", EXIT_REMOTE) from None
    rows[record_name] = RecordRow(record_name, sha256_hex(data), len(data))
    members = [
        _member(info, rows.pop(info.filename, None))
        for info in {info.filename: info for info in names}.values()
        if not info.filename.endswith(_SIGNATURES)
    ]
    missing = [p for p, row in rows.items() if row.sha256 and not p.endswith(_SIGNATURES)]
    if missing:
        raise ApplyError(f"the wheel has no {missing[0]!r}, which its RECORD lists", EXIT_REMOTE)
    _refuse_files_as_folders([member.path for member in members])
    return members


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    _refuse_odd(info)
    if info.file_size > _RECORD_BYTES:
        raise ValueError(f"it has {info.file_size} bytes")
    data = archive.read(name)
    if data.count(b"\n") > _RECORD_LINES:
        raise ValueError(f"it has more than {_RECORD_LINES} lines")
    return data


def _member(info: zipfile.ZipInfo, row: RecordRow | None) -> Member:
    path = info.filename
    if path.startswith("/") or ".." in path.split("/"):
        raise ApplyError(f"wheel member {path!r} points outside of the tree", EXIT_REMOTE)
    if not is_inside(path) or max(map(len, path.encode().split(b"/"))) > _NAME_BYTES:
        raise ApplyError(f"wheel member {path!r} is not a path", EXIT_REMOTE)
    if row is None or not is_sha256(row.sha256):
        raise ApplyError(f"wheel member {path!r} has no hash in RECORD", EXIT_REMOTE)
    if row.size is not None and row.size != info.file_size:
        raise ApplyError(
            f"wheel member {path!r} has {info.file_size} bytes, RECORD says {row.size}", EXIT_REMOTE
        )
    _refuse_odd(info)
    executable = (info.external_attr >> 16) & 0o111
    return Member(path, row.sha256 or "", info.file_size, 0o755 if executable else 0o644)


def _refuse_odd(info: zipfile.ZipInfo) -> None:
    """Refuse what no installer unpacks, and what only grows."""
    path, size, packed = info.filename, info.file_size, info.compress_size
    if info.flag_bits & 1 or info.compress_type not in _STORED:
        raise ApplyError(f"wheel member {path!r} is encrypted, or packed unusually", EXIT_REMOTE)
    if (info.external_attr >> 16) & 0o170000 == 0o120000:
        raise ApplyError(f"wheel member {path!r} is a link", EXIT_REMOTE)
    stored = info.compress_type == zipfile.ZIP_STORED
    grows = size > _LARGE and size > packed * _MOST_RATIO
    padded = packed > size + size // 100 + 1000  # deflate adds five bytes to 64 kB
    if (stored and size != packed) or grows or padded:
        raise ApplyError(
            f"wheel member {path!r} has {size} bytes out of {packed} packed ones", EXIT_REMOTE
        )
    if info.header_offset < 0:
        raise ApplyError(f"wheel member {path!r} begins before the archive", EXIT_REMOTE)


def _refuse_files_as_folders(paths: list[str]) -> None:
    files = set(paths)
    folders = {path.rpartition("/")[0] for path in paths}
    for folder in folders:
        while folder:
            if folder in files:
                raise ApplyError(f"wheel member {folder!r} is also a folder", EXIT_REMOTE)
            folder = folder.rpartition("/")[0]


class RangeFile(io.RawIOBase):
    """A read-only file over byte ranges, for ``zipfile`` to read a remote archive through.

    Fetched ranges are kept, so that the central directory is asked for once.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], block: int = 1 << 16) -> None:
        super().__init__()
        self._size, self._fetch, self._block = size, fetch, block
        #: bytes that one read may ask for: those of a list of files, later those of a file
        self.limit = LIST_BYTES
        self._position = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def prefetch(self, start: int, stop: int) -> None:
        """Fetch [start, stop) in as few ranges as the blocks not yet held allow.

        Raises:
            BadZipFile: it is more than one read may ask for.
        """
        if stop - start > self.limit:
            raise zipfile.BadZipFile(f"{stop - start} bytes are too many for one read")
        first, last = start // self._block, (min(stop, self._size) - 1) // self._block
        run: list[int] = []
        for number in range(first, last + 2):
            if number <= last and number not in self._blocks:
                run.append(number)
            elif run:
                begin = run[0] * self._block
                end = min((run[-1] + 1) * self._block, self._size)
                data = self._fetch(begin, end)
                for index, held in enumerate(run):
                    self._blocks[held] = data[index * self._block : (index + 1) * self._block]
                run = []

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b""
        self.prefetch(self._position, stop)
        first, last = self._position // self._block, (stop - 1) // self._block
        data = b"".join(self._blocks[number] for number in range(first, last + 1))
        begin = self._position - first * self._block
        data = data[begin : begin + stop - self._position]
        self._position = stop
        return data
