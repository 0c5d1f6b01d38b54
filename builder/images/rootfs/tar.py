"""A layer's tar: reads a blob as a stream of entries, which may be hostile, and writes our own.

A blob is decompressed (gzip, zstd or none, by content), with limits.  Its tar is accepted if Go's
``archive/tar``, which container runtimes use, reads it the same way: headers that Go's reader
refuses are refused here, and every field has the same value (Go 1.24; the formats are POSIX.1-2001
and GNU tar's manual).  Anything else is refused, and so are entries that runtimes refuse or unpack
differently.

What we write has the same bytes for the same files: entries sorted by name, one timestamp, no user
names; gzip level 6 in members of 4 MiB each, with no name and no time in their headers.  A large
file of a wheel is a member of its own, with the wheel's own compressed bytes.  Other zlib builds
may compress the rest to different bytes; the tar, and so the diff_id, is the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
import tarfile
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from builder.common.deflate import Inflater
from builder.errors import RemoteError
from builder.images.rootfs import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.applier.trees import Content

# ------------------------------------------------------------------------------------ decompression


#: Packed bytes read at a time, and unpacked bytes given at a time.
_READ, _GIVE = 64 << 10, 256 << 10
_GZIP = b"\x1f\x8b"
GZIP, ZSTD, TAR = "gzip", "zstd", "tar"
_ZSTD = b"\x28\xb5\x2f\xfd"
#: Whiteouts of the OCI image specification, "Layer Filesystem Changeset".
WHITEOUT_PREFIX = ".wh."


class Readable(Protocol):
    """What is needed of a blob's stream."""

    def read(self, size: int, /) -> bytes: ...


class _Codec(Protocol):
    """One gzip member or zstd frame; as ``bz2.BZ2Decompressor``."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


def _gzip_member() -> _Codec:
    return Inflater(16 + zlib.MAX_WBITS)


def _zstd_frame() -> _Codec:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: limits.ZSTD_WINDOW_LOG}
    frame: _Codec = zstd.ZstdDecompressor(options=options)
    return frame


def _is_zstd(head: bytes) -> bool:
    """A zstd frame, or a skippable one (RFC 8878, section 3.1.2)."""
    return head[:4] == _ZSTD or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F)


class Unpacked:
    """A readable stream of unpacked bytes, bounded in total and in ratio to what was read."""

    def __init__(self, source: Readable, where: str, *, hashed: bool = False) -> None:
        self._source, self._where = source, where
        self._sha = hashlib.sha256() if hashed else None
        self._packed = self._produced = 0
        self._pending = self._fill()
        self._out = memoryview(b"")
        self._codec: _Codec | None = None
        head = self._pending[:4].ljust(4, b"\0")
        self._make = _gzip_member if head[:2] == _GZIP else _zstd_frame if _is_zstd(head) else None
        #: how the blob is packed: ``GZIP``, ``ZSTD`` or ``TAR``
        self.form = GZIP if self._make is _gzip_member else ZSTD if self._make else TAR

    def _fill(self) -> bytes:
        data = self._source.read(_READ)
        self._packed += len(data)
        return data

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes, fewer at the end only.

        Raises:
            RemoteError: the data is damaged, is cut short, or unpacks to more than is allowed.
        """
        if len(self._out) >= size:
            data, self._out = bytes(self._out[:size]), self._out[size:]
            return data
        parts = [bytes(self._out)]
        missing = size - len(self._out)
        self._out = memoryview(b"")
        while missing:
            block = self._block()
            if not block:
                break
            parts.append(block[:missing])
            self._out = memoryview(block)[missing:]
            missing -= min(missing, len(block))
        return b"".join(parts)

    def skip(self, size: int) -> bool:
        """Pass over bytes; false when the stream ends before."""
        while size > 0:
            taken = min(size, len(self._out))
            self._out, size = self._out[taken:], size - taken
            if size and not self._out:
                self._out = memoryview(self._block())
                if not self._out:
                    return False
        return True

    def finish(self) -> str:
        """Unpack the rest, as runtimes do; the digest of all that was unpacked, if it is hashed.

        Raises:
            RemoteError: the rest is damaged, or the blob is not what its digest says.
        """
        self._out = memoryview(b"")
        while self._block():
            pass
        return "" if self._sha is None else f"sha256:{self._sha.hexdigest()}"

    def _block(self) -> bytes:
        """The next unpacked bytes; empty at the end."""
        if self._make is None:
            block, self._pending = self._pending or self._fill(), b""
        else:
            block = self._unpack()
        if self._sha is not None:
            self._sha.update(block)
        self._produced += len(block)
        allowed = limits.FREE_BYTES + limits.RATIO * self._packed
        if self._produced > min(allowed, limits.TAR_BYTES):
            raise RemoteError(
                f"{self._where}: {self._packed} bytes unpack to more than {self._produced}; the "
                f"layer is refused"
            )
        return block

    def _unpack(self) -> bytes:
        assert self._make is not None
        while True:
            if self._codec is None and not self._next_member():
                return b""
            codec = self._codec
            assert codec is not None
            if codec.needs_input and not self._pending:
                self._pending = self._fill()
            starved = codec.needs_input and not self._pending
            block = self._decompress(codec, self._pending)
            self._pending = b""
            if codec.eof:
                self._pending, self._codec = codec.unused_data or b"", None
            if block:
                return block
            if starved and self._codec is not None:
                raise RemoteError(f"{self._where}: the compressed data ends too early")

    def _next_member(self) -> bool:
        """Begin the next gzip member or zstd frame.  Runtimes take nothing else, zeros neither."""
        self._pending = self._pending or self._fill()
        if not self._pending:
            return False
        assert self._make is not None
        self._codec = self._make()
        return True

    def _decompress(self, codec: _Codec, data: bytes) -> bytes:
        try:
            return codec.decompress(data, _GIVE)
        except MemoryError:
            raise
        except Exception as error:  # zlib.error, or the zstd library's own
            raise RemoteError(f"{self._where}: the compressed data is damaged: {error}") from None


