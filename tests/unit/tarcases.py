"""Layers of chance, from a seed: tars whose headers lie, and layers that contradict each other."""

from __future__ import annotations

import gzip
import tarfile
from typing import TYPE_CHECKING

from tests.unit.imagefiles import Item, folder, hardlink, symlink, tar_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

END = bytes(1024)

# ------------------------------------------------------------------------------------------ headers

#: Magic and version of POSIX, GNU, before both, and near misses.
MAGICS = (b"ustar\x0000", b"ustar  \0", bytes(8), b"ustar\0  ", b"ustar 00", b"USTAR\x0000")
PLAIN = b"0000\0\0555126"
TYPES = PLAIN * 4 + b"347SxgLKXDMVNA"
#: Keys and values of which any pair is taken.
TAME_KEYS = ("path", "linkpath", "uname", "comment", "GNU.sparse.name", "GNU.sparse.realsize")
TAME_VALUES = ("", "a", "b", "d/a", "d/", "e/f", "evil", "a=b")
NAMES = (
    b"a",
    b"b",
    b"d",
    b"d/",
    b"d/a",
    b"d/e/",
    b"./a",
    b"/a",
    b"a/",
    b"d//a",
    b"",
    b".",
    b"\xff",
)
KEYS = (
    "path", "path", "linkpath", "size", "uid", "gid", "mtime", "atime", "uname", "comment", "",
    "GNU.sparse.name", "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.map",
    "GNU.sparse.realsize", "GNU.sparse.size", "GNU.sparse.numblocks", "GNU.sparse.offset",
    "GNU.sparse.numbytes", "SCHILY.xattr.user.overlay.opaque",
)  # fmt: skip
VALUES = (
    "", "a", "b", "d/a", "d/", "evil", "0", "1", "3", "512", "-1", "+3", "007", "1.5", "1.", "x",
    "y", "0,3", "0,1,2,1", "a=b", "9223372036854775807", "9223372036854775808", " 1",
    "1_0",
    "\0", "a\0b",
)  # fmt: skip
NUMBERS = (
    b"0000003\0", b"3", b"      3 ", b"3\0junk", b"\0\x003", b"9", b"-3", b"0x3", b"",
    b"777777777777",
    b"\x80\0\0\0\0\0\0\3", b"\xff\xff\xff\xff\xff\xff\xff\xfe", b"\x80\0\0\1\0\0\0\0", b"\xff" * 12,
    b"\x80" + b"\0" * 10 + b"\3", b"\xc0\0\0\0\0\0\0\3", b"\xbf" + b"\xff" * 11, b"1 2", b"+3",
)  # fmt: skip
#: Where the numbers of a header are, and their lengths.
FIELDS = ((100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (329, 8), (337, 8))


def block(
    name: bytes = b"a",
    kind: bytes = b"0",
    size: int = 0,
    *,
    mode: int = 0o644,
    link: bytes = b"",
    magic: bytes = MAGICS[0],
    prefix: bytes = b"",
) -> bytearray:
    """A header block, whose checksum is not right yet."""
    made = bytearray(512)
    for at, value in ((0, name), (157, link), (257, magic), (345, prefix)):
        made[at : at + len(value)] = value
    for at, text in ((100, f"{mode:07o}"), (108, "0" * 7), (116, "0" * 7), (124, f"{size:011o}"),
                     (136, "0" * 11), (329, "0" * 7), (337, "0" * 7)):  # fmt: skip
        made[at : at + len(text)] = text.encode()
    made[156:157] = kind
    return made


def summed(made: bytearray, *, signed: bool = False) -> bytes:
    """The block with its checksum."""
    made[148:156] = b" " * 8
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in made)
    made[148:156] = b"%06o\0 " % (total % (1 << 18))
    return bytes(made)


def padded(data: bytes) -> bytes:
    """Data up to the next block."""
    return data + bytes(-len(data) % 512)


def record(key: str, value: str, length: int = 0) -> bytes:
    """One pax record; with a length of its own, one that may lie."""
    body = f" {key}={value}\n".encode()
    total = len(body) + 1
    while len(str(total)) + len(body) != total:
        total += 1
    return str(length or total).encode() + body


def extension(kind: bytes, data: bytes, magic: bytes = MAGICS[0]) -> bytes:
    """An extension header with its data."""
    return summed(block(b"ext", kind, len(data), magic=magic)) + padded(data)


def _extension(dice: random.Random, *, wild: bool) -> bytes:
    kind = dice.choice(b"xxxxLKLg" if wild else b"xxLK")
    if kind in b"LK":
        name = dice.choice(NAMES) + dice.choice((b"", b"\0", b"\0junk"))
        return extension(bytes([kind]), name, dice.choice(MAGICS[:2]))
    records = b""
    for _ in range(dice.randrange(1, 4)):
        length = dice.randrange(1, 30) if wild and dice.random() < 0.03 else 0
        keys, values = (KEYS, VALUES) if wild else (TAME_KEYS, TAME_VALUES)
        records += record(dice.choice(keys), dice.choice(values), length)
    if wild and dice.random() < 0.04:
        records += dice.choice((b"\0", b"x", b"5 a=\n", b"+9 path=b\n", b"06 a=b\n"))
    return extension(bytes([kind]), records)


