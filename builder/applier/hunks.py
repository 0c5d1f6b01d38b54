"""Applies hunks to a text; only the content decides whether they are already applied."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.text import lines_of, nearest_line, nearest_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.diff import Hunk


#: Limit of lines that are compared to find the hunks of one file: about 3 s.
_SEARCHED = 100_000_000


class _Lines:
    """The lines of a text, with a search for blocks of lines."""

    def __init__(self, text: str) -> None:
        self.lines = lines_of(text)
        self._counts = Counter(self.lines)
        self._left = _SEARCHED

    def positions(self, block: Sequence[str], expected: int) -> list[int]:
        """The positions of a block of whole lines; looks at the expected one first.

        Raises:
            ApplyError: the file and its diff are too large to search.
        """
        wanted = list(block)
        if not wanted:
            return list(range(len(self.lines) + 1))
        depth = min(range(len(wanted)), key=lambda number: self._counts[wanted[number]])
        count = self._counts[wanted[depth]]
        if count == 0:
            return []
        if count == 1 and expected >= 0 and self._is_at(wanted, expected):
            return [expected]
        self._left -= len(self.lines) + 20 * count * len(wanted)  # a candidate costs 20 lines
        if self._left < 0:
            raise ApplyError("the diff has too many hunks for a file of this length", EXIT_USAGE)
        return self._search(wanted, depth)

    def _search(self, wanted: list[str], depth: int) -> list[int]:
        found: list[int] = []
        at = depth - 1
        last = len(self.lines) - len(wanted) + depth + 1
        while True:
            try:
                at = self.lines.index(wanted[depth], at + 1, max(last, 0))
            except ValueError:
                return found
            if self._is_at(wanted, at - depth):
                found.append(at - depth)

    def _is_at(self, wanted: list[str], at: int) -> bool:
        return self.lines[at : at + len(wanted)] == wanted

    def replace(self, at: int, old: Sequence[str], new: Sequence[str]) -> None:
        """Put one block in the place of another."""
        self._counts.subtract(old)
        self._counts.update(new)
        self.lines[at : at + len(old)] = new


def _outside(
    places: Sequence[int], block: Sequence[str], others: Sequence[int], other: Sequence[str]
) -> list[int]:
    """Positions of a block that are not inside an occurrence of the other, longer one.

    ``others`` is sorted.
    """
    if len(block) >= len(other):
        return list(places)
    reach = len(other) - len(block)

    def inside(at: int) -> bool:
        first = bisect_left(others, at - reach)
        return first < len(others) and others[first] <= at

    return [at for at in places if not inside(at)]


@dataclass(frozen=True)
class Verdict:
    """One hunk on a text: ``pre``, ``post``, ``drift`` or ``ambiguous``; ``at`` is a 0-based line,
    ``offset`` the distance from the stated position."""

    found: str
    at: int = -1
    offset: int = 0
    reason: str = ""


def judge_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[list[Verdict], str]:
    """Judge each hunk with fuzz 0 and a unique position; also returns the resulting text.

    Raises:
        ApplyError: the file and its hunks are too large to search.
    """
    lines = _Lines(text)
    last = 0
    verdicts: list[Verdict] = []
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        expected = hunk.start - 1 + shift + last
        pre, post = lines.positions(hunk.old, expected), lines.positions(hunk.new, expected)
        pre, post = _outside(pre, hunk.old, post, hunk.new), _outside(post, hunk.new, pre, hunk.old)
        count = len(pre) + len(post)
        if count != 1:
            verdicts.append(
                Verdict(AMBIGUOUS, reason=f"hunk {number} matches {count} times")
                if count
                else Verdict(DRIFT, reason=f"hunk {number}")
            )
            continue
        offset = pre[0] + 1 - hunk.start - shift if pre and hunk.old else 0
        verdicts.append(Verdict(PRE if pre else POST, (pre or post)[0], offset))
        if pre:
            last = offset
            lines.replace(pre[0], hunk.old, hunk.new)
            shift += len(hunk.new) - len(hunk.old)
    return verdicts, "".join(lines.lines)


def _not_found(text: str, hunk: Hunk) -> str:
    """The text that a hunk expects, and the nearest one."""
    place = nearest_place(text, "".join(hunk.old))
    if place:
        return place
    wanted = next((line for line in hunk.old or hunk.new if line.strip()), "").strip()
    near = nearest_line(text, wanted)
    return f"{wanted!r} not found" + (f"; nearest is line {near}" if near else "")


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[str, str, list[str]]:
    """Judge all hunks of a file together: ``(found, new text or reason, offsets)``."""
    verdicts, new = judge_hunks(text, hunks)
    for hunk, verdict in zip(hunks, verdicts, strict=True):
        if verdict.found == AMBIGUOUS:
            return AMBIGUOUS, verdict.reason, []
        if verdict.found == DRIFT:
            return DRIFT, f"{verdict.reason}: {_not_found(text, hunk)}", []
    there = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.found == POST]
    if there and len(there) < len(verdicts):
        missing = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.found == PRE]
        reason = f"some hunks are already applied ({', '.join(there)}) and some are not"
        return DRIFT, f"{reason} ({', '.join(missing)})", []
    offsets = [(n, verdict.offset) for n, verdict in enumerate(verdicts, 1) if verdict.offset]
    notes = [f"hunk {number} applied at offset {offset:+d}" for number, offset in offsets]
    return POST if there else PRE, new, notes
