"""Two texts side by side."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Lines of each text that are shown side by side.
_SIDE = 200


def side_by_side(left: Sequence[str], right: Sequence[str], width: int) -> list[str]:
    """Two texts in columns; ``|`` marks lines that differ, ``<`` and ``>`` lines that
    only one side has.  Of long texts, the beginning."""
    column = max(20, (width - 3) // 2)
    rows = []
    more = max(len(left), len(right)) - _SIDE
    left, right = left[:_SIDE], right[:_SIDE]
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        for number in range(max(b - a, d - c)):
            one = left[a + number] if a + number < b else None
            other = right[c + number] if c + number < d else None
            mark = "" if tag == "equal" else "<" if other is None else ">" if one is None else "|"
            rows.append(_row(one or "", mark, other or "", column))
    return [*rows, f"and {more} more lines"] if more > 0 else rows


def _row(left: str, mark: str, right: str, column: int) -> str:
    return f"{_cut(left, column):<{column}} {mark:1} {_cut(right, column)}".rstrip()


def _cut(text: str, column: int) -> str:
    text = text.expandtabs(4)
    return text if len(text) <= column else f"{text[: column - 1]}…"
