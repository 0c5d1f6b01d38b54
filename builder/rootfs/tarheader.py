"""Parses header blocks and pax records of a tar like Go's ``archive/tar``.

Container runtimes are written in Go.  Headers that Go's reader refuses are refused here, and every
field has the same value (Go 1.24; the formats are POSIX.1-2001 and GNU tar's manual).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BLOCK = 512

#: Type flags (POSIX ustar, and the GNU and pax extensions).
OLD_FILE, FILE, HARDLINK, SYMLINK = b"\0", b"0", b"1", b"2"
CHARACTER, DIRECTORY, PIPE = b"3", b"5", b"6"
PAX, PAX_GLOBAL, LONG_NAME, LONG_LINK = b"x", b"g", b"L", b"K"
#: Types that have no data, whatever size their header claims.
NO_DATA = (HARDLINK, SYMLINK, CHARACTER, b"4", DIRECTORY, PIPE)

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
    said = _octal(block[148:156])
    rest = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(rest)
    if said != unsigned and said != unsigned - 256 * sum(byte > 127 for byte in rest):
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
    found = _DECIMAL.fullmatch(text)
    value = int(found[1] + found[2]) if found else 1 << 63
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
        DamagedHeader: one is malformed.
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