# -------------------------------------------------------------------- header blocks and pax records


BLOCK = 512

#: Type flags (POSIX ustar, and the GNU and pax extensions).
OLD_FILE, FILE_FLAG, HARDLINK_FLAG, SYMLINK_FLAG = b"\0", b"0", b"1", b"2"
CHARACTER, DIRECTORY, PIPE = b"3", b"5", b"6"
PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK = b"x", b"g", b"L", b"K"
#: Types that have no data, whatever size their header claims.
NO_DATA = (HARDLINK_FLAG, SYMLINK_FLAG, CHARACTER, b"4", DIRECTORY, PIPE)

_USTAR, _GNU, _STAR_END = b"ustar\0", b"ustar  \0", b"tar\0"
_OCTAL = re.compile(rb"[0-7]+")
_DECIMAL = re.compile(rb"([+-]?)0*([0-9]{1,19})")
#: What a runtime takes for a string; it may hold no NUL.
_STRINGS = (b"path", b"linkpath", b"uname", b"gname")
_TIMES = (b"atime", b"mtime", b"ctime")
#: Pieces of a file with holes, one by one and in order (version 0.0 of GNU's form).
_PIECES = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")


class DamagedHeader(ValueError):
    """Go's reader refuses it; the message says why."""


@dataclass(slots=True)
class Header:
    """The fields of one header block."""

    type: bytes
    name: bytes
    link: bytes
    size: int
    mode: int
    uid: int
    gid: int
    #: major and minor number of a device
    device: tuple[int, int] = (0, 0)


