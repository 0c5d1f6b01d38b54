"""Applies hunks to a text; only the content decides whether they are already applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.text import lines_of, nearest_line, nearest_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.diff import Hunk


def _block_positions(lines: list[str], block: Sequence[str]) -> list[int]:
    """The positions of a block of whole lines; searches only near its longest line."""
    wanted = list(block)
    if not wanted:
        return list(range(len(lines) + 1))
    depth = max(range(len(wanted)), key=lambda number: len(wanted[number]))
    found: list[int] = []
    at = depth - 1
    last = len(lines) - len(wanted) + depth + 1
    while True:
        try:
            at = lines.index(wanted[depth], at + 1, max(last, 0))
        except ValueError:
            return found
        if lines[at - depth : at - depth + len(wanted)] == wanted:
            found.append(at - depth)


def _outside(
    places: Sequence[int], block: Sequence[str], others: Sequence[int], other: Sequence[str]
) -> list[int]:
    """Positions of a block that are not inside an occurrence of the other, longer one."""
    if len(block) >= len(other):
        return list(places)
    return [
        at
        for at in places
        if not any(o <= at and at + len(block) <= o + len(other) for o in others)
    ]


@dataclass(frozen=True)
class Verdict:
    """One hunk on a text: ``pre``, ``post``, ``drift`` or ``ambiguous``; ``at`` is a 0-based line,
    ``offset`` the distance from the stated position."""

    found: str
    at: int = -1
    offset: int = 0
    reason: str = ""


def judge_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[list[Verdict], str]:
    """Judge each hunk with fuzz 0 and a unique position; also returns the resulting text."""
    lines = lines_of(text)
    verdicts: list[Verdict] = []
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        pre, post = _block_positions(lines, hunk.old), _block_positions(lines, hunk.new)
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
            lines[pre[0] : pre[0] + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old)
    return verdicts, "".join(lines)


#: Limit of compared line pairs to find the nearest place; more would take seconds.
_COMPARED = 100_000


def _not_found(text: str, hunk: Hunk) -> str:
    """The text that a hunk expects, and the nearest one."""
    if text.count("\n") * len(hunk.old) < _COMPARED:
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
