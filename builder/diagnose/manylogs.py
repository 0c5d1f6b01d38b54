"""Logs of several ranks or nodes: the first failure, and those that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from builder.diagnose.findings import Diagnosis, Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Sorts after every possible time in a log.
_LATE = "99"


def earliest_failure_first(results: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The logs, earliest failure first; consequences name the line of their cause."""
    first = _first(results)
    ordered = sorted(results, key=lambda r: _rank(r, first))
    return [_pointed(result, first) for result in ordered]


def _errors(result: Diagnosis) -> list[Finding]:
    return [finding for finding in result.findings if finding.severity == "error"]


def _first(results: Sequence[Diagnosis]) -> tuple[str, Finding] | None:
    """The earliest failure that is not a consequence of another."""
    found = [
        (finding.when or _LATE, index, result.file, finding)
        for index, result in enumerate(results)
        for finding in _errors(result)
        if not finding.follows
    ]
    if not found:
        return None
    _, _, file, finding = min(found, key=lambda f: (f[0], f[1], f[3].line))
    return file, finding


def _rank(result: Diagnosis, first: tuple[str, Finding] | None) -> tuple[bool, bool, str]:
    errors = _errors(result)
    roots = [f.when or _LATE for f in errors if not f.follows]
    times = roots or [f.when or _LATE for f in errors]
    return (
        not (first and result.file == first[0]),
        not errors,
        ("0" if roots else "1") + min(times, default=_LATE),
    )


def _pointed(result: Diagnosis, first: tuple[str, Finding] | None) -> Diagnosis:
    """A log whose consequences name the cause."""
    if first is None or first[0] == result.file:
        return result
    file, cause = first
    findings = tuple(
        msgspec.structs.replace(
            finding,
            message=f"{finding.message} It follows from {file}, line {cause.line}: "
            f"{cause.quote[:200]}",
        )
        if finding.follows and finding.severity == "error"
        else finding
        for finding in result.findings
    )
    return replace(result, findings=findings)


def verdict(results: Sequence[Diagnosis]) -> Verdict:
    """The summary of all logs."""
    failed = [r for r in results if r.verdict.state == "failed"]
    if failed:
        count = f"{len(failed)} of {len(results)} logs show a failure"
        first = _first(results)
        if first is None:
            return Verdict(
                "failed",
                f"{count}, each caused by another rank that died or hangs. The log of that rank "
                f"is not among them.",
            )
        file, cause = first
        when = f" at {cause.when}" if cause.when else ""
        return Verdict(
            "failed", f"{count}. The first is {file}, line {cause.line}{when}: {cause.id}."
        )
    for state in ("stopped", "unclear", "empty"):
        some = [r.file for r in results if r.verdict.state == state]
        if some and not any(r.verdict.state == "ready" for r in results):
            return Verdict(
                state, f"No failure found, but the server did not become ready ({', '.join(some)})."
            )
    warnings = sum(f.severity == "warning" for r in results for f in r.findings)
    what = f"{warnings} warnings" if warnings else "nothing wrong was found"
    return Verdict("ready", f"The server became ready: {what} in {len(results)} logs.")
