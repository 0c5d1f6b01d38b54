"""Lines of text, and the line most similar to one that was not found. Imports no sibling."""

from __future__ import annotations

import difflib
import io


def first_line(text: str) -> str:
    """The first line of ``text`` that says something, for messages."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def lines_of(text: str) -> list[str]:
    """Lines with their ends, split where Python's parser splits: at line feeds alone.

    ``str.splitlines`` also splits at form feeds and at separators inside string literals.
    """
    return io.StringIO(text, newline="\n").readlines()


def nearest_place(text: str, old: str) -> str:
    """Where most lines of ``old`` stand in ``text``: the first that differs there, or ''."""
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line.strip() for line in old.strip("\n").splitlines()]
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
    """How alike two lines are, from 0 to 1."""
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).quick_ratio()


def nearest_line(text: str, wanted: str) -> str:
    """The line of ``text`` most like ``wanted``, as ``'LINE: TEXT'``, or an empty string."""
    numbered = {line.strip(): n for n, line in reversed(list(enumerate(text.splitlines(), 1)))}
    close = difflib.get_close_matches(wanted, list(numbered), n=1, cutoff=0.5)
    return f"{numbered[close[0]]}: {close[0]}" if close else ""