def _entry(dice: random.Random, *, wild: bool) -> bytes:
    data = dice.choice(
        (b"", b"", b"abc", b"x" * 512, b"y" * 513, b"2\n0\n3\n9\n0\n".ljust(515, b"\0"))
    )
    kind = bytes([dice.choice(TYPES if wild else PLAIN)])
    link = dice.choice((b"", b"a", b"d/a") if wild else (b"a",)) if kind in b"12" else b""
    said = len(data) if kind not in b"123456" or dice.random() < 0.1 else 0
    made = block(dice.choice(NAMES), kind, said, link=link, magic=dice.choice(MAGICS))
    if dice.random() < 0.3:
        made[345:348] = dice.choice((b"pre", b"d\0x", b"123", b"\xc3\xa9x"))
    if dice.random() < 0.1:
        made[508:512] = b"tar\0"
    if wild and dice.random() < 0.25:
        at, length = dice.choice(FIELDS)
        made[at : at + length] = dice.choice(NUMBERS)[:length].ljust(length, b"\0")
    if wild and dice.random() < 0.1:
        made[dice.randrange(512)] = dice.randrange(256)
    head = summed(made, signed=dice.random() < 0.2)
    if wild and dice.random() < 0.03:
        head = head[:148] + dice.choice((b"0" * 8, b" " * 8, b"999999\0 ")) + head[156:]
    return head + (padded(data) if kind not in b"123456" or said else b"")


def random_tar(dice: random.Random) -> bytes:
    """A few entries with extension headers; most of them are right, or nearly."""
    made, wild = b"", dice.random() < 0.5
    for _ in range(dice.randrange(1, 4)):
        while dice.random() < 0.4:
            made += _extension(dice, wild=wild)
        made += _entry(dice, wild=wild)
        if wild and dice.random() < 0.03:
            made += bytes(512)
    ends: tuple[Callable[[bytes], bytes], ...] = (
        lambda tar: tar + END + b"junk" * 9, lambda tar: tar, lambda tar: tar + bytes(512),
        lambda tar: tar + bytes(300), lambda tar: tar[: dice.randrange(len(tar))],
    )  # fmt: skip
    return dice.choice(ends)(made) if dice.random() < 0.1 else made + END


def random_blob(dice: random.Random) -> bytes:
    """A tar as a gzip blob, in one member or several, and what may follow it."""
    tar = random_tar(dice)
    cut = dice.randrange(len(tar) + 1)
    packed = gzip.compress(tar, 1, mtime=0)
    if dice.random() < 0.1:
        packed = gzip.compress(tar[:cut], 1, mtime=0) + gzip.compress(tar[cut:], 1, mtime=0)
    if dice.random() < 0.05:
        packed += dice.choice((bytes(1), bytes(700), b"junk", b"\x1f", gzip.compress(b"", mtime=0)))
    if dice.random() < 0.03:
        at = dice.randrange(len(packed))
        packed = packed[:at] + bytes([dice.randrange(256)]) + packed[at + 1 :]
    return packed


# ------------------------------------------------------------------------------------------- layers


def _path(dice: random.Random) -> str:
    return "/".join(dice.choice("abc") for _ in range(dice.choice((1, 1, 2, 2, 3))))


def _item(dice: random.Random, number: int) -> Item:
    path, chance = _path(dice), dice.random()
    if chance < 0.3:
        return folder(path, dice.choice((0o755, 0o700)))
    if chance < 0.6:
        return Item(path, f"{number}{dice.randrange(9)}".encode())
    if chance < 0.7:
        return symlink(path, dice.choice((".", "..", "/", "a", "/b", "a/b", "nowhere", "../c")))
    if chance < 0.78:
        return hardlink(path, _path(dice))
    if chance < 0.8:
        return Item(path, type=dice.choice((tarfile.FIFOTYPE, tarfile.CHRTYPE)))
    above = path.rpartition("/")[0]
    name = dice.choice((".wh..wh..opq", ".wh.a", ".wh.b", ".wh.c", ".wh.a", ".wh..wh.x"))
    return Item(f"{above}/{name}".strip("/"))


def random_layer(dice: random.Random, number: int) -> bytes:
    """Few names, so that they meet; most layers have the order and the folders of real ones."""
    items = [_item(dice, number) for _ in range(dice.randrange(1, 6))]
    if dice.random() < 0.6:
        above = {"/".join(item.name.split("/")[:end]) for item in items
                 for end in range(1, item.name.count("/") + 1)}  # fmt: skip
        named = {item.name: item for item in items if item.name not in above}
        items = sorted([*(folder(path) for path in above), *named.values()], key=lambda i: i.name)
    return gzip.compress(tar_of(*items), 1, mtime=0)


def random_layers(dice: random.Random) -> list[bytes]:
    """One to four layers."""
    return [random_layer(dice, number) for number in range(dice.choice((1, 2, 2, 3, 4)))]
