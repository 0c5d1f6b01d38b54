"""Wheels: which files are taken from them, and which wheels are refused."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.applier import sources
from builder.applier.sources import RangeFile, wheel_members
from builder.applier.values import EXIT_REMOTE, ApplyError, is_sha256
from builder.common.paths import package_file
from builder.common.wheels import released_records
from tests.wheels.fakeindex import build_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INFO = "a-1.dist-info"
FILES: Mapping[str, bytes] = {"a/__init__.py": b"", "a/b.py": b"x = 1\n"}


def opened(data: bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(data))


def rewritten(change: Callable[[zipfile.ZipInfo, bytes], bytes], data: bytes) -> zipfile.ZipFile:
    """The same archive, with each file's entry or bytes changed."""
    out = io.BytesIO()
    with opened(data) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            text = change(info, old.read(info.filename))
            new.writestr(info, text)
    return zipfile.ZipFile(out)


def with_record(text: str) -> zipfile.ZipFile:
    """A wheel whose RECORD is this."""
    return rewritten(
        lambda info, data: text.encode() if info.filename.endswith("RECORD") else data,
        build_wheel("a", "1", FILES),
    )


def refused(archive: zipfile.ZipFile, why: str) -> None:
    with pytest.raises(ApplyError, match=why) as caught:
        wheel_members(archive)
    assert caught.value.code == EXIT_REMOTE


def test_every_file_has_its_hash() -> None:
    members = wheel_members(opened(build_wheel("a", "1", FILES)))
    assert {m.path for m in members} >= {*FILES, f"{INFO}/METADATA", f"{INFO}/RECORD"}
    assert all(len(m.sha256) == 64 for m in members)


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/x", "a//b", "./a", "a/./b", "a/..", "a/", "//", "x" * 256]
)
def test_a_path_must_stay_below_the_tree(path: str) -> None:
    if path == "a/":  # a folder, which is no file
        wheel_members(opened(build_wheel("a", "1", {path: b""} if path != "a/" else FILES)))
        return
    refused(opened(build_wheel("a", "1", {path: b"x"})), "outside|not a path|has no hash|RECORD")


def test_a_link_is_refused() -> None:
    def as_link(info: zipfile.ZipInfo, data: bytes) -> bytes:
        if info.filename == "a/b.py":
            info.external_attr = 0o120777 << 16
        return data

    refused(rewritten(as_link, build_wheel("a", "1", FILES)), "is a link")


def test_a_doubled_name_is_read_once() -> None:
    """``zipfile`` reads the last, and its bytes are held against RECORD."""
    data = io.BytesIO(build_wheel("a", "1", FILES))
    with zipfile.ZipFile(data, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/b.py", "x = 2\n")
    members = wheel_members(zipfile.ZipFile(data))
    assert [m.path for m in members].count("a/b.py") == 1


def test_a_file_that_is_also_a_folder_is_refused() -> None:
    refused(opened(build_wheel("a", "1", {"a": b"", "a/b/c": b""})), "'a' is also a folder")


def test_a_file_that_only_record_has_is_refused() -> None:
    """An index could leave out files of a wheel that it serves by range."""
    data = build_wheel("a", "1", FILES)
    out = io.BytesIO()
    with opened(data) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            if info.filename != "a/b.py":
                new.writestr(info, old.read(info.filename))
    refused(zipfile.ZipFile(out), "has no 'a/b.py', which its RECORD lists")


def test_a_size_that_differs_from_record_is_refused() -> None:
    digest = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    text = "".join(f"{path},sha256={digest},7\n" for path in FILES)
    refused(with_record(text), "has 0 bytes, RECORD says 7")


def test_a_second_record_is_refused() -> None:
    refused(opened(build_wheel("a", "1", {"b-1.dist-info/RECORD": b""})), "several RECORDs")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no hash"),
        ("a/b.py,sha256=AAAA,6\n", "has no hash"),
        ("a/b.py,sha256=%,6\n", "has no hash"),
        ("a/b.py,sha256=é,6\n", "damaged"),
        ("a/b.py,,six\n", "damaged"),
        (f"a/b.py,,{'9' * 5000}\n", "damaged"),
        ('"a/b.py\n' + "x" * 200_000, "damaged"),
        ("\n" * 400_001, "more than 400000 lines"),
        ("a,,\n" * 400_001, "more than 400000 lines"),
    ],
    ids=range(9),
)
def test_an_odd_record_is_refused(text: str, why: str) -> None:
    refused(with_record(text), why)


