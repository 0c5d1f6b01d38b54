"""A diagnosis as text: the verdict first, then each finding with its line."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from builder.diagnose.dispatch import LABELS
from builder.diagnose.findings import UNKNOWN
from builder.diagnose.health import COVERED
from builder.diagnose.judging import described
from builder.diagnose.manylogs import verdict
from builder.util.console import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.diagnose.findings import Diagnosis, Finding

_SURE = {
    "certain": "",
    "likely": "the cause is likely but not certain",
    "reported": "reported by users; not confirmed in the code",
}
#: Hint for a log that ends early.
_STOPPED = (
    "If the server still starts, wait and read again.  If it has exited, find the reason: "
    "docker inspect -f '{{.State.ExitCode}} {{.State.OOMKilled}}' NAME, and sudo dmesg -T | tail"
)
_UNCLEAR = "Give the log from its start: docker logs NAME 2>&1 | spark-build diagnose -"
_OTHER = "{name} is not in the catalogue: the failure is shown, but vLLM fixes do not apply."


def width() -> int:
    """Width of the report in columns."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def lines_of(result: Diagnosis) -> Iterator[str]:
    """The report of one log."""
    name = f"{result.file}: " if result.file else ""
    yield from textwrap.wrap(name + result.verdict.sentence, width()) or [name]
    if result.verdict.state == "empty":
        return
    yield f"{described(result)}, {counted(result.lines, 'line')}"
    if result.engine and result.engine not in COVERED and not result.vllm:
        yield from textwrap.wrap(_OTHER.format(name=described(result)), width())
    yield ""
    if result.dispatch:
        yield "  selected"
        label = max(len(LABELS[s.kind]) for s in result.dispatch)
        kernel = max(len(s.kernel) for s in result.dispatch)
        for chosen in result.dispatch:
            yield (
                f"    {LABELS[chosen.kind]:<{label}}  {chosen.kernel:<{kernel}}  line {chosen.line}"
            )
    else:
        yield "  no line shows the selected kernels (the start of the log is needed)"
    yield ""
    for finding in result.findings:
        yield from _finding(finding)
    if result.verdict.state == "stopped":
        yield from _paragraph("", _STOPPED, "  ")
    elif result.verdict.state == "unclear":
        yield from _paragraph("", _UNCLEAR, "  ")


def lines_of_several(results: Sequence[Diagnosis]) -> Iterator[str]:
    """The report of several logs: one verdict, then each."""
    yield from textwrap.wrap(verdict(results).sentence, width())
    for result in results:
        yield ""
        yield from lines_of(result)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {finding.severity:<8}line {finding.line}: {finding.id}"
    yield from _paragraph("", finding.message)
    if finding.before:
        yield f"{_INDENT}  line {finding.before_line} | {_cut(finding.before)}"
    if finding.quote:
        quote = finding.quote if finding.id == UNKNOWN else _cut(finding.quote)
        yield f"{_INDENT}> line {finding.line} | {quote}"
    for part in finding.more:
        yield f"{_INDENT}  {_cut(part)}"
    for later in finding.became[-2:]:
        yield f"{_INDENT}  became | {_cut(later)}"
    if finding.process:
        yield f"{_INDENT}  process: {finding.process}"
    if finding.frame:
        yield f"{_INDENT}  innermost frame: {finding.frame}"
    yield from _paragraph("fix: ", finding.fix)
    if _SURE.get(finding.sure):
        yield from _paragraph("sure: ", _SURE[finding.sure])
    if finding.link:
        yield f"{_INDENT}see: {finding.link}"
    yield ""


_INDENT = " " * 10
#: Maximum length of a context line.
_CUT = 200


def _cut(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[:_CUT]}..."


def _paragraph(lead: str, text: str, indent: str = _INDENT) -> Iterator[str]:
    if text:
        yield from textwrap.wrap(
            lead + text,
            width(),
            initial_indent=indent,
            subsequent_indent=indent + " " * len(lead),
            break_long_words=False,
            break_on_hyphens=False,
        )
