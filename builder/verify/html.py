"""The evidence as one self-contained HTML page: no script, no font, nothing fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.verify import Report


def render_html(report: Report, plan: Mapping[str, Any], require: Sequence[str] = ()) -> str:
    """A page for people; everything from the target is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(package_file("data"))
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    levels: dict[str, list[dict[str, Any]]] = {}
    for check in report.checks:
        levels.setdefault(check.level, []).append({"figures": {}, **check.as_json()})
    layers = [{"since": "", **layer} for layer in plan["layers"]]
    return environment.get_template("report.html.j2").render(
        target=report.target,
        plan_digest=report.plan_digest,
        passed=report.passed(require),
        counts={
            "pass": len(report.of("pass")),
            "fail": len(report.of("fail")),
            "rest": len(report.of("not-run")),
        },
        plan={**plan, "layers": layers},
        levels=list(levels.items()),
        simulated=sorted({part for check in report.checks for part in check.simulated}),
    )
