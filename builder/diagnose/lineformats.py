"""Repairs pasted logs: HTML escapes, typographic quotes, lost line ends.

A paste from an issue, a chat or a mail often differs from the original.  What can be repaired
without guessing is repaired here, before any matching.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def mended(text: str) -> str:
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
    found: list[str] = []
    start = 0
    for match in _INNER.finditer(text):
        at = match.start()
        head = _RECORD.match(text, start)
        if at <= start or (head and at < head.end()):
            continue
        found.append(text[start:at])
        start = at
    return [*found, text[start:]]


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
    held: list[tuple[int, str]] = []
    for number, text in lines:
        if held and len(held) < _PIECES and shape.goes_on(held[-1][1], text):
            held.append((number, text))
            continue
        yield from shape.joined(held)
        held = [(number, text)]
    yield from shape.joined(held)


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
        if not own.strip() or not bare.strip() or _BEGINS.match(own) or _WHOLE.search(bare):
            return False
        word = own.split(None, 1)[0]
        if word == bare.split(None, 1)[0]:  # the next record of the same program
            return False
        short = len(text) < max(30, 0.4 * self.width) and len(word) < 0.5 * self.width
        if short or set(bare.strip()) <= set("^~-= |+"):
            return False
        return len(text.rstrip()) + 1 + len(word) > self.width

    def joined(self, held: list[tuple[int, str]]) -> Iterator[CandidateLine]:
        """Join pieces to one line."""
        if len(held) < 2:
            yield from (CandidateLine(number, text) for number, text in held)
            return
        number = held[0][0]
        yield from (CandidateLine(at, piece, again=True) for at, piece in held)
        pieces = [piece.rstrip("\r\n") for _, piece in held]
        rest = [self.bare(piece) for piece in pieces[1:]]
        cut = self.hard and all(len(piece) == self.width for piece in pieces[:-1])
        tight = pieces[0] + "".join(rest)
        loose = pieces[0].rstrip()
        for piece in rest:
            broken = re.search(r"\w-$", loose) and piece[:1].isalpha()
            loose += ("" if broken else " ") + piece.strip()
        yield CandidateLine(number, tight if cut else loose, len(held))
        yield CandidateLine(number, loose if cut else tight, len(held), again=True)
