"""Removes the prefixes that containers, journald, Kubernetes and Ray add to log lines.

Container engines, journald, Kubernetes, Ray and vLLM's own processes add a prefix to
a line or wrap it in JSON; terminals add colour.  The catalogue's patterns need not handle that.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from builder.diagnose.lineformats import mended, possible, records, unwrapped
from builder.diagnose.sources import SAMPLE, encoding_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

#: Maximum line length; longer ones are cut to limit memory.
LONGEST = 1 << 16
#: How many lines that differ only in digits are read; a busy server's log has many.
REPEATS = 8
_DIGITS = b"0123456789"
#: Request identifiers, which occur in INFO lines.
_HEX = b"0123456789abcdef"
#: Maximum number of different lines to remember.
_SHAPES = 20_000

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
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
            # Kubernetes CRI, docker --timestamps, journalctl -o short-iso
            rf"{_STAMP} (?:std(?:out|err) [FP] |\S{{1,64}} [\w.@/-]{{1,64}}\[\d+\]: )?(?!- )",
            r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [\w.@/-]{1,64}(?:\[\d+\])?: ",
            r"[\w.@-]{1,80} +\| ?",  # docker compose, swarm
            r"\[pod/[\w./-]{1,200}\] ?",  # kubectl logs --prefix
            # vLLM, Ray
            (
                r"\((?P<tag>[A-Za-z][\w.-]{0,40}(?: rank=\d+)?) pid=(?P<pid>\d+)"
                r"(?:, ip=(?P<ip>[\d.]+))?\) ?"
            ),
            r"\((?P<bare>(?:APIServer|EngineCore|Worker)[\w-]{0,20})\) ?",
            r"\[(?P<rank>rank\d+)\]:? ?",
            rf"(?P<level>{_LEVEL}) [\d-]{{5,10}} [\d:.,]{{8,15}} \[[^\]]{{1,120}}\] ?",
            rf"(?P<short>{_LEVEL}) \[[\w.-]{{1,60}}:\d+\] ?",
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


@dataclass
class Shape:
    """Lines that differ only in digits: the first, their count, and the number of the last."""

    first: bytes
    count: int
    last: int


@dataclass
class Reader:
    """The lines of a log, and those skipped."""

    stream: BinaryIO
    #: it still grows, so its beginning does not show whether lines are wrapped
    live: bool = False
    lines: int = 0
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    #: lines may be wrapped; joined lines are a guess, and only additional
    wrapped: bool = False

    def __iter__(self) -> Iterator[Line]:
        """Every non-empty line, cleaned."""
        buffered = (
            self.stream
            if isinstance(self.stream, io.BufferedReader)
            else io.BufferedReader(_Raw(self.stream), SAMPLE)
        )
        start = b"" if self.live else buffered.peek(SAMPLE)[:SAMPLE]
        encoding = encoding_of(start)
        physical = (
            self._lines(buffered) if encoding == "utf-8-sig" else self._decoded(buffered, encoding)
        )
        sample = start.decode(encoding, "replace")
        self.wrapped = possible(sample)
        for number, raw, pieces, again in unwrapped(physical, sample):
            for part in records(raw):
                for line in cleaned(number, part):
                    if pieces > 1 or again:
                        yield line._replace(pieces=pieces, again=again)
                    else:
                        yield line

    def passed_over(self) -> Iterator[Line]:
        """One line of each skipped group, with the number of the last."""
        for shape in self.shapes.values():
            if shape.count > REPEATS:
                yield from cleaned(shape.last, shape.first.decode("utf-8", "replace"))

    def _lines(self, buffered: io.BufferedReader) -> Iterator[tuple[int, str]]:
        shapes = self.shapes
        whole = True
        number = 1
        while piece := buffered.readline(LONGEST):
            ended = piece.endswith(b"\n")
            if whole:
                self.lines = number
                if number == 1:
                    piece = piece.removeprefix(b"\xef\xbb\xbf")
                key = piece.translate(None, _HEX if b"INFO" in piece else _DIGITS)
                shape = shapes.get(key)
                if shape is None:
                    if len(shapes) < _SHAPES:
                        shapes[key] = Shape(piece, 1, number)
                    yield number, piece.decode("utf-8", "replace")
                else:
                    shape.count += 1
                    shape.last = number
                    if shape.count <= REPEATS:
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


def cleaned(number: int, raw: str, *, every: bool = False) -> list[Line]:
    """The lines in one physical line; ``every``: including empty ones."""
    text = raw.strip("\r\n")
    if "\r" in text:
        parts = text.split("\r")
        return [line for part in parts for line in cleaned(number, part, every=every)]
    if "\x1b" in text or "#033" in text or ("u001b" not in text and _BARE_COLOUR.search(text)):
        text = _ANSI.sub("", text)
    text = mended(text)
    source = level = head = ""
    before = ""
    if text[:1] == " " and _PREFIX.match(text.lstrip(" ")):  # a paste that is indented
        text = text.lstrip(" ")
    while text != before:
        before = text
        if match := _PREFIX.match(text):
            head += match[0]
            text = text[match.end() :]
            source, level = _said(match, source, level)
    if inner := _unwrapped(text):
        return [
            line._replace(
                source=line.source or source, level=line.level or level, head=head + line.head
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
        text = text[: prompt.end()]
    return [Line(number, text, source, level, head=head)] if text or every else []


#: Uvicorn's format, and a level alone; both stay in the text.
_OWN_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|$)")


def _said(match: re.Match[str], source: str, level: str) -> tuple[str, str]:
    """The process and level, if a prefix has them."""
    group = match.lastgroup
    if group is None:
        return source, level
    groups = match.groupdict()
    if tag := groups["tag"] or groups["bare"]:
        where = f"@{groups['ip']}" if groups["ip"] else ""
        source = f"{tag}{where}" if not groups["pid"] else f"{tag} {groups['pid']}{where}"
    elif own := groups["rank"] or groups["part"] or groups["mpi"]:
        source = source or own.strip()
    loud = groups["level"] or groups["short"] or groups["python"] or (groups["ci"] or "").upper()
    letter = groups["letter"] or groups["glog"]
    return source, loud or _LETTERS.get(letter or "", "") or level


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
