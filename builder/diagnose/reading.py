"""Removes the prefixes that containers, journald, Kubernetes and Ray add to log lines.

Container engines, journald, Kubernetes, Ray and vLLM's own processes each put something in front
of a line or wrap it in JSON; terminals add colour.  The catalogue should know about none of that.
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

#: A longer line is cut: no line that says something is, and memory stays bounded.
LONGEST = 1 << 16
#: Of lines that differ in digits alone so many are read; a log of a busy server is mostly those.
REPEATS = 8
_DIGITS = b"0123456789"
#: Identifiers of requests stand in lines of level INFO.
_HEX = b"0123456789abcdef"
#: So many different lines are remembered.
_SHAPES = 20_000

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
_ANSI = re.compile(
    r"(?:\x1b|#033)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))|\x1b[()]B"
    r"|\[(?:\d{1,3};){0,3}\d{1,3}m"
)
#: Colour whose escape character was lost on the way.
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
            # SGLang; its level is not told
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
#: Keys of a JSON record under which the message lies.
_WRAPPERS = ("log", "message", "MESSAGE", "msg", "textPayload", "line", "body", "Message")
_LOGFMT = re.compile(r"(?:\w+=\S+ )*(?:msg|message|log)=\"((?:[^\"\\]|\\.)*)\"")
_LETTERS = {"D": "DEBUG", "V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
#: Prompts that a server logs: what stands in them is not of the server.
_PROMPT = re.compile(
    r"(Received request \S+:? prompt: |Receive: obj=|Finish: obj=|Generated response \S+: output: "
    r"|\bprompt: ['\"]|['\"]messages['\"]: ?\[|Input prompt: )"
)


class Line(NamedTuple):
    """One line: its number in the file, from 1, what the program wrote, and who says it how.

    ``again`` marks a further reading of a wrapped line, for the catalogue alone.
    """

    number: int
    text: str
    source: str = ""
    level: str = ""
    again: bool = False
    #: of how many physical lines it was joined
    pieces: int = 1
    #: what stood in front of it
    head: str = ""


@dataclass
class Shape:
    """Lines that differ in digits alone: the first, how many, and the number of the last."""

    first: bytes
    count: int
    last: int


@dataclass
class Reader:
    """The lines of a log, and what was passed over."""

    stream: BinaryIO
    #: it still grows, so its beginning cannot tell whether lines are wrapped
    live: bool = False
    lines: int = 0
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    #: lines may be wrapped; which are is a guess, so others must be able to do without it
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
        """Of lines that were not all read, one of each, with the number of the last."""
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
    """Any object with ``read``, as what ``BufferedReader`` wants (standard input in tests)."""

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

    A JSON wrapper can hold several lines and a progress bar rewrites its own, so the result may
    contain newlines.
    """
    return "\n".join(line.text for line in cleaned(0, raw, every=True))


def cleaned(number: int, raw: str, *, every: bool = False) -> list[Line]:
    """The lines in one physical line; ``every``: empty ones too."""
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


#: Uvicorn's own form, and a level alone; these stay in the text.
_OWN_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|$)")


def _said(match: re.Match[str], source: str, level: str) -> tuple[str, str]:
    """Who speaks and how loud, as far as a prefix tells."""
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
    """The message inside a JSON or logfmt record, or None when it is something else."""
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
