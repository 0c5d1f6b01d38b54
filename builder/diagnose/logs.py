"""Opens logs, and reads their lines as programs wrote them.

A log is a file, a folder, a compressed file, an archive of CI or standard input.  Container
engines, journald, Kubernetes, Ray and vLLM's own processes add a prefix to a line or wrap it in
JSON; terminals add colour; a paste from an issue, a chat or a mail differs further.  What can be
repaired without guessing is repaired here, so that no pattern need handle it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import html
import io
import itertools
import json
import lzma
import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from builder.applier.files import open_regular
from builder.common.hints import reason
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import BinaryIO


#: Bytes of a file that are read to detect its type.
SAMPLE = 1 << 16
#: Maximum share of control characters in text.
_STRANGE = 0.1
_CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\r\x08\x0b\x0c\x1b")

#: Bytes of the texts in one packed file, and of one that is not on a disk; texts of an archive.
_MOST_UNPACKED, _MOST_PACKED, _MOST_TEXTS = 1 << 30, 256 << 20, 1000
#: Bytes of memory for the dictionary of xz, whose largest setting takes 65 MiB, and of the list of
#: an archive's members.
_MOST_DICTIONARY, _MOST_LIST = 256 << 20, 1 << 20
#: How members of an archive may be packed: each with a small dictionary.
_MEMBERS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
_UNPACK = "unpack it yourself, and pass the logs"


class _Xz(io.RawIOBase):
    """A text packed by xz, read with bounded memory."""

    def __init__(self, packed: BinaryIO) -> None:
        self.packed = packed
        self._decoder = lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY)

    def read(self, size: int = -1) -> bytes:
        while True:
            more = self._decoder.unused_data if self._decoder.eof else b""
            if self._decoder.eof or self._decoder.needs_input:
                more = more or self.packed.read(SAMPLE)
                if self._decoder.eof:  # several streams may follow each other, with zeros between
                    more = more.lstrip(b"\0")
                    if not more:
                        return b""
                    self._decoder = lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY)
                elif not more:
                    raise EOFError("the end is missing")
            try:
                data = self._decoder.decompress(more, size)
            except lzma.LZMAError as error:
                if "Memory usage limit" not in str(error):
                    raise
                raise RuntimeError(f"it takes more than {_MOST_DICTIONARY >> 20} MiB") from None
            if data:
                return data


_OPENERS: tuple[tuple[bytes, Callable[[Any], object], str], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw), "gzip"),
    (b"BZh", bz2.BZ2File, "bzip2"),
    (b"\xfd7zXZ\x00", _Xz, "xz"),
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
        yield from _members(stream if stream.seekable() else _kept(start, stream, name), name)
        return
    whole = joined(start, stream)
    for magic, opener, tool in _OPENERS:
        if start.startswith(magic):
            inner = cast("BinaryIO", opener(whole))
            with _damaged(name):
                beginning = inner.read(SAMPLE)
            _refuse_binary(beginning, name)
            yield name, _buffered(_Guarded(beginning, inner, name, tool))
            return
    _refuse_binary(start, name)
    yield name, whole


def joined(start: bytes, rest: BinaryIO) -> io.BufferedReader:
    """A stream with its already-read beginning."""
    return _buffered(_Joined(start, rest))


def _buffered(raw: io.RawIOBase) -> io.BufferedReader:
    return io.BufferedReader(raw, SAMPLE)


class _Guarded(_Joined):
    """A stream from a compressed file, which may be truncated, or unpack without an end."""

    def __init__(self, start: bytes, rest: BinaryIO, name: str, tool: str = "unzip") -> None:
        super().__init__(start, rest)
        self.name, self.tool = name, tool
        self.left = _MOST_UNPACKED

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with _damaged(self.name):
            size = super().readinto(buffer)
        self.left -= size
        if self.left < 0:
            raise _too_much(self.name, f"{self.tool} -dc {self.name} | spark-build diagnose -")
        return size


def _too_much(name: str, hint: str) -> UsageError:
    limit = f"{_MOST_UNPACKED >> 20} MiB"
    return UsageError(f"{name} unpacks to more than {limit}, which is the limit", hint=hint)


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


class _Listed(io.RawIOBase):
    """An archive whose list of members is read only if it is short: it becomes many objects."""

    def __init__(self, data: BinaryIO, name: str) -> None:
        self.data, self.name = data, name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.data.seek(offset, whence)

    def tell(self) -> int:
        return self.data.tell()

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_LIST:
            raise UsageError(
                f"{self.name}: its list of files has {size} bytes, and {_MOST_LIST} is the limit",
                hint=_UNPACK,
            )
        return self.data.read(size)


def _kept(start: bytes, stream: BinaryIO, name: str) -> BinaryIO:
    """An archive from a pipe.

    Raises:
        UsageError: it is too large to be kept in memory.
    """
    data = start + stream.read(_MOST_PACKED)
    if len(data) > _MOST_PACKED:
        raise UsageError(
            f"the archive of {name} has more than {_MOST_PACKED >> 20} MiB, which is the limit "
            "where it is no file",
            hint="spark-build diagnose FILE.zip",
        )
    return io.BytesIO(data)


def _members(data: BinaryIO, name: str) -> Iterator[tuple[str, io.BufferedReader]]:
    """Every text in a zip archive, by name."""
    with _damaged(name):
        archive = zipfile.ZipFile(cast("BinaryIO", _Listed(data, name)))
    for info in _texts_in(archive, name):
        path = f"{name}/{info.filename}"
        with _damaged(path):
            stream = cast("BinaryIO", archive.open(info))
        yield path, _buffered(_Guarded(b"", stream, path))


def _texts_in(archive: zipfile.ZipFile, name: str) -> list[zipfile.ZipInfo]:
    """The texts in an archive, by name.

    Raises:
        UsageError: there are none, or they are too many or too large in all.
    """
    infos = {one.filename: one for one in archive.infolist() if not one.is_dir()}
    found = []
    for _, info in sorted(infos.items()):
        if info.compress_type not in _MEMBERS:
            method = f"is packed with method {info.compress_type}, which is not read"
            raise UsageError(f"{name}/{info.filename} {method}", hint=_UNPACK)
        with _damaged(f"{name}/{info.filename}"), archive.open(info) as stream:
            start = stream.read(SAMPLE)
        if start and not _strange(start):
            found.append(info)
    if not found:
        raise UsageError(f"{name} has no log: none of {len(infos)} files is text")
    if len(found) > _MOST_TEXTS:
        number = f"{name} has {len(found)} texts"
        raise UsageError(f"{number}, and {_MOST_TEXTS} is the limit", hint=_UNPACK)
    # no more bytes of a file are read than its entry says
    if sum(info.file_size for info in found) > _MOST_UNPACKED:
        raise _too_much(name, _UNPACK)
    return found


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


def sources_at(paths: Sequence[str]) -> list[Source]:
    """The logs given as arguments: files, and files in folders.

    Raises:
        UsageError: a path names no log.
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


