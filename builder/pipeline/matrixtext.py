"""The matrix as Markdown, and as a table of one line for each layer and release (CSV)."""

from __future__ import annotations

import csv
import io
from itertools import groupby
from typing import TYPE_CHECKING

from builder.proof.recorded import rows

if TYPE_CHECKING:
    from builder.pipeline.matrix import Matrix

#: Columns of the Markdown table, with their states.
COLUMNS = {
    "needed": ("needed",),
    "in the release": ("upstream", "applied"),
    "not for it": ("not-applicable",),
    "to look at": ("drift", "ambiguous", "needs-rebuild"),
}
_HEAD = (
    "package", "release", "uploaded", "yanked", "platform", "vllm", "layer", "state", "since",
    "file", "line", "anchor", "reason",
)  # fmt: skip


def markdown(document: Matrix) -> str:
    """Layers as rows; each cell has the releases with such a state."""
    body = []
    for name in document.layers:
        cells = [_ranges(document, name, states) for states in COLUMNS.values()]
        body.append([f"`{name}`", *cells])
    used = [n for n in range(len(COLUMNS)) if n < 2 or any(row[n + 1] for row in body)]
    head = ["layer", *(list(COLUMNS)[n] for n in used)]
    return rows(head, [[row[0], *(row[n + 1] for n in used)] for row in body]) + "\n"


def _ranges(document: Matrix, name: str, states: tuple[str, ...]) -> str:
    ranges = []
    pairs = [(row.states.get(name, "not-applicable") in states, row.name) for row in document.rows]
    for there, run in groupby(pairs, key=lambda pair: pair[0]):
        names = [release for _, release in run]
        if there:
            ranges.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
    return ", ".join(ranges)


def table(document: Matrix) -> str:
    """CSV: one line for each layer on each release, with the first place that decides."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_HEAD)
    for row in document.rows:
        for name in document.layers:
            if name not in row.states:
                continue
            place = next(iter(row.evidence.get(name, ())), None)
            where = (place.file, place.line or "", place.anchor) if place else ("", "", "")
            writer.writerow(
                [
                    document.package, row.release, row.uploaded,
                    "" if row.yanked is None else row.yanked or "yes", row.platform, row.vllm,
                    name, row.states[name], row.since.get(name, ""),
                    *map(_inert, map(str, where)), _inert(row.reasons[name]),
                ]
            )  # fmt: skip
    return out.getvalue()


def _inert(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" and text else text
