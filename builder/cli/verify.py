"""``spark-build verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli import options as opt
from builder.cli.show import print_json, show_report
from builder.console import console
from builder.errors import Exit, SparkBuildError
from builder.index import PackageIndex, write_atomically
from builder.verify import parse_levels, verify
from builder.wheels import IndexSources

if TYPE_CHECKING:
    from pathlib import Path


def verify_command(
    *,
    target: str,
    layers: list[str] | None,
    levels: list[str],
    require: list[str],
    platform: str | None,
    patches: list[Path] | None,
    refresh: bool,
    html: Path | None,
    json: bool,
) -> None:
    """Verify a target; exit 5 when a check failed or a required level did not run."""
    from builder.verify.html import render_html
    from builder.verify.targets import Opening, open_target

    chosen = parse_levels(levels)
    required = parse_levels(require, default=())
    chosen = tuple(dict.fromkeys([*chosen, *required]))
    index = PackageIndex(refresh=refresh)
    selection = opt.select(layers, patches)[1] if layers else None
    opening = Opening(
        index=index, sources=IndexSources(index), selection=selection, platform=platform
    )
    opened = open_target(target, opening)
    try:
        with console.step(f"verify {opened.name}"):
            report = verify(opened, chosen)
    finally:
        opened.close()
    if html is not None:
        write_atomically(html, render_html(report, opened.plan, required).encode())
        console.say(f"  evidence: {html}")
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
