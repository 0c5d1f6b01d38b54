"""Prints pull requests: their state, the relevant files, and conflicts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.documents.pulls import PinnedPull, read_pin
from builder.common.forge import Forges, PullStore, parse_pull
from builder.layers.pulls.report import side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import Layer
    from builder.common.documents.pulls import Conflict, Pin, PullReport

#: Conflicts and file names to print; more are only counted.
_SHOWN = 4
_STYLE = {"open": "yellow", "merged": "green", "closed": "red"}


def show_pulls(reports: Sequence[PullReport]) -> None:
    """Print a report on each pull request of a plan."""
    for report in reports:
        console.say(f"  {report.request}  {state_of(report)}  {report.short}")
        if report.title:
            console.say(f"    {report.title}")
        for line in _lines(report):
            console.say(f"    {console.style(line, 'dim')}")
        for conflict in report.conflicts[:_SHOWN]:
            _show_conflict(report.request, conflict)
        if len(report.conflicts) > _SHOWN:
            console.say(f"    and {len(report.conflicts) - _SHOWN} more hunks that do not fit")
        console.say("")


def state_of(pin: Pin) -> str:
    """``open``, ``closed``, ``merged 2026-05-20, in 0.22.0``; ``""`` for a single commit."""
    text = pin.state if pin.number else "commit"
    if pin.merged_at and pin.state == "merged":
        text += f" {pin.merged_at}"
    if pin.release:
        text += f", in release {pin.release}"
    if pin.superseded_by:
        text += f", superseded by {pin.superseded_by}"
    return console.style(text, _STYLE[pin.state]) if pin.state in _STYLE else text


def _lines(report: PullReport) -> list[str]:
    files = report.installed
    hunks = [found for file in files for found in file.hunks]
    lines = []
    if files:
        parts = [f"{len(files)} installed file{'s' if len(files) != 1 else ''}"]
        parts.append(f"{len(hunks)} hunk{'s' if len(hunks) != 1 else ''}: {_counted(hunks)}")
        parts.append(
            {"whole": "in the base already", "part": "in the base in part"}.get(
                report.in_base, "not in the base"
            )
        )
        lines.append("; ".join(parts))
    moved = [f"{f.path} {offset:+d}" for f in files for offset in f.offsets if offset]
    if moved:
        lines.append(f"offsets: {_listed(moved)}")
    if report.compiled:
        lines.append(f"compiled: {_listed(report.compiled)}")
    if report.dropped:
        dropped = [f"{row.path} ({row.why})" for row in report.dropped]
        lines.append(f"dropped: {_listed(dropped)}")
    return lines


_WORDS = {"pre": "to apply", "post": "already there", "drift": "do not fit", "ambiguous": "unclear"}


def _counted(hunks: Sequence[str]) -> str:
    kinds = [kind for kind in _WORDS if kind in hunks]
    return ", ".join(f"{hunks.count(kind)} {_WORDS[kind]}" for kind in kinds)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _show_conflict(request: str, conflict: Conflict) -> None:
    where = f"{conflict.path}, hunk {conflict.hunk}"
    if conflict.line:
        where += f" (line {conflict.line} in the diff"
        where += f", {conflict.found_line} here)" if conflict.found_line else ")"
    console.say(f"    {console.style(where, 'red')}: {conflict.why}")
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 160)) - 6
    if conflict.expected:
        column = (width - 3) // 2
        heads = f"{f'expected by {request}'[:column]:<{column}}   found in the base"
        console.say(f"      {console.style(heads, 'bold')}")
        for row in side_by_side(conflict.expected, conflict.found, width):
            console.say(f"      {row}".rstrip())
    if conflict.history:
        console.say(f"    {conflict.history}")


def pulls_of(layer: Layer, *, refresh: bool) -> tuple[PinnedPull, ...]:
    """The pins of a layer; with ``refresh``, each with its current state on the forge.

    Raises:
        RemoteError: the forge does not answer.
    """
    store = PullStore(Forges())
    rows = []
    for row in layer.pins.pull:
        pin = read_pin(row, layer.name)
        today = store.resolve(parse_pull(pin.request)) if refresh else None
        rows.append(PinnedPull(pinned=pin, today=today))
    return tuple(rows)


def print_pulls(rows: Sequence[PinnedPull]) -> None:
    """Print pins as text."""
    for row in rows:
        pin, today = row.pinned, row.today
        print(f"\n  pull {pin.request}: {state_of(pin)}")
        print(f"    pinned     {pin.commit}, {pin.date}")
        print(f"    diff       sha256 {pin.sha256}, {pin.size} bytes")
        if today is None:
            continue
        head = "as pinned" if today.commit == pin.commit else f"moved to {today.commit}"
        print(f"    today      {state_of(today)}, {head}")
