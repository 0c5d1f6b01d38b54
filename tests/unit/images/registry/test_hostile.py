"""Layers made to do harm: refused, or harmless; bounded in memory and time; nothing is written."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from builder.errors import RemoteError
from builder.images.rootfs import limits
from builder.images.rootfs.tar import LayerTar, Unpacked
from tests.unit.imagefiles import (
    CONFIG,
    Item,
    folder,
    hardlink,
    packed,
    put_image,
    symlink,
    tar_of,
    view_of,
)


def header(name: str = "x", kind: bytes = b"0", size: int = 0, **more: Any) -> bytes:
    """One header block, with any claim in it."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def extension(kind: bytes, data: bytes) -> bytes:
    """An extension header with its data."""
    return header("ext", kind, len(data)) + data + bytes(-len(data) % 512)


def pax(text: str) -> bytes:
    """A pax header with one record ``KEY=VALUE``."""
    body = f" {text}\n".encode()
    length = len(body) + len(str(len(body)))
    length += len(str(length)) - len(str(len(body)))
    return extension(b"x", f"{length}".encode() + body)


END = bytes(1024)


def read(tar: bytes, pack: Any = bytes) -> list[Any]:
    """Every member of a layer, its data read too."""
    reader = LayerTar(Unpacked(io.BytesIO(pack(tar)), "layer"), "layer")
    return [(member, b"".join(reader.chunks())) for member in reader]


def scanned(tmp_path: Path, blob: bytes) -> Any:
    view = view_of(tmp_path / "layout", blob)
    view.names("/")
    return view


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../x", "leaves the root"),
        ("a/../../x", "leaves the root"),
        ("a/..", "leaves the root"),
        ("/..", "leaves the root"),
        ("n" * 256, "too long for a file system"),
        ("/".join(["d"] * 201), "too long for a file system"),
        ("n/" * 2100, "is not a file name"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, message: str) -> None:
    for blob in (tar_of(Item(name)), tar_of(hardlink("ok", name)), tar_of(folder(name))):
        with pytest.raises(RemoteError, match=message):
            read(blob)
    with pytest.raises(RemoteError, match=message):
        scanned(tmp_path, packed(tar_of(Item(name))))


def test_a_nul_in_a_name() -> None:
    with pytest.raises(RemoteError, match="is not a pax record"):
        read(pax("path=a\0b") + header() + END)


def test_an_overlong_link_is_not_kept() -> None:
    with pytest.raises(RemoteError, match="is not a file name"):
        read(tar_of(symlink("l", "x" * 5000)))


def test_an_absolute_name_is_relative_to_the_image(tmp_path: Path) -> None:
    seen = scanned(tmp_path, packed(tar_of(Item("//etc/./passwd", b"theirs"))))
    assert seen.read("/etc/passwd") == b"theirs"


