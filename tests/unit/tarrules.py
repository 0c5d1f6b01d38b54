"""What runtimes take and what they do not, case by case, each with what becomes of it.

``tests/engine/test_runtimes.py`` holds the same cases against umoci and containerd.
"""

from __future__ import annotations

import gzip

from tests.unit.imagefiles import Item, folder, hardlink, packed, symlink, tar_of
from tests.unit.tarcases import END, MAGICS, block, extension, padded, record, summed

#: Bytes of the layers, and what becomes of them: after "= " the tree, with the sizes of files; else
#: what is said.
Rules = dict[str, tuple[list[bytes], str]]

LINKED = [folder("v"), Item("v/a", b"1"), symlink("zz", "v")]
LOWER = [folder("a"), Item("a/x", b"1")]


def pax(**records: str) -> bytes:
    """A pax header; ``_`` stands for the dots of a key."""
    return extension(
        b"x", b"".join(record(key.replace("_", "."), text) for key, text in records.items())
    )


def raw(*parts: bytes) -> list[bytes]:
    """An image of one layer, of these bytes of a tar and its end."""
    return [gzip.compress(b"".join(parts) + END, 1, mtime=0)]


def head(name: bytes = b"good", kind: bytes = b"0", size: int = 0, **more: bytes) -> bytes:
    """A header."""
    return summed(block(name, kind, size, **more))  # type: ignore[arg-type]


def changed(at: int, data: bytes, **more: bytes) -> bytes:
    """A header with other bytes at one place."""
    made = block(b"good", **more)  # type: ignore[arg-type]
    made[at : at + len(data)] = data
    return summed(made)


def layers(*items: list[Item]) -> list[bytes]:
    """Layers, bottom first."""
    return [packed(tar_of(*layer)) for layer in items]


