"""Reads the tar of a layer as a stream of entries; the input may be hostile.

It accepts what Go's ``archive/tar``, which container runtimes use, reads the same way.
Anything else is refused, and so are entries that runtimes refuse or unpack differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.rootfs import limits, tarheader
from builder.rootfs.tarheader import BLOCK, DamagedHeader, Header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.rootfs.unpack import Unpacked

FILE, DIR, SYMLINK, HARDLINK, OTHER = "file", "dir", "symlink", "hardlink", "other"

_CHUNK = 256 << 10
_KINDS = {
    tarheader.OLD_FILE: FILE,
    tarheader.FILE: FILE,
    tarheader.DIRECTORY: DIR,
    tarheader.SYMLINK: SYMLINK,
    tarheader.HARDLINK: HARDLINK,
    tarheader.CHARACTER: OTHER,
    b"4": OTHER,
    tarheader.PIPE: OTHER,
}
#: Extended attributes with a special meaning for overlayfs.
_OVERLAY = (b"SCHILY.xattr.trusted.overlay.", b"SCHILY.xattr.user.overlay.")
#: Major and minor numbers that Linux supports.
_MAJORS, _MINORS = 1 << 12, 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One entry.  ``path`` is relative, without ``.`` and ``..``; '' is the root itself."""

    path: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    #: a symlink's target as it stands; a hard link's as a path like ``path``
    link: str


