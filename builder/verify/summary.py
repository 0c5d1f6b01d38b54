"""The evidence as Markdown, for a job summary or a release note."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.verify import Check, Report, Status
    from builder.verify.necessity import Necessity

#: Each status has a word of its own, so that it can be read without colour or pictures.
_WORDS: dict[Status, str] = {"pass": "✅ pass", "fail": "❌ FAIL", "not-run": "⚪ not run"}


_NECESSARY = {True: "**yes**", False: "no", "unknown": "unknown"}


def render_summary(report: Report, plan: Mapping[str, Any], require: Sequence[str] = ()) -> str:
    """One heading, one table of layers, one of checks; ends with a newline."""
    verdict = "passed" if report.passed(require) else "**did not pass**"
    counts = ", ".join(f"{len(report.of(s))} {w.split(' ', 1)[1]}" for s, w in _WORDS.items())
    vllm = plan["base"]["packages"].get("vllm", "?")
    lines = [
        f"### {_cell(report.target)}: {verdict}",
        "",
        f"vLLM {vllm} · plan `{report.plan_digest}` · {counts}",
        "",
        "| layer | state | why |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{layer['name']}` | {layer['state']} | {_cell(layer['reason'])} |"
        for layer in plan["layers"]
    ]
    if report.necessity is not None:
        lines += ["", "| layer | necessary | without it |", "|---|---|---|"]
        lines += [_verdict(verdict) for verdict in report.necessity]
    lines += ["", "| status | check | seen |", "|---|---|---|"]
    lines += [_row(check) for check in report.checks]
    parts = sorted({part for check in report.checks for part in check.simulated})
    if parts:
        lines += ["", "Simulated: " + "; ".join(_cell(part) for part in parts)]
    return "\n".join(lines) + "\n"


def _row(check: Check) -> str:
    seen = _cell(check.seen or check.reason)
    if check.status != "pass":
        seen = f"expected {_cell(check.expected)}; seen {seen}"
    return f"| {_WORDS[check.status]} | {check.level} {_cell(check.name)} | {seen} |"


def _verdict(verdict: Necessity) -> str:
    check = verdict.check
    seen = f"{check.level} {check.name} fails: {check.seen}" if check else verdict.reason
    return f"| `{verdict.layer}` | {_NECESSARY[verdict.necessary]} | {_cell(seen)} |"


def _cell(text: object, limit: int = 240) -> str:
    """Text of the target in one table cell: no line break, no column, no markup of its own."""
    flat = " ".join(str(text).split())
    short = flat if len(flat) <= limit else f"{flat[: limit - 1]}…"
    return short.translate(_ESCAPES)


_ESCAPES = {ord(c): f"\\{c}" for c in "\\`*_[]|"} | {ord("<"): "&lt;", ord(">"): "&gt;"}
