"""Reads wheels: their members by RECORD, remote ones by byte ranges."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.failures import EXIT_REMOTE, ApplyError
from builder.applier.records import OWN_RECORD, parse_record
from builder.applier.sources import Member

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable


def wheel_members(archive: zipfile.ZipFile) -> list[Member]:
    """The files of a wheel, with their RECORD hashes.

    Raises:
        ApplyError: a file of the archive is missing from its RECORD, or its path leaves the tree.
    """
    names = [info for info in archive.infolist() if not info.is_dir()]
    record_name = next(
        (n.filename for n in names if OWN_RECORD.fullmatch(n.filename)), ""
    )  # a vendored distribution may bring a RECORD of its own
    if not record_name:
        raise ApplyError("the wheel has no RECORD", EXIT_REMOTE)
    record_data = archive.read(record_name)
    hashes = {row.path: row.sha256 for row in parse_record(record_data)}
    hashes[record_name] = sha256_hex(record_data)
    members = []
    for info in names:
        path = info.filename
        if path.startswith("/") or ".." in path.split("/"):
            raise ApplyError(f"wheel member {path!r} points outside of the tree", EXIT_REMOTE)
        digest = hashes.get(path)
        if digest is None:
            if path.endswith((".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")):
                continue
            raise ApplyError(f"wheel member {path!r} has no hash in RECORD", EXIT_REMOTE)
        executable = (info.external_attr >> 16) & 0o111
        members.append(Member(path, digest, info.file_size, 0o755 if executable else 0o644))
    return members


class RangeFile(io.RawIOBase):
    """A read-only file over byte ranges, for ``zipfile`` to read a remote archive through.

    Fetched ranges are kept, so that the central directory is asked for once.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], block: int = 1 << 16) -> None:
        super().__init__()
        self._size, self._fetch, self._block = size, fetch, block
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
        """Fetch [start, stop) in as few ranges as the blocks not yet held allow."""
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
