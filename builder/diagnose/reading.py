"""Lines of a log as the program wrote them, whatever carried them here.

Container engines, journald, Kubernetes, Ray and vLLM's own processes each put something in front
of a line or wrap it in JSON; terminals add colour.  The catalogue should know about none of that.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

#: A longer line is cut: no line that says something is, and memory stays bounded.
LONGEST = 1 << 16

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_ANSI = re.compile(r"(?:\x1b|#033)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_PREFIX = re.compile(
    "|".join(
        (
            # Kubernetes CRI, docker --timestamps, journalctl -o short-iso
            rf"{_STAMP} (?:std(?:out|err) [FP] |\S{{1,64}} [\w.@/-]{{1,64}}\[\d+\]: )?",
            r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,64} [\w.@/-]{1,64}(?:\[\d+\])?: ",
            r"[\w.-]{1,64} +\| ?",  # docker compose
            r"\[pod/[\w./-]{1,200}\] ?",  # kubectl logs --prefix
            r"\([A-Za-z][\w.-]{0,40}(?: rank=\d+)? pid=\d+(?:, ip=[\d.]+)?\) ?",  # vLLM, Ray
            r"\[rank\d+\]:? ?",
            r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]{5,10} [\d:.,]{8,15} \[\S{1,120}\] ?",
            r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT-LLM\] (?:\[RANK \d+\] )?\[[DIWEV]\] ?",
        )
    )
)
_WRAPPERS = ("log", "message", "MESSAGE", "msg", "textPayload")


class Line(NamedTuple):
    """One line: its number in the file, from 1, and what the program wrote."""

    number: int
    text: str


def read_lines(stream: BinaryIO) -> Iterator[Line]:
    """Every non-empty line of a log, cleaned.  UTF-8, or UTF-16 where a byte order mark says so."""
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(_Raw(stream))
    mark = buffered.peek(2)[:2]
    encoding = "utf-16" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    text = io.TextIOWrapper(buffered, encoding=encoding, errors="replace", newline="\n")
    try:
        number = 1
        whole = True
        while piece := text.readline(LONGEST):
            if whole:
                for part in clean(piece).split("\n"):
                    if part:
                        yield Line(number, part)
            whole = piece.endswith("\n")
            number += whole
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
    text = raw.strip("\r\n")
    if "\r" in text:
        return "\n".join(clean(part) for part in text.split("\r"))
    if "\x1b" in text or "#033" in text:
        text = _ANSI.sub("", text)
    before = ""
    while text != before:
        before = text
        if match := _PREFIX.match(text):
            text = text[match.end() :]
    if text.lstrip()[:1] == "{" and (inner := _unwrapped(text)) is not None:
        return "\n".join(clean(part) for part in inner.splitlines())
    return text.rstrip()


def _unwrapped(text: str) -> str | None:
    """The message inside a JSON log record, or None when it is something else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    for key in _WRAPPERS:
        value = record.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(b, int) and 0 <= b < 256 for b in value):
            return bytes(value).decode("utf-8", "replace")  # journald, for anything with colour
    return None
