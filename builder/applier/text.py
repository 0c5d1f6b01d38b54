"""Lines of text, and the line most similar to a missing one.  Imports no sibling."""

from __future__ import annotations

import difflib
import io


def first_line(text: str) -> str:
    """The first non-empty line of ``text``, for messages."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def lines_of(text: str) -> list[str]:
    """Lines with their ends, split like Python's parser: only at line feeds.

    ``str.splitlines`` also splits at form feeds and at separators inside string literals.
    """
    return io.StringIO(text, newline="\n").readlines()


#: Limits to find the nearest place or line, for a message; more would take seconds: compared pairs
#: of lines, lines of a text, and characters of a line.
_PAIRS, _LINES, _LONG = 100_000, 50_000, 1000
#: What parsing foreign text as Python raises: of zero bytes, and of deep nesting too.
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def nearest_place(text: str, old: str) -> str:
    """The first differing line at the place in ``text`` with most lines of ``old``, or ''.

    Also ``''`` if the texts are long.
    """
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line.strip() for line in old.strip("\n").splitlines()]
    if len(lines) * len(wanted) >= _PAIRS or max(map(len, (*wanted, *lines)), default=0) > _LONG:
        return ""
    best, score = 0, 0.0
    for start in range(len(lines) - len(wanted) + 1):
        pairs = zip(lines[start:], wanted, strict=False)
        alike = sum(len(b) * _likeness(a, b) for a, b in pairs)
        if alike > score:
            best, score = start, alike
    if score < sum(map(len, wanted)) / 2:
        return ""
    for number, (found, line) in enumerate(zip(lines[best:], wanted, strict=False), best + 1):
        if found != line:
            return f"{line!r} not found; nearest is line {number}: {found}"
    return ""


def _likeness(one: str, other: str) -> float:
    """The similarity of two lines, from 0 to 1."""
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).quick_ratio()


def nearest_line(text: str, wanted: str) -> str:
    """The line of ``text`` most similar to ``wanted``, as ``'LINE: TEXT'``, or ''.

    Also ``''`` if the text or the line is long; long lines of the text are left out.
    """
    lines = text.splitlines()
    if len(lines) > _LINES or len(wanted) > _LONG:
        return ""
    short = [(n, line.strip()) for n, line in enumerate(lines, 1) if len(line) <= _LONG]
    numbered = {line: n for n, line in reversed(short)}
    close = difflib.get_close_matches(wanted, list(numbered), n=1, cutoff=0.5)
    return f"{numbered[close[0]]}: {close[0]}" if close else ""