def test_links_never_leave_the_image(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"ours")
    up = "../" * 30
    seen = scanned(
        tmp_path,
        packed(tar_of(symlink("a", str(secret)), symlink("b", f"{up}{secret}"), symlink("d", up))),
    )
    for path in ("/a", "/b", f"/d{secret}"):
        assert seen.read(path) is None


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Item("a", b"file"), Item("a/b")], "not a directory in this layer"),
        ([symlink("a", "/etc"), Item("a/passwd", b"x")], "not a directory in this layer"),
        ([symlink("a", "."), Item("a/a/b")], "not a directory in this layer"),
        ([Item("a", type=tarfile.FIFOTYPE), Item("a/b")], "not a directory in this layer"),
        ([Item(".wh.")], "a whiteout without a name"),
        ([Item("a/.wh...")], "a whiteout without a name"),
        ([Item("./", b"root")], "its root is not a directory"),
    ],
)
def test_layers_that_contradict_themselves(tmp_path: Path, items: list[Item], message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        scanned(tmp_path, packed(tar_of(*items)))
    assert not list((Path(os.environ["SPARK_BUILD_CACHE"]) / "layers").iterdir())


def test_a_refused_layer_leaves_no_index_behind(tmp_path: Path) -> None:
    layer = tar_of(Item("good", b"1"), Item("../bad"))
    for _ in range(2):
        with pytest.raises(RemoteError, match="leaves the root"):
            scanned(tmp_path, packed(layer))


# ----------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(size=1 << 60), "an entry of 1152921504606846976 bytes"),
        (header(size=-5), "an entry of -5 bytes"),
        (pax("size=-1") + header(), "an entry of -1 bytes"),
        (pax(f"size={1 << 62}") + header(), "an entry of 4611686018427387904 bytes"),
        (pax("size=" + "9" * 5000) + header(), "not a number"),
        (pax("uid=x") + header(), "not a number"),
        (header(uid=-7), "belongs to user -7"),
        (header(kind=b"x", size=1 << 36), "an extension header of 68719476736 bytes"),
        (header(kind=b"L", size=1 << 30), "an extension header of 1073741824 bytes"),
        (header(kind=b"K", size=2 << 20), "an extension header of 2097152 bytes"),
        (header(kind=b"g", size=2 << 20), "a global pax header"),
        (extension(b"x", b"no record") + header(), "not a number"),
        (extension(b"x", b"99 a=b\n") + header(), "the wrong length"),
        (extension(b"x", b"0 a=b\n") + header(), "the wrong length"),
        (extension(b"x", b"5 ab\n") + header(), "is not a pax record"),
        (pax("a=b") * 20 + header(), "more than 8 extension headers in a row"),
        (extension(b"L", b"n" * 300) * 20, "more than 8 extension headers in a row"),
        (header()[:300], "middle of a header"),
        (b"\x01" * 512, "a header is damaged"),
        (header(size=1000) + b"short", "ends in the middle of a file"),
        (pax("a=b")[:515], "ends in the middle of a file"),
        (b"<html>this is a login page</html>" * 40, "a header is damaged"),
    ],
)
def test_headers_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        read(data + END if len(data) % 512 == 0 and "middle" not in message else data)


def test_a_pax_header_with_many_records_is_read() -> None:
    records = b"".join(b"8 k%02d=v\n" % (n % 100) for n in range(120_000))
    assert read(extension(b"x", records) + header("n") + END)[0][0].path == "n"


def test_extensions_are_applied_as_runtimes_apply_them() -> None:
    long = "d/" * 90 + "name"
    data = pax(f"path={long}") + header("short", uid=3)
    data += extension(b"L", f"{long}2\0".encode()) + header("short")
    data += extension(b"K", b"target\0") + header("link", b"2", linkname="x")
    data += pax("uid=2097152") + pax("mtime=1.5") + header("big") + END
    members = [member for member, _ in read(data)]
    assert [m.path for m in members] == [long, f"{long}2", "link", "big"]
    assert members[2].link == "target"
    assert members[3].uid == 0, "each pax header stands for itself"


def test_folders_and_links_never_have_data() -> None:
    data = header("d", b"5", size=1 << 30) + header("l", b"2", size=512, linkname="d")
    data += header("f", size=3)
    assert [(m.path, held) for m, held in read(data + b"abc" + bytes(509) + END)] == [
        ("d", b""), ("l", b""), ("f", b"abc"),
    ]  # fmt: skip


def test_a_tar_that_ends_after_its_last_byte() -> None:
    """Without padding and end: some writers leave that out, and runtimes do not mind."""
    assert read(header("f", size=3) + b"abc")[0][1] == b"abc"


def test_too_many_entries_and_too_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tar_of(*(Item(f"name{n}") for n in range(12)))
    monkeypatch.setattr(limits, "ENTRIES", 10)
    with pytest.raises(RemoteError, match="more than 10 entries"):
        read(layer)
    monkeypatch.setattr(limits, "ENTRIES", 12)
    assert len(read(layer)) == 12
    monkeypatch.setattr(limits, "NAME_BYTES", 40)
    with pytest.raises(RemoteError, match="entries"):
        read(layer)


def test_a_file_too_large_to_read_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scanned(tmp_path, packed(tar_of(Item("etc/big", b"x" * 1000))))
    monkeypatch.setattr(limits, "FILE_BYTES", 999)
    with pytest.raises(RemoteError, match=r"etc/big has 1\.0 kB"):
        seen.read("/etc/big")


# ------------------------------------------------------------------------------------- compression

GOOD = tar_of(Item("a", b"1" * 5000), Item("b", os.urandom(3000)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress], ids=["tar", "gzip", "zstd"])
def test_every_compression_reads_the_same(pack: Any) -> None:
    assert [member.path for member, _ in read(GOOD, pack)] == ["a", "b"]


