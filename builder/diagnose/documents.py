"""The documents of ``diagnose`` and ``diagnose list``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from msgspec.structs import replace

from builder.diagnose.catalog import SEVERITIES
from builder.diagnose.dispatch import Selection
from builder.diagnose.entries import Engine, Severity, Sure
from builder.diagnose.findings import Finding, Verdict
from builder.diagnose.manylogs import verdict
from builder.util.documents import Count, Document, Part, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.diagnose.entries import Entry
    from builder.diagnose.findings import Diagnosis


class LogRow(Part, frozen=True, kw_only=True):
    """One of several logs."""

    file: str
    engine: str
    vllm: str
    lines: Count
    ready_line: Count
    verdict: Verdict

    @classmethod
    def of(cls, result: Diagnosis) -> LogRow:
        """The row for a log."""
        return cls(
            file=result.file,
            engine=result.engine,
            vllm=result.vllm,
            lines=result.lines,
            ready_line=result.ready,
            verdict=result.verdict,
        )


class Diagnosed(Document, frozen=True, kw_only=True):
    """The findings in one log, or in several."""

    vllm: Annotated[str, Meta(description="the release whose rules apply; empty if unknown")]
    tensorrt_llm: str
    engine: Annotated[
        str,
        Meta(
            description="the program that wrote the log: vllm, tensorrt-llm, sglang, llama.cpp, "
            "nim, ray; empty if unknown"
        ),
    ]
    build: Annotated[
        str,
        Meta(description="a vLLM version that is not a release, such as 0.1.dev1+gabc"),
    ]
    lines: Count
    ready_line: Annotated[Count, Meta(description="the line where the server became ready, or 0")]
    verdict: Verdict
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]
    files: Annotated[
        tuple[LogRow, ...], Meta(description="each of several logs, the earliest failure first")
    ] = ()

    @classmethod
    def of(cls, results: Sequence[Diagnosis]) -> Diagnosed:
        """The document for one or several logs, worst findings first."""
        first, alone = results[0], len(results) == 1
        findings = (finding for result in results for finding in result.findings)
        return cls(
            vllm=next((r.vllm for r in results if r.vllm), ""),
            tensorrt_llm=next((r.tensorrt_llm for r in results if r.tensorrt_llm), ""),
            engine=first.engine,
            build=first.build,
            lines=sum(result.lines for result in results),
            ready_line=first.ready if alone else 0,
            verdict=first.verdict if alone else verdict(results),
            dispatch=first.dispatch
            if alone
            else tuple(replace(s, file=result.file) for result in results for s in result.dispatch),
            findings=tuple(sorted(findings, key=lambda f: SEVERITIES.index(f.severity))),
            files=() if alone else tuple(map(LogRow.of, results)),
        )


class FixRow(Part, frozen=True, kw_only=True):
    """The fix for a range of releases."""

    when: str
    text: Text


class EntryRow(Part, frozen=True, kw_only=True):
    """An entry of the catalogue."""

    id: Text
    severity: Severity
    engine: Engine
    when: Annotated[str, Meta(description="releases of vLLM; empty for all")]
    sure: Sure
    source: str
    message: Text
    patterns: tuple[str, ...]
    fixes: tuple[FixRow, ...]
    examples: tuple[str, ...]

    @classmethod
    def of(cls, entry: Entry) -> EntryRow:
        """The row for an entry."""
        return cls(
            id=entry.id,
            severity=entry.severity,
            engine=entry.engine,
            when=str(entry.when or ""),
            sure=entry.sure,
            source=entry.source,
            message=entry.message,
            patterns=tuple(pattern.regex.pattern for pattern in entry.patterns),
            fixes=tuple(FixRow(when=str(f.when or ""), text=f.text) for f in entry.fixes),
            examples=tuple(example.log for example in entry.examples if example.found),
        )


class Entries(Document, frozen=True, kw_only=True):
    """Entries of the catalogue."""

    entries: tuple[EntryRow, ...]
