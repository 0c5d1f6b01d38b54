"""The evidence as Markdown, for a job summary or a release note."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.proof.report import layer_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.proof.checks import Check, Necessity, Status
    from builder.proof.report import Report, Verdict

#: A word for each status, readable without colour or images.
_WORDS: dict[Status, str] = {"pass": "✅ pass", "fail": "❌ FAIL", "not-run": "⚪ not run"}


_VERDICTS = {"proven": "passed", "not-proven": "**NOT PROVEN**", "failed": "**did not pass**"}
_NECESSARY = {True: "**yes**", False: "no", "unknown": "unknown"}


def render_summary(report: Report, require: Sequence[str] = ()) -> str:
    """The verdict first, then one table of layers, one of checks; ends with a newline."""
    verdict = report.verdict(require)
    vllm = report.plan.base.packages.get("vllm", "?")
    lines = [
        f"### {_cell(report.target)}: {_VERDICTS[verdict.status]}",
        "",
        f"**{_cell(verdict.sentence, 1000)}**",
        "",
        *(f"- {_cell(limit)}" for limit in verdict.limits),
        *(f"- try: `{command}`" for command in verdict.todo),
        "",
        *_code(verdict),
        f"vLLM {vllm} · plan `{report.plan.plan_digest}` · {', '.join(report.counts())}",
        "",
        "| layer | state | why |",
        "|---|---|---|",
    ]
    for layer in report.plan.layers:
        state, reason = layer_words(report, layer)
        lines.append(f"| `{layer.name}` | {state} | {_cell(reason)} |")
    if report.necessity is not None:
        lines += ["", "| layer | necessary | without it |", "|---|---|---|"]
        lines += [_verdict(verdict) for verdict in report.necessity]
    lines += ["", "| status | check | seen |", "|---|---|---|"]
    lines += [_row(check) for check in report.checks]
    parts = sorted({part for check in report.checks for part in check.simulated})
    if parts:
        lines += ["", "Simulated: " + "; ".join(_cell(part) for part in parts)]
    return "\n".join(lines) + "\n"


def _code(verdict: Verdict) -> list[str]:
    """The command to serve with the verified target."""
    return ["```sh", *verdict.serve, "```", ""] if verdict.status == "proven" else []


def _row(check: Check) -> str:
    seen = _cell(check.refusal or check.seen or check.reason)
    if check.status != "pass":
        seen = f"expected {_cell(check.expected)}; seen {seen}"
    word = "⛔ expected refusal" if check.refusal else _WORDS[check.status]
    return f"| {word} | {check.level} {_cell(check.name)} | {seen} |"


def _verdict(verdict: Necessity) -> str:
    seen = f"{verdict.level} {verdict.check} fails: {verdict.seen}"
    seen = seen if verdict.check else verdict.reason
    return f"| `{verdict.layer}` | {_NECESSARY[verdict.necessary]} | {_cell(seen)} |"


def _cell(text: object, limit: int = 240) -> str:
    """Text of the target for a table cell: without line breaks, columns and markup."""
    flat = " ".join(str(text).split())
    short = flat if len(flat) <= limit else f"{flat[: limit - 1]}…"
    return short.translate(_ESCAPES)


_ESCAPES = {ord(c): f"\\{c}" for c in "\\`*_[]|"} | {ord("<"): "&lt;", ord(">"): "&gt;"}
