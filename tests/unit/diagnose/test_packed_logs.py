"""Packed logs are bounded in all: what they unpack to, how many they are, and memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zipfile
from typing import Any

import pytest

from builder.diagnose import logs
from builder.errors import UsageError


def archived(files: int, text: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for number in range(files):
            archive.writestr(f"{number}.log", text)
    return data.getvalue()


def overlapping() -> bytes:
    """An archive in whose list the same packed bytes are many files."""
    data = archived(1, b"a line\n" * 20_000)
    at, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    listed = b"".join(data[at:end].replace(b"0.log", b"%05d" % n) for n in range(100))
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 100, 100, len(listed), at, 0)
    return data[:at] + listed + tail


def read(stream: Any, name: str) -> None:
    for _, text in logs.texts(stream, name):
        while text.read(1 << 16):
            pass


@pytest.mark.parametrize("name", ["server.log", "standard input"])
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (archived(8, b"a line\n" * 20_000), "unpacks to more than"),
        (overlapping(), "is damaged"),
        (archived(11, b"a line\n"), "has 11 texts, and 10 is the limit"),
        (archived(3000, b""), "its list of files has"),
        (archived(1, b"a line\n" * 9, zipfile.ZIP_LZMA), "packed with method 14"),
        (gzip.compress(b"a line\n" * 200_000), "unpacks to more than"),
        (bz2.compress(b"a line\n" * 200_000), "unpacks to more than"),
        (lzma.compress(b"a line\n" * 200_000), "unpacks to more than"),
        (lzma.compress(b"a line\n", preset=9), "cannot unpack .* more than 16 MiB"),
    ],
    ids=["zip", "overlap", "texts", "list", "method", "gzip", "bzip2", "xz", "dictionary"],
)
def test_a_packed_log_is_bounded_in_all(
    data: bytes, why: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"UNPACKED": 1 << 20, "TEXTS": 10, "LIST": 1 << 16, "DICTIONARY": 16 << 20}
    for limit, value in limits.items():
        monkeypatch.setattr(logs, f"_MOST_{limit}", value)
    stream: Any = io.BytesIO(data)
    if name == "standard input":
        stream.seekable = lambda: False
    with pytest.raises(UsageError, match=why) as refused:
        read(stream, name)
    assert refused.value.hint


def test_an_archive_from_a_pipe_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_PACKED", 1 << 20)
    stream: Any = io.BytesIO(b"PK\x03\x04" + bytes(2 << 20))
    stream.seekable = lambda: False
    with pytest.raises(UsageError, match="more than 1 MiB"):
        list(logs.texts(stream, "standard input"))


def test_xz_streams_that_follow_each_other_are_one_log() -> None:
    packed = lzma.compress(b"one\n") + bytes(4) + lzma.compress(b"two\n")
    ((_, text),) = logs.texts(io.BytesIO(packed), "x")
    assert text.read() == b"one\ntwo\n"
    ((_, cut),) = logs.texts(io.BytesIO(packed[:-9]), "x")
    with pytest.raises(UsageError, match="incomplete"):
        cut.read()
