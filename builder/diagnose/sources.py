"""Opens logs: files, folders, compressed files, CI archives, standard input."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from builder.common.hints import reason
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Bytes of a file that are read to detect its type.
SAMPLE = 1 << 16
#: Maximum share of control characters in text.
_STRANGE = 0.1
_CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\r\x08\x0b\x0c\x1b")

_OPENERS: tuple[tuple[bytes, Callable[[Any], object]], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
#: Signatures of other files, with hints.
_OTHERS = (
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd", "zstd -dc FILE | spark-build diagnose -"),
    (b"\x89PNG", "is a picture", "copy the text of the terminal, not a screenshot"),
    (b"\xff\xd8\xff", "is a picture", "copy the text of the terminal, not a screenshot"),
    (b"%PDF", "is a PDF", "pdftotext -layout FILE - | spark-build diagnose -"),
    (b"\x7fELF", "is a program or a core dump", "give the log of the server"),
    (b"7z\xbc\xaf", "is a 7z archive", "unpack it, and pass the log file"),
)


class Source(NamedTuple):
    """One log: its display name, and how to open it."""

    name: str
    open: Callable[[], contextlib.AbstractContextManager[BinaryIO]]


class _Joined(io.RawIOBase):
    """A stream with its already-read beginning."""

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        self.start, self.rest = start, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        size = len(buffer)
        if self.start:
            data, self.start = self.start[:size], self.start[size:]
        else:
            # a pipe returns available data, so a log can be read while it grows
            read = getattr(self.rest, "read1", self.rest.read)
            data = read(size)
        buffer[: len(data)] = data
        return len(data)


def texts(stream: BinaryIO, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """The texts in a stream: one, or each member of a zip archive; compressed ones unpacked.

    Raises:
        UsageError: it is not text, or is damaged.
    """
    start = getattr(stream, "read1", stream.read)(SAMPLE)
    while len(start) < 4 and (more := stream.read(4 - len(start))):
        start += more
    if start.startswith(b"PK\x03\x04"):
        data = io.BytesIO(start + stream.read()) if not stream.seekable() else stream
        yield from _members(data, name)
        return
    whole = joined(start, stream)
    for magic, opener in _OPENERS:
        if start.startswith(magic):
            inner = cast("BinaryIO", opener(whole))
            with _damaged(name):
                beginning = inner.read(SAMPLE)
            _refuse_binary(beginning, name)
            yield name, _buffered(_Guarded(beginning, inner, name))
            return
    _refuse_binary(start, name)
    yield name, whole


def joined(start: bytes, rest: BinaryIO) -> io.BufferedReader:
    """A stream with its already-read beginning."""
    return _buffered(_Joined(start, rest))


def _buffered(raw: io.RawIOBase) -> io.BufferedReader:
    return io.BufferedReader(raw, SAMPLE)


class _Guarded(_Joined):
    """A stream from a compressed file, which may be truncated."""

    def __init__(self, start: bytes, rest: BinaryIO, name: str) -> None:
        super().__init__(start, rest)
        self.name = name

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with _damaged(self.name):
            return super().readinto(buffer)


@contextlib.contextmanager
def _damaged(name: str) -> Iterator[None]:
    """The error for a damaged file."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{name} is damaged or incomplete: {error}", hint="copy the file again"
        ) from None
    except (OSError, RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"cannot unpack {name}: {reason(error)}", hint="unpack it yourself"
        ) from None


def _members(data: BinaryIO, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """Every text in a zip archive, by name."""
    with _damaged(name):
        archive = zipfile.ZipFile(data)
    members = [m for m in sorted(archive.namelist()) if not m.endswith("/")]
    read = 0
    for member in members:
        with _damaged(f"{name}/{member}"):
            stream = archive.open(member)
            start = stream.read(SAMPLE)
        if not start or _strange(start):
            continue
        read += 1
        inner = _Guarded(start, cast("BinaryIO", stream), f"{name}/{member}")
        yield f"{name}/{member}", _buffered(inner)
    if not read:
        raise UsageError(f"{name} has no log: none of {len(members)} files is text")


def _strange(start: bytes) -> str:
    """Why these bytes are not text, or ``""``."""
    for magic, what, _ in _OTHERS:
        if start.startswith(magic):
            return what
    if encoding_of(start) != "utf-8-sig":
        return ""
    text = start.decode("utf-8", "replace")
    bad = sum(start.count(code) for code in _CONTROLS) + text.count("\ufffd")
    return "is not a text" if bad > _STRANGE * len(text) + 2 else ""


def _refuse_binary(start: bytes, name: str) -> None:
    if what := _strange(start):
        hints = [hint for magic, _, hint in _OTHERS if start.startswith(magic)]
        hint = (hints or ["pass the server's log as text"])[0].replace("FILE", name)
        raise UsageError(f"{name} {what}", hint=hint)


def encoding_of(start: bytes) -> str:
    """The encoding: UTF-16 by its byte order mark or zero bytes, else UTF-8."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = start[0:4096:2], start[1:4096:2]
    if len(start) >= 8:
        if odd.count(0) > 0.6 * len(odd) and even.count(0) < 0.1 * len(even):
            return "utf-16-le"
        if even.count(0) > 0.6 * len(even) and odd.count(0) < 0.1 * len(odd):
            return "utf-16-be"
    return "utf-8-sig"


def found(paths: Sequence[str]) -> list[Source]:
    """The logs given as arguments: files, and files in folders.

    Raises:
        UsageError: there is none.
    """
    sources: list[Source] = []
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            sources.append(_file(path))
            continue
        inside = sorted(p for p in path.rglob("*") if p.is_file() and _has_text(p))
        if not inside:
            raise UsageError(f"no log in the folder {given}", hint="spark-build diagnose FILE...")
        sources += map(_file, inside)
    return sources


def _has_text(path: Path) -> bool:
    """Whether a file in a folder is a log."""
    with path.open("rb") as stream:
        start = stream.read(SAMPLE)
    packed = start.startswith((b"PK\x03\x04", *(magic for magic, _ in _OPENERS)))
    return not path.name.startswith(".") and bool(start) and (packed or not _strange(start))


def _file(path: Path) -> Source:
    return Source(str(path), lambda: path.open("rb"))