def open_log(path: Path) -> BinaryIO:
    """Open a log: a regular file, or a pipe, as of ``<(docker logs NAME)``.

    Raises:
        OSError: it cannot be opened, or is a device or a socket.
    """
    return path.open("rb") if path.is_fifo() else open_regular(path)


def _has_text(path: Path) -> bool:
    """Whether a file in a folder is a log."""
    with open_regular(path) as stream:
        start = stream.read(SAMPLE)
    packed = start.startswith((b"PK\x03\x04", *(magic for magic, *_ in _OPENERS)))
    return not path.name.startswith(".") and bool(start) and (packed or not _strange(start))


def _file(path: Path) -> Source:
    return Source(str(path), lambda: open_log(path))


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: vLLM's own format first: a container's timestamp may be in another time zone.
_OWN = re.compile(r"\b(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) (\d\d-\d\d) (\d\d:\d\d:\d\d)")
_ISO = re.compile(r"\d{4}-(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_SYSLOG = re.compile(rf"({'|'.join(_MONTHS)}) ([ \d]\d) (\d\d:\d\d:\d\d)")


def when(head: str) -> str:
    """``MM-DD HH:MM:SS``, or ``""``."""
    if match := _OWN.search(head) or _ISO.search(head):
        return f"{match[1]} {match[2]}"
    if match := _SYSLOG.search(head):
        return f"{_MONTHS.index(match[1]) + 1:02d}-{int(match[2]):02d} {match[3]}"
    return ""


#: Replacements of plain characters by word processors, chats and mail programs.
_TYPOGRAPHY = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201a": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u201e": '"',
        "\u2032": "'",
        "\u2033": '"',
        "\u00ab": '"',
        "\u00bb": '"',
        "\u2013": "--",
        "\u2014": "--",
        "\u2212": "-",
        "\u2010": "-",
        "\u2011": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u200b": None,
        "\u200c": None,
        "\u200d": None,
        "\u2060": None,
        "\ufeff": None,
    }
)
_ENTITY = re.compile(r"&(?:amp;)?(?:[a-z]{2,6}|#\d{1,6}|#x[0-9a-fA-F]{1,5});")
_TAG = re.compile(
    r"</?(?:span|pre|code|b|i|em|strong|p|div|td|tr|font|samp)(?: [^<>]{0,200})?>|<br ?/?>"
)