def parse_block(block: bytes) -> Header:
    """A header block.

    Raises:
        DamagedHeader: its checksum is wrong, or a field is not a number.
    """
    _check_sum(block)
    header = Header(
        type=block[156:157],
        name=_string(block[0:100]),
        link=_string(block[157:257]),
        size=_number(block[124:136]),
        mode=_number(block[100:108]),
        uid=_number(block[108:116]),
        gid=_number(block[116:124]),
    )
    _number(block[136:148])  # the time, which must be a number too
    magic = block[257:265]
    if magic[:6] == _USTAR or magic == _GNU:  # anything else is of before POSIX
        header.device = _number(block[329:337]), _number(block[337:345])
        prefix = _prefix(block, magic)
        if prefix:
            header.name = prefix + b"/" + header.name
    return header


def _prefix(block: bytes, magic: bytes) -> bytes:
    """The prefix of the name.  GNU has two timestamps in its place."""
    if magic[:6] == _USTAR:
        if block[508:512] != _STAR_END:
            return _string(block[345:500])
        _number(block[476:488])
        _number(block[488:500])
        return _string(block[345:476])
    try:
        for field in (block[345:357], block[357:369]):
            if field[0]:
                _number(field)
    except DamagedHeader:  # early Go wrote a prefix here, and Go still reads it
        prefix = _string(block[345:500])
        return prefix if prefix.isascii() else b""
    return b""


def _check_sum(block: bytes) -> None:
    """The checksum of all bytes, unsigned or, as in Sun's tar, signed."""
    stated = _octal(block[148:156])
    rest = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(rest)
    if stated != unsigned and stated != unsigned - 256 * sum(byte > 127 for byte in rest):
        raise DamagedHeader("its checksum is wrong")


def _string(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _octal(field: bytes) -> int:
    text = _string(field.strip(b" \0"))
    if text and not _OCTAL.fullmatch(text):
        raise DamagedHeader(f"{text[:24]!r} is not an octal number")
    return int(text, 8) if text else 0


def _number(field: bytes) -> int:
    """Octal digits or, where the first bit is set, the bits after it in two's complement."""
    if not field[0] & 0x80:
        return _octal(field)
    bits = 8 * len(field) - 1
    value = int.from_bytes(field, "big") & ((1 << bits) - 1)
    if field[0] & 0x40:
        value -= 1 << bits
    if not -(1 << 63) <= value < 1 << 63:
        raise DamagedHeader(f"a number of {bits} bits is too large")
    return value


def decimal(text: bytes) -> int:
    """A number of a pax record.

    Raises:
        DamagedHeader: it is malformed, or has more than 64 bits.
    """
    match = _DECIMAL.fullmatch(text)
    value = int(match[1] + match[2]) if match else 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise DamagedHeader(f"{text[:24]!r} is not a number")
    return value


def parse_records(data: bytes) -> dict[bytes, bytes]:
    """Records of a pax header, ``LENGTH KEY=VALUE`` and a line feed each; empty values left out.

    Raises:
        DamagedHeader: they are of another form, or a known one has a value that it cannot have.
    """
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 24].partition(b" ")
        length = decimal(digits)
        start, stop = at + len(digits) + 1, at + length
        if (
            not space
            or length < 5
            or stop > len(data)
            or stop <= start
            or data[stop - 1 : stop] != b"\n"
        ):
            raise DamagedHeader("a pax record has the wrong length")
        key, equals, value = data[start : stop - 1].partition(b"=")
        if not key or not equals or b"\0" in (value if key in _STRINGS else key):
            raise DamagedHeader(f"{key[:24]!r} is not a pax record")
        if key in _PIECES:
            raise DamagedHeader("it describes a sparse file")
        records[key] = value
        at = stop
    return {key: value for key, value in records.items() if value}


def check_times(records: dict[bytes, bytes]) -> None:
    """Times of a pax header: seconds, and perhaps a fraction.

    Raises:
        DamagedHeader: a time is malformed.
    """
    for key in _TIMES:
        seconds, _, fraction = records.get(key, b"0").partition(b".")
        decimal(seconds)
        if fraction and not fraction.isdigit():
            raise DamagedHeader(f"{key.decode()} is {records[key][:24]!r}")


