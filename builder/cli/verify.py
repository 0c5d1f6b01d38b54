"""``spark-build verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.show import print_json, show_report
from builder.cli.targetinputs import TargetInputs
from builder.console import console
from builder.errors import Exit, SparkBuildError
from builder.index import write_atomically
from builder.verify import DEFAULT_LEVELS, PROOF_LEVELS, parse_levels, verify
from builder.wheels import IndexSources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.cli.options import PullOptions
    from builder.verify import Report, VerifyTarget
    from builder.verify.ongpu import GpuOptions


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
    """Verify a target; exit 5 when a check failed or a required level did not run."""
    from builder.verify.html import render_html
    from builder.verify.summary import render_summary
    from builder.verify.targets import Opening, open_target

    gpu.evidence()  # wrong input is said before anything runs
    chosen = parse_levels(levels, default=PROOF_LEVELS if prove_necessary else DEFAULT_LEVELS)
    required = parse_levels(require, default=())
    chosen = tuple(dict.fromkeys([*chosen, *required]))
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
    try:
        inputs.check(opened.plan)
        report = _proven(opened, chosen) if prove_necessary else _verified(opened, chosen)
    finally:
        opened.close()
    if html is not None:
        write_atomically(html, render_html(report, opened.plan, required).encode())
        console.say(f"  evidence: {html}")
    if summary is not None:
        with summary.open("a", encoding="utf-8") as page:
            page.write(render_summary(report, opened.plan, required))
    if json:
        print_json(report.as_json(required))
    else:
        show_report(report)
    if report.passed(required):
        if not json:
            print(f"verified {target}")
        return
    failed = report.of("fail") or report.of("not-run")
    lines = [f"{c.level} {c.name}: {c.reason or c.seen}" for c in failed[:6]]
    message = f"{target}: {len(failed)} checks did not pass:\n  " + "\n  ".join(lines)
    raise SparkBuildError(message, Exit.VERIFY_FAILED)


def _verified(target: VerifyTarget, levels: Sequence[str]) -> Report:
    with console.step(f"verify {target.name}"):
        return verify(target, levels)


def _proven(target: VerifyTarget, levels: Sequence[str]) -> Report:
    """The report on all layers together, then a verdict on each."""
    from builder.verify.necessity import prove, whole

    with whole(target) as (full, apart):
        report = _verified(full, levels)
        report.necessity = prove(full, apart, report)
    return report