class LayerTar:
    """Iterates over members; :meth:`chunks` gives the current one's data."""

    def __init__(self, stream: Unpacked, where: str) -> None:
        self._stream, self._where = stream, where
        self._left = self._padding = 0
        self._entries = self._name_bytes = 0

    def __iter__(self) -> Iterator[Member]:
        """Members in order.

        Raises:
            RemoteError: the tar is damaged, truncated, or exceeds a limit.
        """
        while (member := self._next()) is not None:
            self._entries += 1
            self._name_bytes += len(member.path) + len(member.link)
            if self._entries > limits.ENTRIES or self._name_bytes > limits.NAME_BYTES:
                raise self._wrong(f"more than {self._entries - 1} entries")
            yield member

    def chunks(self) -> Iterator[bytes]:
        """The data of the current member, in pieces."""
        while self._left:
            data = self._stream.read(min(self._left, _CHUNK))
            if not data:
                raise self._wrong("the tar ends in the middle of a file")
            self._left -= len(data)
            yield data

    # -- headers

    def _next(self) -> Member | None:
        try:
            return self._parsed()
        except DamagedHeader as error:
            raise self._wrong(f"a header is damaged: {error}") from None

    def _parsed(self) -> Member | None:
        records: dict[bytes, bytes] = {}
        name = link = b""
        for _ in range(limits.EXTENSIONS + 1):
            block = self._block()
            if block is None:
                return None
            header = tarheader.parse_block(block)
            self._data(header)
            if header.type == tarheader.PAX:
                records = tarheader.parse_records(self._extension())
            elif header.type == tarheader.LONG_NAME:
                name = self._extension().partition(b"\0")[0]
            elif header.type == tarheader.LONG_LINK:
                link = self._extension().partition(b"\0")[0]
            elif header.type == tarheader.PAX_GLOBAL:
                # containerd removes what has the header's name, and umoci refuses it
                raise self._wrong("it has a global pax header, which runtimes handle differently")
            else:
                header.name = name or records.get(b"path", header.name)
                header.link = link or records.get(b"linkpath", header.link)
                return self._member(header, records)
        raise self._wrong(f"more than {limits.EXTENSIONS} extension headers in a row")

    def _block(self) -> bytes | None:
        """The next header block; None at the end: two zero blocks, or the end of the stream."""
        if not self._stream.skip(self._left):
            raise self._wrong("the tar ends in the middle of a file")
        padded = self._stream.skip(self._padding)  # which some writers leave out at the end
        self._left = self._padding = 0
        block = self._stream.read(BLOCK) if padded else b""
        if block == bytes(BLOCK):
            block = self._stream.read(BLOCK)
            if block == bytes(BLOCK):
                return None
            if len(block) == BLOCK:
                raise self._wrong("it has data after its end")
        if block and len(block) < BLOCK:
            raise self._wrong("the tar ends in the middle of a header")
        return block or None

    def _data(self, header: Header) -> None:
        """The data after a header, with padding up to the next block."""
        size = 0 if header.type in tarheader.NO_DATA else header.size
        if not 0 <= size <= limits.TAR_BYTES:
            raise self._wrong(f"an entry of {size} bytes")
        self._left, self._padding = size, -size % BLOCK

    def _extension(self) -> bytes:
        if self._left > limits.EXTENSION_BYTES:
            raise self._wrong(f"an extension header of {self._left} bytes")
        return b"".join(self.chunks())

    def _member(self, header: Header, records: dict[bytes, bytes]) -> Member:
        header.size = self._number(records, b"size", header.size)
        header.uid = self._number(records, b"uid", header.uid)
        header.gid = self._number(records, b"gid", header.gid)
        if header.type == tarheader.OLD_FILE and header.name.endswith(b"/"):
            header.type = tarheader.DIRECTORY
        self._data(header)
        name = self._checked(header.name)
        kind = _KINDS.get(header.type)
        if kind is None:
            raise self._wrong(f"{name!r} is of type {header.type!r}, which runtimes do not unpack")
        self._check(name, header, records)
        return Member(
            path=self.clean(name),
            kind=kind,
            size=self._left,
            mode=header.mode & 0o7777,
            uid=header.uid,
            gid=header.gid,
            link=self._link(kind, name, self._checked(header.link)),
        )

    def _number(self, records: dict[bytes, bytes], key: bytes, default: int) -> int:
        text = records.get(key)
        return default if text is None else tarheader.decimal(text)

    def _check(self, name: str, header: Header, records: dict[bytes, bytes]) -> None:
        """Refuse ambiguous entries."""
        tarheader.check_times(records)
        if tarheader.is_sparse(records):
            raise self._wrong(f"{name!r} is a sparse file, which image builders do not write")
        if not (0 <= header.uid < limits.IDS and 0 <= header.gid < limits.IDS):
            raise self._wrong(f"{name!r} belongs to user {header.uid} and group {header.gid}")
        if not 0 <= header.mode < limits.MODES:
            raise self._wrong(f"{name!r} has mode {header.mode:o}")
        if any(key.startswith(_OVERLAY) for key in records):
            raise self._wrong(f"{name!r} sets attributes of the overlay file system")
        major, minor = header.device
        if header.type == tarheader.CHARACTER and not major % _MAJORS and not minor % _MINORS:
            raise self._wrong(f"{name!r} is device 0/0, a whiteout for some runtimes only")

    # -- names

    def _link(self, kind: str, name: str, link: str) -> str:
        if kind == HARDLINK:
            return self.clean(link)
        if kind == SYMLINK and not link:
            raise self._wrong(f"{name!r} is a link to nothing")
        return link if kind == SYMLINK else ""

    def clean(self, name: str) -> str:
        """A name as a path below the root; a leading slash means the root, as in runtimes.

        Raises:
            RemoteError: it leaves the root with ``..``, or is longer than Linux allows.
        """
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._wrong(f"the name {name!r} leaves the root with '..'")
        longest = max((len(p.encode("utf-8", "surrogateescape")) for p in parts), default=0)
        if longest > limits.COMPONENT_BYTES or len(parts) > limits.DEPTH:
            raise self._wrong(f"the name {name[:60]!r}... is too long for a file system")
        return "/".join(parts)

    def _checked(self, name: bytes) -> str:
        text = name.decode("utf-8", "surrogateescape")
        if len(name) >= limits.PATH_BYTES:
            raise self._wrong(f"the name {text[:60]!r}... is not a file name")
        return text

    def _wrong(self, what: str) -> RemoteError:
        return RemoteError(f"{self._where}: this is not an image layer: {what}")