#: The start of a log record, for lines that lost their line ends.
_TAGGED = r"\((?:APIServer|EngineCore|Worker|RayWorker|VllmWorker)[^()\n]{0,60}\)"
_LEVELLED = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \["
_STAMPED = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)? ?"
#: One record: includes a timestamp or tag before the level.
_RECORD = re.compile(rf"(?:{_STAMPED}(?:std\w+ F )?)?(?:{_TAGGED} ?)?(?:{_LEVELLED})?")
_INNER = re.compile(
    rf"(?={_STAMPED})|(?={_TAGGED})|(?={_LEVELLED})|(?=Traceback \(most recent call last)"
    r"|(?=(?: {2})+File \"[^\"]{1,200}\", line \d)"
    r"|(?<![\w.'\"\[])(?=(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): )"
)
_STARTS = re.compile(rf"{_TAGGED}|{_LEVELLED}|{_STAMPED}")
#: Number of record starts in a line that has lost its line ends.
_GLUED = 3

#: A line that starts a record, so it cannot continue a wrapped one.
_BEGINS = re.compile(
    r"\s*(?:\(\w[\w.-]* (?:rank=\d+ )?pid=|\((?:APIServer|EngineCore|Worker)"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b|Traceback \(|File \"|\[?\d{4}-\d\d-\d\d[T ]"
    r"|\[\d\d/\d\d/\d{4}"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d|\[rank\d|\[\d+/\d+\] |\^{2}|~{2}|(?:[\w.-]+ +\| )|\{\"|\+ "
    r"|(?:[A-Za-z_]\w*\.)*[A-Z]\w{2,}(?:Error|Exception)(?:: |:?$)|NVRM:|ninja:|ptxas |FAILED: "
    r"|The above exception|During handling of|Exception (?:ignored |in |Group )|terminate called"
    r"|Fatal |Killed$|Aborted|Segmentation |\*{3}|thread '|panic: |docker: |[Ee]rror: |bash: |make"
    r"|INFO: |\[[A-Za-z][\w-]*\]|[\w.-]+: error: "
    r"|[a-z]+_\w+ ?: |[A-Z][\w ]{1,24}:(?:\s{2,}|$))"
)
#: A line that is complete, whatever its length.
_WHOLE = re.compile(
    r"File \"[^\"]+\", line \d+, in [\w<>.]+$|Traceback \(most recent call last\):$"
)
#: Container prefixes before each physical line.
_CARRIED = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)? (?:std\w+ [FP] "
    r"|\S{1,64} [\w.@/-]{1,64}\[\d+\]: )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [\w.@/-]{1,64}(?:\[\d+\])?: "
    r"|[\w.-]{1,64} +\| ?|\[pod/[\w./-]{1,200}\] ?|> ?)"
)
#: Maximum width of wrapped text from a terminal or an issue tracker.
_WIDEST = 160
#: Typical widths of terminals and mail programs.
_COMMON = frozenset({60, 64, 70, 72, 76, 78, 79, 80, 90, 100, 110, 119, 120, 127, 128, 132, 140})


def unescaped(text: str) -> str:
    """One line with HTML escapes and typographic characters replaced."""
    if "&" in text and ";" in text and _ENTITY.search(text):
        text = html.unescape(text)
        if _ENTITY.search(text):
            text = html.unescape(text)  # escaped twice
    if "<" in text:
        text = _TAG.sub("", text)
    return text if text.isascii() else text.translate(_TYPOGRAPHY)


def records(text: str) -> list[str]:
    """The log records in a line that lost its line ends; usually one."""
    if text.count("\\n") >= 1 and len(text) > 80 and '":' not in text[:200]:
        parts = re.split(r"(?<!\\)(?:\\r)?\\n", text)
        if len(parts) > 1 and "prompt" not in text and "template" not in text:
            return parts
    if len(text) < 160 or max(map(text.count, ("pid=", "INFO", "[", "Z "))) < _GLUED:
        return [text]
    if len(_STARTS.findall(text)) < _GLUED:
        return [text]
    texts: list[str] = []
    start = 0
    for match in _INNER.finditer(text):
        at = match.start()
        head = _RECORD.match(text, start)
        if at <= start or (head and at < head.end()):
            continue
        texts.append(text[start:at])
        start = at
    return [*texts, text[start:]]


def possible(sample: str) -> bool:
    """Whether a text with this beginning may be wrapped."""
    return _Wrap(sample).possible


def unwrapped(lines: Iterable[tuple[int, str]], sample: str) -> Iterator[CandidateLine]:
    """Lines with wrapped ones joined.

    ``sample`` is the beginning of the same text, from which the width is derived.  Where a line was
    cut cannot be known (between words, inside a word, or not at all), so every possible joined line
    is returned.
    """
    shape = _Wrap(sample)
    if not shape.possible:
        yield from (CandidateLine(number, text) for number, text in lines)
        return
    pieces: list[tuple[int, str]] = []
    for number, text in lines:
        if pieces and len(pieces) < _PIECES and shape.goes_on(pieces[-1][1], text):
            pieces.append((number, text))
            continue
        yield from shape.joined(pieces)
        pieces = [(number, text)]
    yield from shape.joined(pieces)


#: Maximum number of lines in a wrapped line.
_PIECES = 30


class CandidateLine(NamedTuple):
    """A line, its number of physical lines, and whether it is an alternative reading."""

    number: int
    text: str
    pieces: int = 1
    again: bool = False


class _Wrap:
    """The detected wrapping of a text."""

    def __init__(self, sample: str) -> None:
        lines = [line.rstrip("\r") for line in sample.split("\n") if line.strip()]
        self.width = max((len(line) for line in lines), default=0)
        self.possible = len(lines) > 1 and 30 <= self.width <= _WIDEST
        carried = sum(bool(_CARRIED.match(line)) for line in lines)
        self.carried = carried > 1 and carried == len(lines)
        full = sum(len(line) == self.width for line in lines)
        self.hard = self.width in _COMMON or full > 1

    def bare(self, text: str) -> str:
        """A line without the common prefix of its tool."""
        if self.carried and (match := _CARRIED.match(text)):
            return text[match.end() :]
        return text

    def goes_on(self, text: str, following: str) -> bool:
        """Whether the second line may continue the first."""
        text, own = text.rstrip("\r\n"), self.bare(following.rstrip("\r\n"))
        bare = self.bare(text)
        if not own.strip() or not bare.strip():
            return False
        word = own.split(None, 1)[0]
        if len(text.rstrip()) + 1 + len(word) <= self.width:  # it had room on the line before
            return False
        if _BEGINS.match(own) or _WHOLE.search(bare):
            return False
        if word == bare.split(None, 1)[0]:  # the next record of the same program
            return False
        short = len(text) < max(30, 0.4 * self.width) and len(word) < 0.5 * self.width
        return not (short or set(bare.strip()) <= set("^~-= |+"))

    def joined(self, rows: list[tuple[int, str]]) -> Iterator[CandidateLine]:
        """Join pieces to one line."""
        if len(rows) < 2:
            yield from (CandidateLine(number, text) for number, text in rows)
            return
        number = rows[0][0]
        yield from (CandidateLine(at, piece, again=True) for at, piece in rows)
        pieces = [piece.rstrip("\r\n") for _, piece in rows]
        rest = [self.bare(piece) for piece in pieces[1:]]
        cut = self.hard and all(len(piece) == self.width for piece in pieces[:-1])
        tight = pieces[0] + "".join(rest)
        loose = pieces[0].rstrip()
        for piece in rest:
            broken = re.search(r"\w-$", loose) and piece[:1].isalpha()
            loose += ("" if broken else " ") + piece.strip()
        yield CandidateLine(number, tight if cut else loose, len(rows))
        yield CandidateLine(number, loose if cut else tight, len(rows), again=True)


#: Maximum line length; longer ones are cut to limit memory.
LONGEST = 1 << 16
#: How many lines that differ only in digits are read of one attempt, and how many of them if they
#: are about an error; a busy server's log has many.
REPEATS = 8
ERRORS = 1000
_ERROR = re.compile(
    rb"rror|ERROR|CRITICAL|FATAL|Traceback|  File |xception|ailed|Killed|exited|NVRM|[Tt]imed|abort"
    rb"|broadcast block|prompt throughput: 0\.0 .{1,60}generation throughput: 0\.0 .{1,20}: [1-9]"
)
#: Statistics with and without tokens are not alike, nor those with and without requests.
_STATISTICS = re.compile(rb"throughput: 0\.0 |Running: 0 ")
#: Beginnings by which the lines of servers differ, also if only in digits.
_HEAD = re.compile(rb"[\w.@-]{1,80} +\||\[pod/[\w./-]{1,200}\]|\([^()]{0,80}ip=[\d.]+\)")
#: Lines in a sample that must have one, so that each line is looked at.
_HEADED = 2

#: Digits of a number beyond which the rest is left out: Python reads no more than 4300.
_LONG_NUMBER = 1000
_DIGIT_RUN = re.compile(r"\d+")

_DIGITS = b"0123456789"
#: Request identifiers, which occur in INFO lines.
_HEX = b"0123456789abcdef"
#: Maximum number of different lines to remember.
_SHAPES = 20_000

_STAMP = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
_ANSI = re.compile(
    r"(?:\x1b|#033)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))|\x1b[()]B"
    r"|\[(?:\d{1,3};){0,3}\d{1,3}m"
)
#: Colour codes that lost their escape character.
_BARE_COLOUR = re.compile(r"\[(?:3\d|9\d|0|1);?\d*m")
_PREFIX = re.compile(
    "|".join(
        (
            # loguru; RunPod's worker
            rf"{_STAMP} +\| (?P<loguru>{_LEVEL}) +\| \S{{1,120}} - ",
            rf"[\w.-]{{1,60}}\.py +:\d+ +{_STAMP} ",
            # Kubernetes CRI, docker --timestamps, journalctl -o short-iso
            rf"{_STAMP}[ \t](?:std(?:out|err) [FP] |\S{{1,64}} [\w.@/-]{{1,64}}\[\d+\]: )?(?!- )",
            # with a host, or without
            (
                r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:\S{0,63}[^:\s] )?"
                r"[\w.@/-]{1,64}(?:\[\d+\])?: "
            ),
            # docker buildx
            r"(?:#\d{1,4} )?\d{1,5}\.\d{1,3} +(?=error: |ERROR: |Collecting |Using |[×╰x] ?)",
            r"(?P<compose>[\w.@-]{1,80}) +\| ?",  # docker compose, swarm
            r"\[(?P<pod>pod/[\w./-]{1,200})\] ?",  # kubectl logs --prefix
            r"[a-z0-9]{8,24} ?\[(?P<runpod>info|error|warning|debug)\] ?",
            r"\((?:[\w.-]{1,40}, )?(?:rank=?\d+, )?pid=\d+(?:, ip=[\d.]+)?\) ?",  # SkyPilot
            # epoch milliseconds of log exports; srun --label; torchrun --tee
            r"\d{13} |\d{1,4}: (?=\(\w+ pid=|(?:INFO|ERROR|WARNING) \d|Traceback| +File \")",
            r"\[[a-z]{2,20}\d{1,4}\]: ?",
            # vLLM, Ray
            (
                r"\((?P<tag>[A-Za-z][\w.-]{0,40}(?: (?:rank=\d+|[A-Z]{2}\d+))?) pid=(?P<pid>\d+)"
                r"(?:, ip=(?P<ip>[\d.]+))?\) ?"
            ),
            r"\((?P<bare>(?:APIServer|EngineCore|Worker)[\w-]{0,20})\) ?",
            r"\[(?P<rank>rank\d+)\]:? ?",
            (
                rf"(?P<level>{_LEVEL}) [\d-]{{5,10}} [\d:.,]{{8,15}} "
                r"(?:\[[^\]]{1,120}\]|[\w./-]{1,80}:\d+\]) ?"
            ),
            rf"(?P<short>{_LEVEL}) \[[\w.-]{{1,60}}:\d+\] ?",
            rf"\[(?P<bracket>{_LEVEL})\] ",
            rf"(?P<ray>{_LEVEL})[ \t]+[\w./-]{{1,80}}:\d+ -- ",
            # SGLang, without level
            rf"\[{_STAMP}(?: (?P<part>(?:[A-Z]+\d+ ?)+))?\] ",
            (
                r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT-LLM\] "
                r"(?:\[RANK (?P<mpi>\d+)\] )?\[(?P<letter>[DIWEV])\] ?"
            ),
            # Python's logging, with the usual separators
            rf"{_STAMP} - (?:[\w.]+ - )?(?P<python>{_LEVEL}) - ",
            # glog: torch, Triton's server
            r"\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d\.\d+ +(?:\d+ )?\S{1,120}:\d+\] ?",
            r"\[ *\d{1,7}\.\d{6}\] ",  # dmesg
            r"##\[(?P<ci>error|warning|debug|group)\]",
            r"\[\d+,\d+\]<std(?:err|out)>: ?",  # mpirun --tag-output
            r"&?gt; |> ",
            # grep -n
            r"\d{1,6}[:-](?=\(\w+ pid=|(?:INFO|ERROR|WARNING) \d|\d{4}-\d\d|Traceback|\s+File \")",
        )
    )
)
#: Keys of the message in a JSON record.
_WRAPPERS = ("log", "message", "MESSAGE", "msg", "textPayload", "line", "body", "Message")
_LOGFMT = re.compile(r"(?:\w+=\S+ )*(?:msg|message|log)=\"((?:[^\"\\]|\\.)*)\"")
_LETTERS = {"D": "DEBUG", "V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
#: Prompts in a server's log, whose text is not the server's.
_PROMPT = re.compile(
    r"(Received request \S+:? prompt: |Receive: obj=|Finish: obj=|Generated response \S+: output: "
    r"|\bprompt: ['\"]|['\"]messages['\"]: ?\[|Input prompt: )"
)

#: An answer that begins with exclamation marks, and has nothing else.
_MARKS_ALONE = re.compile(r"['\"]?!{40}|['\"]?!{5,39}(?=['\"]|$)")


class Line(NamedTuple):
    """One line: its number in the file (from 1), its text, process and level.

    ``again`` marks an alternative reading of a wrapped line, only for the catalogue.
    """

    number: int
    text: str
    source: str = ""
    level: str = ""
    again: bool = False
    #: number of joined physical lines
    pieces: int = 1
    #: its prefix
    head: str = ""
    #: the container, pod or node that a prefix names: each may be a server of its own
    server: str = ""


@dataclass(slots=True)
class Shape:
    """Lines that differ only in digits: the last one and its number, and how many are read."""

    text: bytes
    count: int
    last: int
    limit: int
    #: the number of the line before the last one
    prior: int = 0

    def again(self, text: bytes, number: int) -> bool:
        """Count a line, and say whether it is read."""
        self.count += 1
        self.prior = self.last
        self.last = number
        self.text = text
        if self.count == REPEATS + 1 and _ERROR.search(text, 0, 400):
            self.limit = ERRORS
        return self.count <= self.limit


@dataclass
class Reader:
    """The lines of a log, and those skipped."""

    stream: BinaryIO
    #: it still grows, so its beginning does not show whether lines are wrapped
    live: bool = False
    lines: int = 0
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    #: newest line first: the number that a line number is subtracted from, else 0
    turned: int = 0
    #: lines may be wrapped; joined lines are a guess, and only additional
    wrapped: bool = False
    #: lines name the container, pod or node that wrote them
    _headed: bool = False

    def __iter__(self) -> Iterator[Line]:
        """Every non-empty line, cleaned."""
        buffered = (
            self.stream
            if isinstance(self.stream, io.BufferedReader)
            else io.BufferedReader(_Raw(self.stream), SAMPLE)
        )
        first = buffered.peek(SAMPLE)[:SAMPLE]
        if newest_first(first):
            buffered, self.turned = _turned(buffered)
            first = buffered.peek(SAMPLE)[:SAMPLE]
        start = b"" if self.live else first
        encoding = encoding_of(start)
        physical = (
            self._lines(buffered) if encoding == "utf-8-sig" else self._decoded(buffered, encoding)
        )
        self._headed = sum(bool(_HEAD.match(line)) for line in first.splitlines()) >= _HEADED
        sample = start.decode(encoding, "replace")
        self.wrapped = possible(sample)
        for number, raw, pieces, again in unwrapped(physical, sample):
            parts = records(raw)
            for part in parts:
                for line in cleaned(number, part):
                    if pieces > 1 or again or len(parts) > 1:
                        # a part of a record has no prefix of its own
                        server = line.server or _server(raw)
                        yield line._replace(pieces=pieces, again=again, server=server)
                    else:
                        yield line

    def passed_over(self) -> Iterator[Line]:
        """The last line of each skipped group; of statistics two, as it takes two in a row."""
        for shape in self.shapes.values():
            if shape.count > shape.limit:
                text = shape.text.decode("utf-8", "replace")
                if b"throughput" in shape.text:
                    yield from cleaned(shape.prior, text)
                yield from cleaned(shape.last, text)

    def forget(self) -> None:
        """Read repeated lines again: a new attempt begins."""
        self.shapes.clear()

    def _lines(self, buffered: io.BufferedReader) -> Iterator[tuple[int, str]]:
        shapes, headed = self.shapes, self._headed
        whole = True
        number = 1
        while piece := buffered.readline(LONGEST):
            ended = piece.endswith(b"\n")
            if whole:
                self.lines = number
                if number == 1:
                    piece = piece.removeprefix(b"\xef\xbb\xbf")
                if b"INFO" in piece:
                    key = piece.translate(None, _HEX)
                    if b"throughput" in piece:
                        key += b"".join(_STATISTICS.findall(piece))
                else:
                    key = piece.translate(None, _DIGITS)
                if headed and (head := _HEAD.match(piece)):
                    key += head[0]
                shape = shapes.get(key)
                if shape is None:
                    if len(shapes) < _SHAPES:
                        shapes[key] = Shape(piece, 1, number, REPEATS)
                    yield number, piece.decode("utf-8", "replace")
                elif shape.again(piece, number):
                    yield number, piece.decode("utf-8", "replace")
            whole = ended
            number += ended

    def _decoded(self, buffered: io.BufferedReader, encoding: str) -> Iterator[tuple[int, str]]:
        text = io.TextIOWrapper(buffered, encoding=encoding, errors="replace", newline="\n")
        try:
            for number in itertools.count(1):
                piece = text.readline(LONGEST)
                if not piece:
                    return
                self.lines = number
                yield number, piece
        finally:
            text.detach()


_WHEN = re.compile(rb"(?m)^[^\n]{0,80}?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)")
#: Maximum size of a log with the newest line first, which must be turned in memory.
_TURNED = 64 << 20


def newest_first(sample: bytes) -> bool:
    """Whether the times of the first lines descend, as in the consoles of log collectors."""
    times = [bytes(groups) for groups in _WHEN.findall(sample)]
    later = sum(a > b for a, b in itertools.pairwise(times))
    earlier = sum(a < b for a, b in itertools.pairwise(times))
    return later >= 3 and earlier * 10 <= later and times[0] > times[-1]


def _turned(stream: io.BufferedReader) -> tuple[io.BufferedReader, int]:
    """A stream with its lines in the order of time, and the number of lines plus one.

    Raises:
        UsageError: it is too large to be turned.
    """
    data = stream.read(_TURNED + 1)
    if len(data) > _TURNED:
        raise UsageError(
            "the log has the newest line first, and is too large to be turned here",
            hint="tac FILE | spark-build diagnose -",
        )
    lines = data.removesuffix(b"\n").split(b"\n")
    text = b"\n".join(reversed(lines)) + b"\n"
    return io.BufferedReader(_Raw(io.BytesIO(text)), SAMPLE), len(lines) + 1


class _Raw(io.RawIOBase):
    """Adapts any object with ``read`` for ``BufferedReader`` (standard input in tests)."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def clean(raw: str) -> str:
    """One physical line without colour, carriage returns and prefixes.

    A JSON wrapper may have several lines, and a progress bar rewrites its line, so the result may
    contain newlines.
    """
    return "\n".join(line.text for line in cleaned(0, raw, every=True))


def _shortened(text: str) -> str:
    """A line without the ends of endless numbers."""
    if len(text) <= _LONG_NUMBER:
        return text
    return _DIGIT_RUN.sub(lambda digits: digits[0][:_LONG_NUMBER], text)


def cleaned(number: int, raw: str, *, every: bool = False) -> list[Line]:
    """The lines in one physical line; ``every``: including empty ones."""
    text = _shortened(raw.strip("\r\n"))
    if "\r" in text:
        parts = text.split("\r")
        return [line for part in parts for line in cleaned(number, part, every=every)]
    if "\x1b" in text or "#033" in text or ("u001b" not in text and _BARE_COLOUR.search(text)):
        text = _ANSI.sub("", text)
    text = unescaped(text)
    source = level = head = server = ""
    before = ""
    if text[:1] == " " and _PREFIX.match(text.lstrip(" ")):  # a paste that is indented
        text = text.lstrip(" ")
    while text != before:
        before = text
        if match := _PREFIX.match(text):
            head += match[0]
            text = text[match.end() :]
            source, level = _said(match, source, level)
            server = server or match["compose"] or match["pod"] or match["ip"] or ""
    if inner := _unwrapped(text):
        return [
            line._replace(
                source=line.source or source,
                level=line.level or level,
                head=head + line.head,
                server=line.server or server,
            )
            for part in inner.splitlines()
            for line in cleaned(number, part, every=every)
        ]
    text = text.rstrip()
    if not level and (match := _OWN_LEVEL.match(text)):
        level = match[1]
    if "rompt" in text or "obj=" in text or "essages" in text or "output: " in text:
        prompt = _PROMPT.search(text)
    else:
        prompt = None
    if prompt:
        shown = _MARKS_ALONE.match(text, prompt.end())  # a symptom, and no text of a prompt
        text = text[: prompt.end()] + (shown[0] if shown else "")
    return [Line(number, text, source, level, head=head, server=server)] if text or every else []


#: Uvicorn's format, and a level alone; both stay in the text.
_OWN_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|$)")


_SAID = (
    "tag", "bare", "ip", "pid", "rank", "part", "mpi", "letter", "glog",
    "level", "short", "python", "loguru", "bracket", "ray", "runpod", "ci",
)  # fmt: skip


def _server(raw: str) -> str:
    """The container, pod or node that a line's own prefix names."""
    match = _PREFIX.match(raw)
    return (match["compose"] or match["pod"] or match["ip"] or "") if match else ""


def _said(match: re.Match[str], source: str, level: str) -> tuple[str, str]:
    """The process and level, if a prefix has them."""
    if match.lastgroup is None:
        return source, level
    tag, bare, ip, pid, rank, part, mpi, letter, glog, *levels = match.group(*_SAID)
    if name := tag or bare:
        where = f"@{ip}" if ip else ""
        source = f"{name} {pid}{where}" if pid else f"{name}{where}"
    elif own := rank or part or mpi:
        source = source or own.strip()
    loud = next(filter(None, levels), "").upper()
    return source, loud or _LETTERS.get(letter or glog or "", "") or level


def _unwrapped(text: str) -> str | None:
    """The message in a JSON or logfmt record, or None."""
    if text.lstrip()[:1] != "{":
        match = _LOGFMT.match(text) if '="' in text[:400] else None
        return match and match[1].replace('\\"', '"').replace("\\n", "\n")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for key in _WRAPPERS if isinstance(record, dict) else ():
        value = record.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(b, int) and 0 <= b < 256 for b in value):
            return bytes(value).decode("utf-8", "replace")  # journald, for anything with colour
    return None
