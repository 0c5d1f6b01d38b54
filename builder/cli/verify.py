"""``spark-build verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.show import CheckLines, print_json, show_report, show_verdict
from builder.cli.targetinputs import TargetInputs
from builder.console import console
from builder.errors import Exit, SparkBuildError
from builder.index import write_atomically
from builder.places import refuse_place
from builder.sources import IndexSources
from builder.verify.levels import DEFAULT_LEVELS, PROOF_LEVELS, parse_levels
from builder.verify.run import verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.cli.options import PullOptions
    from builder.verify.model import Report, VerifyTarget
    from builder.verify.ongpu import GpuOptions
    from builder.verify.verdict import Verdict


def verify_command(
    *,
    target: str,
    layers: list[str] | None,
    pulls: PullOptions,
    levels: list[str],
    require: list[str],
    platform: str | None,
    patches: list[Path] | None,
    refresh: bool,
    html: Path | None,
    summary: Path | None,
    prove_necessary: bool,
    gpu: GpuOptions,
    json: bool,
) -> None:
    """Verify a target; exit 5 when a check failed or a level that was named did not run."""
    from builder.verify.html import render_html
    from builder.verify.opening import open_target
    from builder.verify.summary import render_summary
    from builder.verify.targets import Opening

    chosen = parse_levels(levels, default=PROOF_LEVELS if prove_necessary else DEFAULT_LEVELS)
    required = parse_levels([*levels, *require], default=())  # asked for by name: it must run
    chosen = tuple(dict.fromkeys([*chosen, *required]))
    gpu.check(chosen)  # wrong input is said before anything runs
    for file in (html, summary):
        if file is not None:
            refuse_place(file)
    inputs = TargetInputs(layers, patches, pulls, refresh=refresh)
    opening = Opening(
        index=inputs.index,
        sources=IndexSources(inputs.index),
        selection=inputs.selection,
        platform=platform,
        gpu=gpu,
        facts_of=inputs.facts.of,
    )
    opened = open_target(target, opening)
    told = None if json else CheckLines()
    try:
        inputs.check(opened.plan)
        run = _proven if prove_necessary else _verified
        report = run(opened, chosen, told)
    finally:
        opened.close()
    if html is not None:
        write_atomically(html, render_html(report, opened.plan, required).encode())
        console.say(f"  evidence: {html}")
    if summary is not None:
        with summary.open("a", encoding="utf-8") as page:
            page.write(render_summary(report, opened.plan, required))
    if told is None:
        print_json(report.as_json(required))
    else:
        show_report(report)
    verdict = report.verdict(required)
    if report.passed(required):
        if not json:
            print(f"{_WORDS[verdict.status]} {target}", flush=True)
        show_verdict(verdict)
        return
    raise _refusal(target, report, verdict)


_WORDS = {"proven": "verified", "not-proven": "NOT PROVEN", "failed": "failed"}


def _refusal(target: str, report: Report, verdict: Verdict) -> SparkBuildError:
    """The error that names what failed or, where nothing did, what had to run and did not."""
    failed = report.of("fail")
    if not failed:
        hint = verdict.todo[0] if verdict.todo else ""
        return SparkBuildError(f"{target}: {verdict.sentence}", Exit.VERIFY_FAILED, hint)
    lines = [f"{c.level} {c.name}: {c.reason or c.seen}" for c in failed[:6]]
    number = "a check" if len(failed) == 1 else f"{len(failed)} checks"
    message = f"{target}: {number} failed:\n  " + "\n  ".join(lines)
    return SparkBuildError(message, Exit.VERIFY_FAILED)


def _verified(target: VerifyTarget, levels: Sequence[str], told: CheckLines | None) -> Report:
    with console.step(f"verify {target.name}"):
        return verify(target, levels, told)


def _proven(target: VerifyTarget, levels: Sequence[str], told: CheckLines | None) -> Report:
    """The report on all layers together, then a verdict on each."""
    from builder.verify.necessity import prove, whole

    with whole(target) as (full, apart):
        report = _verified(full, levels, told)
        report.necessity = prove(full, apart, report)
    return report