def members_of(tar: bytes) -> bytes:
    """Gzip members, as some writers leave them."""
    return gzip.compress(tar[:1000]) + gzip.compress(b"") + gzip.compress(tar[1000:])


def frames_of(tar: bytes) -> bytes:
    """Zstd frames with skippable ones between them, as zstd:chunked has."""
    skip = b"\x5e\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"chunk-toc"
    return skip + zstd.compress(tar[:1000]) + skip + zstd.compress(tar[1000:]) + skip


@pytest.mark.parametrize("pack", [members_of, frames_of])
def test_blobs_in_several_parts(pack: Any) -> None:
    assert [(m.path, data) for m, data in read(GOOD, pack)] == [
        (m.path, data) for m, data in read(GOOD)
    ]


def test_a_layer_for_lazy_pulling(tmp_path: Path) -> None:
    """eStargz: a gzip member for each file, a landmark, a table of contents and a footer."""
    held = [Item("etc/os", b"1"), Item("big", b"2" * 9000), Item(".prefetch.landmark", b"\x0f")]
    parts = [tar_of(item) for item in held]
    parts = [
        part[: 512 + -(-len(item.data) // 512) * 512]
        for part, item in zip(parts, held, strict=True)
    ]
    toc = b'{"version": 1, "entries": []}'
    end = header("stargz.index.json", size=len(toc)) + toc + bytes(-len(toc) % 512) + END
    extra = b"SG" + (22).to_bytes(2, "little") + b"%016xSTARGZ" % 4242
    footer = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + len(extra).to_bytes(2, "little") + extra
    footer += b"\x01\0\0\xff\xff" + bytes(8)
    blob = b"".join(gzip.compress(part, mtime=0) for part in [*parts, end]) + footer
    seen = scanned(tmp_path, blob)
    assert seen.names("/") == [".prefetch.landmark", "big", "etc", "stargz.index.json"]
    assert seen.read("/etc/os") == b"1"
    assert seen.read("/big") == b"2" * 9000


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes([data[middle] ^ 0x55]) * 40 + data[middle + 40 :]


@pytest.mark.parametrize(
    ("pack", "harm"),
    [
        (gzip.compress, cut),
        (zstd.compress, cut),
        (gzip.compress, flipped),
    ],  # zstd sums are optional
)
def test_damaged_compression(pack: Any, harm: Any) -> None:
    """What gets past here, the digest of the blob finds."""
    with pytest.raises(RemoteError, match=r"ends too early|is damaged|no layer of an image"):
        read(GOOD, lambda tar: harm(pack(tar)))


@pytest.mark.parametrize("junk", [b"junk after the end", bytes(700), bytes(3)])
@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_junk_after_the_compressed_data(pack: Any, junk: bytes) -> None:
    """Go's readers take another member or frame there and nothing else, zeros neither."""
    stream = Unpacked(io.BytesIO(pack(GOOD) + junk), "layer")
    assert len(list(LayerTar(stream, "layer"))) == 2
    with pytest.raises(RemoteError, match=r"is damaged|ends too early"):
        stream.finish()


def test_a_zstd_window_larger_than_memory_is_refused(tmp_path: Path) -> None:
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 30,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    data = zstd.compress(GOOD, options=options)
    compressor = zstd.ZstdCompressor(options=options)
    streamed = compressor.compress(GOOD) + compressor.flush()
    assert len(read(GOOD, lambda _tar: data)) == 2, "a small frame says its own size"
    with pytest.raises(RemoteError, match="is damaged"):
        read(GOOD, lambda _tar: streamed)


# --------------------------------------------------------------------------------- and all together


def test_nothing_is_written_outside_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    items = [
        Item("/abs/file", b"1"), symlink("out", "/tmp"), Item("c:\\x", b"2"), Item("-rf", b"3"),
        Item("a\nb", b"4"), Item("dev", type=tarfile.FIFOTYPE), hardlink("h", "/abs/file"),
    ]  # fmt: skip
    put_image(tmp_path / "layout", packed(tar_of(*items)), config=CONFIG)
    seen = scanned(tmp_path, packed(tar_of(*items)))
    for name in seen.names("/"):
        seen.read(f"/{name}")
    assert list(work.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layout", "work"]