_, GNU, OLD = MAGICS[:3]
#: How the bytes of a tar are read.
READING: Rules = {
    "plain": (raw(head()), "= good:0"),
    "prefix of posix": (raw(head(prefix=b"evil")), "= evil/ evil/good:0"),
    "prefix of gnu": (raw(head(prefix=b"evil", magic=GNU)), "= evil/ evil/good:0"),
    "prefix of gnu that is a time": (raw(head(prefix=b"0000000\0", magic=GNU)), "= good:0"),
    "prefix of gnu not ascii": (raw(head(prefix=b"\xc3\xa9", magic=GNU)), "= good:0"),
    "prefix of before posix": (raw(head(prefix=b"evil", magic=OLD)), "= good:0"),
    "prefix of no known magic": (raw(head(prefix=b"evil", magic=b"ustar 00")), "= good:0"),
    "prefix of posix of any version": (
        raw(head(prefix=b"evil", magic=b"ustar\0  ")),
        "= evil/ evil/good:0",
    ),
    "prefix of star": (raw(changed(508, b"tar\0", prefix=b"evil" * 35)), "damaged"),
    "times of star": (
        raw(changed(476, b"1\0" + bytes(30) + b"tar\0", prefix=b"evil")),
        "= evil/ evil/good:0",
    ),
    "sum of signed bytes": (raw(summed(block(b"\xe9"), signed=True)), "= \udce9:0"),
    "wrong sum": (raw(head()[:148] + b"0000001\0" + head()[156:]), "checksum is wrong"),
    "size in base 256": (
        raw(changed(124, b"\x80" + bytes(10) + b"\3"), padded(b"abc")),
        "= good:3",
    ),
    "negative size": (raw(changed(124, b"\xff" * 12)), "an entry of -1 bytes"),
    "negative size of a folder": (raw(changed(124, b"\xff" * 12, kind=b"5")), "= good/"),
    "number of 64 bits and more": (raw(changed(108, b"\x80" + b"\xff" * 7)), "belongs to user"),
    "size too large": (raw(changed(124, b"\x80" + b"\xff" * 11)), "too large"),
    "time that is none": (raw(changed(136, b"9")), "not an octal number"),
    "device number that is none": (raw(changed(329, b"9")), "not an octal number"),
    "device number of before posix": (raw(changed(329, b"9", magic=OLD)), "= good:0"),
    "octal with spaces": (raw(changed(124, b"   3  \0     "), padded(b"abc")), "= good:3"),
    "octal with junk": (raw(changed(124, b"3\0junk".ljust(12, b"\0")), padded(b"abc")), "= good:3"),
    "pax path": (raw(pax(path="evil"), head()), "= evil:0"),
    "pax path that is empty": (raw(pax(path=""), head()), "= good:0"),
    "pax path after gnu's": (
        raw(extension(b"L", b"evil\0"), pax(path="other"), head()),
        "= evil:0",
    ),
    "gnu name with more after it": (raw(extension(b"L", b"evil\0junk"), head()), "= evil:0"),
    "gnu name that is empty": (raw(extension(b"L", b"\0"), pax(path="evil"), head()), "= evil:0"),
    "two pax headers": (raw(pax(path="evil"), pax(uid="0"), head()), "= good:0"),
    "pax size": (raw(pax(size="3"), head(), padded(b"abc")), "= good:3"),
    "pax size with a sign": (raw(pax(size="+03"), head(), padded(b"abc")), "= good:3"),
    "pax size below zero": (raw(pax(size="-3"), head()), "an entry of -3 bytes"),
    "pax size that is none": (raw(pax(size="3x"), head()), "not a number"),
    "pax time that is none": (raw(pax(mtime="x"), head()), "not a number"),
    "pax fraction that is none": (raw(pax(mtime="1.x"), head()), "mtime is"),
    "pax time below zero": (raw(pax(mtime="-1.5"), head()), "= good:0"),
    "pax path with nul": (raw(pax(path="a\0b"), head()), "not a pax record"),
    "pax comment with nul": (raw(pax(comment="a\0b"), head()), "= good:0"),
    "pax key that is empty": (raw(extension(b"x", b"5 =a\n"), head()), "not a pax record"),
    "pax padding": (raw(extension(b"x", b"7 a=bc\n\0"), head()), "not a number"),
    "pax length with a sign": (raw(extension(b"x", b"+11 path=e\n"), head()), "= e:0"),
    "pax length that lies": (
        raw(extension(b"x", record("path", "evil", 20)), head()),
        "wrong length",
    ),
    "pax header lost at a global one": (
        raw(pax(path="evil"), extension(b"g", b"6 a=b\n"), head()),
        "global pax header",
    ),
    "global header with the name of a file": (
        raw(head(), extension(b"g", record("path", "good"))),
        "global pax header",
    ),
    "sparse name alone": (
        raw(pax(GNU_sparse_name="evil"), head(size=3), padded(b"abc")),
        "= good:3",
    ),
    "sparse name and size": (
        raw(pax(GNU_sparse_name="evil", GNU_sparse_realsize="9"), head(size=3), padded(b"abc")),
        "= good:3",
    ),
    "sparse of a version nobody knows": (
        raw(pax(GNU_sparse_name="evil", GNU_sparse_major="2", GNU_sparse_minor="0"), head()),
        "= good:0",
    ),
    "sparse 1.0": (
        raw(
            pax(
                GNU_sparse_name="evil",
                GNU_sparse_major="1",
                GNU_sparse_minor="0",
                GNU_sparse_realsize="9",
            ),
            head(size=515),
            padded(b"1\n6\n3\n".ljust(512, b"\0") + b"abc"),
        ),
        "a sparse file",
    ),
    "sparse 0.1": (
        raw(
            pax(
                GNU_sparse_name="evil",
                GNU_sparse_map="6,3",
                GNU_sparse_numblocks="1",
                GNU_sparse_size="9",
            ),
            head(size=3),
            padded(b"abc"),
        ),
        "a sparse file",
    ),
    "sparse 0.0": (
        raw(
            pax(
                GNU_sparse_offset="6",
                GNU_sparse_numbytes="3",
                GNU_sparse_numblocks="1",
                GNU_sparse_size="9",
            ),
            head(size=3),
            padded(b"abc"),
        ),
        "a sparse file",
    ),
    "sparse of old gnu": (raw(head(kind=b"S", magic=GNU)), "runtimes do not unpack"),
    "contiguous file": (raw(head(kind=b"7")), "runtimes do not unpack"),
    "folder of before posix": (raw(head(b"good/", b"\0", magic=OLD)), "= good/"),
    "folder of before posix by pax": (raw(pax(path="evil/"), head(kind=b"\0", size=3)), "= evil/"),
    "file with a slash at its end": (raw(head(b"good/")), "= good:0"),
    "long name that is a folder's": (
        raw(extension(b"L", b"evil/\0", GNU), head(kind=b"\0")),
        "= evil/",
    ),
    "link with a size": (
        raw(head(kind=b"2", size=512, link=b"a"), head(b"next")),
        "= good->a next:0",
    ),
    "link to nothing": (raw(head(kind=b"2")), "a link to nothing"),
    "one block of zeros": ([gzip.compress(head() + bytes(512))], "= good:0"),
    "a block of zeros and more": (raw(head(), bytes(512), head(b"evil")), "data after"),
    "half a block of zeros": ([gzip.compress(head() + bytes(700))], "middle of a header"),
    "junk after the end": (raw(head(), END, b"junk"), "= good:0"),
    "no padding": ([gzip.compress(head(size=3) + b"abc")], "= good:3"),
    "short of data": ([gzip.compress(head(size=9) + b"abc")], "middle of a file"),
    "gzip in two parts": ([gzip.compress(head()) + gzip.compress(END)], "= good:0"),
    "zeros after gzip": ([raw(head())[0] + bytes(700)], "is damaged"),
    "three zeros after gzip": ([raw(head())[0] + bytes(3)], "ends too early|is damaged"),
    "junk after gzip": ([raw(head())[0] + b"junk after the end"], "is damaged"),
    "user beyond 32 bits": (raw(changed(108, b"\x80\0\0\1\0\0\0\0")), "belongs to user"),
    "mode of the kind too": (raw(changed(100, b"0100644\0")), "= good:0"),
    "mode of more bits": (raw(changed(100, b"7777777\0", kind=b"6")), "has mode 7777777"),
    "device 0/0": (raw(head(kind=b"3")), "a whiteout for some runtimes only"),
    "pipe": (raw(head(kind=b"6")), "= good?"),
    "attribute of the overlay": (
        raw(pax(SCHILY_xattr_user_overlay_opaque="y"), head(kind=b"5")),
        "attributes",
    ),
}