def is_sparse(records: dict[bytes, bytes]) -> bool:
    """Whether a pax header makes its file one with holes, in one of the versions that Go knows."""
    version = records.get(b"GNU.sparse.major", b""), records.get(b"GNU.sparse.minor", b"")
    if version != (b"", b""):
        return version in ((b"0", b"0"), (b"0", b"1"), (b"1", b"0"))
    return b"GNU.sparse.map" in records


# ------------------------------------------------------------------------------------------ entries


FILE, DIR, SYMLINK, HARDLINK, OTHER = "file", "dir", "symlink", "hardlink", "other"

_CHUNK = 256 << 10
_KINDS = {
    OLD_FILE: FILE,
    FILE_FLAG: FILE,
    DIRECTORY: DIR,
    SYMLINK_FLAG: SYMLINK,
    HARDLINK_FLAG: HARDLINK,
    CHARACTER: OTHER,
    b"4": OTHER,
    PIPE: OTHER,
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
            header = parse_block(block)
            self._data(header)
            if header.type == PAX:
                records = parse_records(self._extension())
            elif header.type == LONG_NAME:
                name = self._extension().partition(b"\0")[0]
            elif header.type == LONG_LINK:
                link = self._extension().partition(b"\0")[0]
            elif header.type == PAX_GLOBAL:
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
        size = 0 if header.type in NO_DATA else header.size
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
        if header.type == OLD_FILE and header.name.endswith(b"/"):
            header.type = DIRECTORY
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
        return default if text is None else decimal(text)

    def _check(self, name: str, header: Header, records: dict[bytes, bytes]) -> None:
        """Refuse ambiguous entries."""
        check_times(records)
        if is_sparse(records):
            raise self._wrong(f"{name!r} is a sparse file, which image builders do not write")
        if not (0 <= header.uid < limits.IDS and 0 <= header.gid < limits.IDS):
            raise self._wrong(f"{name!r} belongs to user {header.uid} and group {header.gid}")
        if not 0 <= header.mode < limits.MODES:
            raise self._wrong(f"{name!r} has mode {header.mode:o}")
        if any(key.startswith(_OVERLAY) for key in records):
            raise self._wrong(f"{name!r} sets attributes of the overlay file system")
        major, minor = header.device
        if header.type == CHARACTER and not major % _MAJORS and not minor % _MINORS:
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


# ------------------------------------------------------------------------------------------ writing


#: Deflate's own default; 9 takes three times as long for 1 % less of Python source.
LEVEL = 6
#: Bytes of the tar in one gzip member; RFC 1952 lets a file have many.
PIECE = 4 << 20
#: Bytes from which a file that is compressed already becomes a gzip member of its own.
ITS_OWN = 1 << 20
#: ``[mode, uid, gid]`` by default.
FOLDER = (0o755, 0, 0)


class _Hashed:
    """Forwards bytes, and computes the sha256 and count of all."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write, self._sha, self.size = write, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.passed(data)
        self._write(data)

    def passed(self, data: bytes) -> None:
        """Count bytes that were forwarded in another form."""
        self._sha.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"


def _member(data: bytes) -> bytes:
    """One gzip member."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return _framed(packer.compress(data) + packer.flush(), data)


def _framed(deflated: bytes, data: bytes) -> bytes:
    """A gzip member; its header does not depend on the machine (RFC 1952, section 2.3)."""
    sums = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + deflated + sums


def _member_of(deflated: bytes, data: bytes) -> bytes:
    """A gzip member with a file's compressed bytes, if they are exactly that."""
    inflater = Inflater(-zlib.MAX_WBITS)
    with suppress(zlib.error):
        same = inflater.decompress(deflated, len(data) + 1) == data
        if same and inflater.eof and not inflater.unused_data:
            return _framed(deflated, data)
    return _member(data)


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
            self._submit(_member, bytes(self._buffer[:PIECE]))
            del self._buffer[:PIECE]

    def write_deflated(self, deflated: bytes, data: bytes) -> None:
        """Write data whose compressed bytes are known."""
        if self._buffer:
            self._submit(_member, bytes(self._buffer))
            self._buffer.clear()
        self._submit(_member_of, deflated, data)

    def _submit(self, member: Callable[..., bytes], *data: bytes) -> None:
        self._pending.append(self._pool.submit(member, *data))
        while len(self._pending) > 2 * self._workers:
            self._write(self._pending.popleft().result())

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        try:
            if kind is None:
                self._submit(_member, bytes(self._buffer))
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


class _Tar:
    """Writes a tar, and hashes it."""

    def __init__(self, packer: _Packer, moved: Callable[[int], object]) -> None:
        self._packer, self._moved = packer, moved
        self.plain = _Hashed(packer.write)

    def header(self, info: tarfile.TarInfo) -> None:
        self.plain.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def file(self, data: bytes, deflated: bytes | None) -> None:
        if deflated is None:
            for at in range(0, len(data), PIECE):
                self.plain.write(data[at : at + PIECE])
                self._moved(len(data[at : at + PIECE]))
        else:
            self.plain.passed(data)
            self._packer.write_deflated(deflated, data)
            self._moved(len(data))
        self._fill(BLOCK)

    def end(self) -> None:
        """Two empty blocks, in a whole record."""
        self.plain.write(bytes(2 * BLOCK))
        self._fill(tarfile.RECORDSIZE)

    def _fill(self, unit: int) -> None:
        self.plain.write(bytes(-self.plain.size % unit))


def tar_layer(
    out: IO[bytes],
    files: Mapping[str, Content | None],
    epoch: int,
    owners: Owners | None = None,
    moved: Callable[[int], object] = lambda _size: None,
    deflated: Callable[[str], bytes | None] = lambda _origin: None,
) -> tuple[str, str, int]:
    """Write a gzipped layer tar; returns ``(digest, diff_id, compressed size)``.

    ``moved`` is called with the number of bytes written.  ``deflated`` gives the compressed bytes
    of a file by its origin, if it was read from where it is compressed.

    ``files`` maps absolute paths to content, or None for a removed file (a whiteout).
    Every parent folder has an entry, so that runtimes need not guess its mode.
    """
    owners = owners or Owners()
    compressed = _Hashed(out.write)
    with _Packer(compressed.write) as packer:
        tar = _Tar(packer, moved)
        for name, path, content in layer_entries(files):
            info = tarfile.TarInfo(name)
            info.mtime = epoch
            if content == "dir":
                info.type = tarfile.DIRTYPE
                info.mode, info.uid, info.gid = owners.folder(path)
                tar.header(info)
                continue
            info.mode, info.uid, info.gid = owners.of(path, content)
            info.size = 0 if content is None else content.size
            tar.header(info)
            if content is not None:
                data = content.read()
                tar.file(data, deflated(content.origin) if content.size >= ITS_OWN else None)
        tar.end()
    return compressed.digest, tar.plain.digest, compressed.size


def layer_entries(files: Mapping[str, Content | None]) -> Iterable[tuple[str, str, Any]]:
    """Name in the tar, absolute path, and content: folders before their files, all sorted."""
    named: dict[str, tuple[str, Any]] = {}
    for path, content in files.items():
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            named.setdefault(above, (f"/{above}", "dir"))
        if content is None:
            named["/".join([*parts[:-1], WHITEOUT_PREFIX + parts[-1]])] = (path, None)
        else:
            named["/".join(parts)] = (path, content)
    return [(name, *what) for name, what in sorted(named.items())]
