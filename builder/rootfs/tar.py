"""A layer's tar as a stream of entries, for input that may be hostile.

``tarfile`` reads extension headers and sparse maps of any declared size into memory, so only its
header block parser is used.  What is accepted is what Go's ``archive/tar``, which the container
runtimes use, would read the same way; anything else is refused.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.rootfs import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.rootfs.unpack import Unpacked

FILE, DIR, SYMLINK, HARDLINK, OTHER = "file", "dir", "symlink", "hardlink", "other"

_BLOCK = 512
_CHUNK = 256 << 10
_KINDS = {
    tarfile.REGTYPE: FILE,
    tarfile.AREGTYPE: FILE,
    tarfile.GNUTYPE_SPARSE: FILE,
    tarfile.DIRTYPE: DIR,
    tarfile.SYMTYPE: SYMLINK,
    tarfile.LNKTYPE: HARDLINK,
}
#: Types that have no data, whatever size their header claims.
_NO_DATA = (
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
)
#: Byte of a GNU sparse header, and of each block that follows it, that says "one more block".
_SPARSE_MORE, _SPARSE_NEXT = 482, 504
_SPARSE_BLOCKS = 1024


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
    #: stored with holes, so that its bytes are not the ones in the tar
    sparse: bool = False


class LayerTar:
    """Iterates over members; :meth:`chunks` gives the current one's data."""

    def __init__(self, stream: Unpacked, where: str) -> None:
        self._stream, self._where = stream, where
        self._left = self._padding = 0
        self._entries = self._name_bytes = 0

    def __iter__(self) -> Iterator[Member]:
        """Members in order.

        Raises:
            RemoteError: the tar is damaged, cut short, or beyond the limits.
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
                raise self._wrong("it ends in the middle of a file")
            self._left -= len(data)
            yield data

    # -- headers

    def _next(self) -> Member | None:
        records: dict[str, str] = {}
        gnu: dict[str, str] = {}
        extensions = 0
        while True:
            header = self._header()
            if header is None:
                return None
            if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                records = self._pax(self._extension(header))
            elif header.type == tarfile.XGLTYPE:  # runtimes do not apply these either
                self._extension(header)
            elif header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                text = self._text(self._extension(header).split(b"\0", 1)[0])
                gnu["path" if header.type == tarfile.GNUTYPE_LONGNAME else "linkpath"] = text
            else:
                return self._member(header, {**records, **gnu})
            extensions += 1
            if extensions > limits.EXTENSIONS:
                raise self._wrong(f"{extensions} extension headers in a row")

    def _header(self) -> tarfile.TarInfo | None:
        if not self._stream.skip(self._left):
            raise self._wrong("it ends in the middle of a file")
        padded = self._stream.skip(self._padding)  # which some writers leave out at the end
        self._left = self._padding = 0
        if not padded:
            return None
        block = self._stream.read(_BLOCK)
        if not block or not block.strip(b"\0"):
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise self._wrong(f"a header is damaged ({error})") from None
        if header.type == tarfile.GNUTYPE_SPARSE:
            self._skip_sparse_map(block)
        self._data(0 if header.type in _NO_DATA else header.size)
        return header

    def _data(self, size: int) -> None:
        """What follows the header: data, and zeros up to the next block."""
        if not 0 <= size <= limits.TAR_BYTES:
            raise self._wrong(f"an entry of {size} bytes")
        self._left, self._padding = size, -size % _BLOCK

    def _skip_sparse_map(self, block: bytes) -> None:
        more, count = block[_SPARSE_MORE], 0
        while more:
            block, count = self._stream.read(_BLOCK), count + 1
            if len(block) < _BLOCK or count > _SPARSE_BLOCKS:
                raise self._wrong("a sparse file has a map without end")
            more = block[_SPARSE_NEXT]

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if header.size > limits.EXTENSION_BYTES:
            raise self._wrong(f"an extension header of {header.size} bytes")
        return b"".join(self.chunks())

    def _pax(self, data: bytes) -> dict[str, str]:
        """Records of a pax header: ``LENGTH KEY=VALUE`` and a line feed each (POSIX.1-2001)."""
        records: dict[str, str] = {}
        at, end = 0, len(data.rstrip(b"\0"))
        while at < end:
            digits = data[at : at + 10].partition(b" ")[0]
            stop = at + (int(digits) if digits.isdigit() else 0)
            record = data[at + len(digits) + 1 : stop]
            key, equals, value = record.partition(b"=")
            if not equals or not value.endswith(b"\n") or stop > end:
                raise self._wrong("a pax header is damaged")
            records[self._text(key)] = self._text(value[:-1])
            at = stop
        return records

    def _member(self, header: tarfile.TarInfo, records: dict[str, str]) -> Member:
        kind = _KINDS.get(header.type, OTHER)
        if "size" in records and header.type not in _NO_DATA:
            self._data(self._number(records, "size", 0))
        sparse = any(key.startswith("GNU.sparse") for key in records)
        name = records.get("GNU.sparse.name", records.get("path", header.name))
        link = records.get("linkpath", header.linkname)
        return Member(
            path=self.clean(name),
            kind=kind,
            size=self._left if kind == FILE else 0,
            mode=header.mode & 0o7777,
            uid=self._number(records, "uid", header.uid),
            gid=self._number(records, "gid", header.gid),
            link=self.clean(link) if kind == HARDLINK else self._checked(link) * (kind == SYMLINK),
            sparse=sparse or header.type == tarfile.GNUTYPE_SPARSE,
        )

    def _number(self, records: dict[str, str], key: str, default: int) -> int:
        text = records.get(key)
        value = default if text is None else int(text) if text.isdigit() and len(text) < 20 else -1
        if not 0 <= value < 1 << 62:
            raise self._wrong(f"{key} is {text or default}")
        return value

    # -- names

    def clean(self, name: str) -> str:
        """A name as a path below the root; a leading slash means the root, as for the runtimes.

        Raises:
            RemoteError: it climbs with ``..``, or is longer than Linux allows.
        """
        parts = [part for part in self._checked(name).split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._wrong(f"the name {name!r} climbs out with '..'")
        longest = max((len(p.encode("utf-8", "surrogateescape")) for p in parts), default=0)
        if longest > limits.COMPONENT_BYTES or len(parts) > limits.DEPTH:
            raise self._wrong(f"the name {name[:60]!r}... is longer than a file system takes")
        return "/".join(parts)

    def _checked(self, name: str) -> str:
        if "\0" in name or len(name.encode("utf-8", "surrogateescape")) > limits.PATH_BYTES:
            raise self._wrong(f"the name {name[:60]!r}... is not one of a file")
        return name

    def _text(self, data: bytes) -> str:
        return data.decode("utf-8", "surrogateescape")

    def _wrong(self, what: str) -> RemoteError:
        return RemoteError(f"{self._where}: this is no layer of an image: {what}")