#: What the entries of layers come to.
LAYERS: Rules = {
    "whiteout below a link": (
        layers(LINKED, [Item("zz/.wh.a")]),
        "runtimes handle this differently",
    ),
    "opaque below a link": (
        layers(LINKED, [Item("zz/.wh..wh..opq")]),
        "runtimes handle this differently",
    ),
    "file below a link": (layers(LINKED, [Item("zz/b")]), "runtimes handle this differently"),
    "file below a link, then a folder": (
        layers(LINKED, [Item("zz/b"), folder("zz")]),
        "runtimes handle this differently",
    ),
    "a folder in place of a link": (
        layers(LINKED, [folder("zz"), Item("zz/b")]),
        "= v/ v/a:1 zz/ zz/b:0",
    ),
    "whiteout in a folder that is nowhere": (
        layers(LOWER, [Item("q/.wh.s")]),
        "runtimes handle this differently",
    ),
    "mark of aufs": (layers([Item(".wh..wh.plnk"), *LOWER]), "= a/ a/x:1"),
    "file in a folder without entry, below a whiteout": (
        layers(LOWER, [Item(".wh.a")], [folder("a"), Item("a/b/c")]),
        "below what another layer takes away",
    ),
    "file in a folder, below a whiteout": (
        layers(LOWER, [Item(".wh.a")], [folder("a"), folder("a/b"), Item("a/b/c")]),
        "= a/ a/b/ a/b/c:0",
    ),
    "file below a file": (layers([Item("a")], [Item("a/x")]), "runtimes handle this differently"),
    "file below a link of the layer": (
        layers([folder("b"), symlink("a", "b"), Item("a/x")]),
        "not a directory in this layer",
    ),
    "whiteout, then the folder": (layers(LOWER, [Item(".wh.a"), folder("a")]), "a whiteout of"),
    "whiteout, then in the folder": (layers(LOWER, [Item(".wh.a"), Item("a/y")]), "a whiteout of"),
    "folder, then its whiteout": (
        layers(LOWER, [folder("a"), Item(".wh.a")]),
        "whiteout of its own",
    ),
    "whiteout, then a file": (layers(LOWER, [Item(".wh.a"), Item("a", b"2")]), "= a:1"),
    "file, then its whiteout": (layers(LOWER, [Item("a"), Item(".wh.a")]), "whiteout of its own"),
    "whiteout twice": (layers(LOWER, [Item(".wh.a"), Item(".wh.a")]), "whiteout of its own"),
    "opaque": (layers(LOWER, [folder("a"), Item("a/.wh..wh..opq"), Item("a/y")]), "= a/ a/y:0"),
    "opaque after a file": (
        layers(LOWER, [folder("a"), Item("a/y"), Item("a/.wh..wh..opq")]),
        "= a/ a/y:0",
    ),
    "opaque without a folder": (
        layers(LOWER, [Item("a/.wh..wh..opq"), Item("a/e/c")]),
        "= a/ a/e/ a/e/c:0",
    ),
    "opaque after a folder without entry": (
        layers(LOWER, [Item("a/e/c"), Item("a/.wh..wh..opq")]),
        "after it added folders there",
    ),
    "opaque root": (layers(LOWER, [Item(".wh..wh..opq"), Item("b")]), "overlayfs does not support"),
    "file, then folder": (layers(LOWER, [Item("a"), folder("a")]), "as file and as dir"),
    "folder, then file": (layers(LOWER, [folder("a"), Item("a", b"2")]), "as dir and as file"),
    "folder with a folder, then file": (
        layers([folder("a"), folder("a/b"), Item("a", b"2")]),
        "as dir and as file",
    ),
    "folder, then a link in a circle": (
        layers([folder("a"), symlink("a", "/a")]),
        "as dir and as symlink",
    ),
    "hard link": (
        layers([*LOWER, hardlink("h", "a/x"), hardlink("i", "/h")]),
        "= a/ a/x:1 h:1 i:1",
    ),
    "hard link to a link": (layers([*LINKED, hardlink("h", "zz")]), "= h->v v/ v/a:1 zz->v"),
    "hard link into the layer below": (
        layers(LOWER, [hardlink("h", "a/x")]),
        "not an earlier file",
    ),
    "hard link to what comes later": (
        layers([hardlink("h", "x"), Item("x")]),
        "not an earlier file",
    ),
    "hard link to itself": (layers([Item("x"), hardlink("x", "x")]), "not an earlier file"),
    "hard link in place of its folder": (
        layers([Item("b/x"), hardlink("b", "b/x")]),
        "as implicit and as hardlink",
    ),
    "hard link to a folder": (layers([folder("d"), hardlink("h", "d")]), "not an earlier file"),
    "hard link through a link": (layers([*LINKED, hardlink("h", "zz/a")]), "not an earlier file"),
    "what a hard link leads to, replaced": (
        layers([Item("x"), hardlink("h", "x"), Item("x", b"2")]),
        "already has a hard link",
    ),
    "device 0/0 over a file": (
        layers(LOWER, [Item("a/x", type=b"3")]),
        "a whiteout for some runtimes only",
    ),
}