def test_a_record_that_is_no_text_is_refused() -> None:
    refused(
        rewritten(
            lambda info, data: b"\xff" if info.filename.endswith("RECORD") else data,
            build_wheel("a", "1", FILES),
        ),
        "damaged",
    )


def test_a_wheel_without_record_is_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.py", "")
        archive.writestr("a/vendored/b-1.dist-info/RECORD", "")
    refused(zipfile.ZipFile(out), "has no RECORD")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_unusual_compression_is_refused(kind: int) -> None:
    def packed(info: zipfile.ZipInfo, data: bytes) -> bytes:
        info.compress_type = kind
        return data

    refused(rewritten(packed, build_wheel("a", "1", FILES)), "packed unusually")


def test_an_encrypted_file_is_refused() -> None:
    archive = opened(build_wheel("a", "1", FILES))
    archive.getinfo(f"{INFO}/RECORD").flag_bits |= 1
    refused(archive, "encrypted")


def test_a_file_that_only_grows_is_refused() -> None:
    """RECORD and METADATA of 1.5 GB, out of 1.5 MB."""
    refused(opened(build_wheel("a", "1", {"a/big.py": bytes(32 << 20)})), "out of")
    archive = opened(build_wheel("a", "1", FILES))
    archive.getinfo(f"{INFO}/RECORD").file_size = 1 << 30
    refused(archive, "out of")


def test_an_empty_name_and_a_place_before_the_archive_are_refused() -> None:
    """Chance found both."""
    archive = opened(build_wheel("a", "1", FILES))
    archive.getinfo("a/b.py").filename = ""
    refused(archive, "'' is not a path")
    archive = opened(build_wheel("a", "1", FILES))
    archive.getinfo("a/b.py").header_offset = -5
    refused(archive, "begins before the archive")
    padded = opened(build_wheel("a", "1", FILES))
    padded.getinfo("a/b.py").compress_size = 1 << 40
    refused(padded, "out of")


def test_a_read_has_a_limit() -> None:
    """Of a list of files that the archive says is huge, nothing is asked for."""
    asked = []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return bytes(stop - start)

    stream = RangeFile(1 << 40, fetch)
    with pytest.raises(zipfile.BadZipFile, match="too many"):
        stream.read()
    assert not asked
    with pytest.raises(zipfile.BadZipFile, match="too many"):
        stream.prefetch(0, 1 << 30)
    assert not asked
    stream.limit = sources.FILE_BYTES
    assert stream.read(5) == bytes(5)


def test_a_central_directory_of_terabytes_is_refused() -> None:
    """The end of the archive says where its list of files is, and how large."""
    size = 1 << 40
    end = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 9, 9, (1 << 32) - 2, 0, 0)
    tail = bytes(1 << 17)[: -len(end)] + end

    def fetch(start: int, stop: int) -> bytes:
        assert stop - start <= len(tail)
        return tail[len(tail) - (size - start) :][: stop - start] if stop > size - 9 else bytes(9)

    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(RangeFile(size, fetch))


def test_the_pinned_records_are_hashes() -> None:
    lines = package_file("data", "records.txt").read_text("ascii").splitlines()[1:]
    files = [line.split()[2] for line in lines]
    assert files == sorted(files)
    assert len(files) == len(released_records())
    for wheel, record in released_records().items():
        assert is_sha256(wheel)
        assert is_sha256(record)
    assert {name.split("-")[0] for name in files} >= {"vllm", "flashinfer_python"}
