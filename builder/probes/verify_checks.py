"""Checks in the common form of all levels, and how they are printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: What Python imports these modules from: an archive, or the folder of the package.
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
MARKS = {"pass": "PASS", "fail": "FAIL", "not-run": "NOT RUN"}

Check = dict[str, Any]


def check(
    level: str,
    name: str,
    good: bool,
    expected: str,
    seen: str,
    *,
    where: str = "",
    reason: str = "",
    figures: dict[str, float] | None = None,
) -> Check:
    """One check that ran, with its evidence."""
    row = {"level": level, "name": name, "status": "pass" if good else "fail"}
    row.update(expected=expected, seen=seen, where=where, reason=reason)
    return {**row, "figures": figures} if figures else dict(row)


def not_run(level: str, name: str, expected: str, reason: str, where: str = "") -> Check:
    """One check that could not run, with the reason; it is never a pass."""
    row = {"level": level, "name": name, "status": "not-run", "expected": expected}
    return {**row, "seen": "", "where": where, "reason": reason}


def passed(checks: Sequence[Check], require: Iterable[str] = ()) -> bool:
    """No check failed, one passed, and of each required level all ran."""
    needed = set(require)
    statuses = [item["status"] for item in checks]
    ran = {item["level"] for item in checks}
    skipped = [c for c in checks if c["status"] == "not-run" and c["level"] in needed]
    return "pass" in statuses and "fail" not in statuses and not skipped and needed <= ran


def command(module: str) -> list[str]:
    """The command line that runs the ``main`` of a module of ours in a process of its own."""
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; import {module} as it; sys.exit(it.main())"
    return [sys.executable, "-B", "-c", start]


def say(text: str) -> None:
    """Print progress to stderr: stdout is for the report."""
    print(text, file=sys.stderr, flush=True)


def show(checks: Sequence[Check]) -> None:
    """Print the report as text to stdout."""
    for item in checks:
        if "refusal" in item:
            print(f"expected refusal {item['level']} {item['name']}: {item['refusal']}")
            continue
        print(
            f"{MARKS[item['status']]:<8}{item['level']:<9}{item['name']}: {item['seen']}".rstrip()
        )
        if item["status"] == "fail":
            print(f"        expected: {item['expected']}")
        if item["reason"] and item["status"] != "pass":
            print(f"        reason:   {item['reason']}")
        elif item["reason"]:
            print(f"        {item['reason']}")
    refused = sum("refusal" in item for item in checks)
    good, bad, idle = (sum(item["status"] == status for item in checks) for status in MARKS)
    also = f"{refused} expected refusal{'s' if refused > 1 else ''}, " if refused else ""
    print(f"{good - refused} pass, {also}{bad} fail, {idle} not run")
