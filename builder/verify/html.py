"""The evidence as one self-contained HTML page: no script, no font, nothing fetched.

Status is told three ways, so that it is clear without colour too: by a word, by a sign, and by the
form of the mark (filled, outlined or dashed) and of the edge beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder import __version__
from builder.paths import package_file
from builder.verify import LEVELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from builder.verify import Check, Report, Status
    from builder.verify.necessity import Necessity

#: What each level looks at, for the heading of its checks.
ABOUT = {
    "static": "The files: receipts, settings, syntax, and every file against its RECORD.",
    "imports": "Every name that a patched module imports exists, and is called as it is defined.",
    "dispatch": "vLLM's own selector, told that the device is SM121. The log lines are vLLM's.",
    "codegen": "The selected kernels, compiled for SM121 without a GPU, and their machine code.",
    "binaries": "The machine code that the release ships ready-made: does SM121 run it?",
    "device": "On the GB10 itself: each kernel against a reference.",
    "serve": "On a GPU: vllm serve of a small generated model, its log and its answer.",
}
STATUSES: tuple[Status, ...] = ("pass", "fail", "not-run")


@dataclass(frozen=True)
class Level:
    """The checks of a level."""

    name: str
    checks: Sequence[Check]

    @property
    def about(self) -> str:
        """What it looks at."""
        return ABOUT.get(self.name, "")

    @property
    def counts(self) -> dict[Status, int]:
        """Checks by status."""
        return {s: sum(check.status == s for check in self.checks) for s in STATUSES}

    @property
    def status(self) -> Status:
        """The worst of its checks' status: a level that did not wholly run did not pass."""
        counts = self.counts
        if counts["fail"]:
            return "fail"
        return "not-run" if counts["not-run"] or not self.checks else "pass"

    def compared(self, check: Check) -> dict[str, float]:
        """Those figures that other checks have too, as percent of the largest of their name."""
        shares = {}
        for name, value in check.figures.items():
            same = [other.figures[name] for other in self.checks if name in other.figures]
            if len(same) > 1 and max(same) > 0:
                shares[name] = round(100 * max(value, 0) / max(same), 1)
        return shares


def render_html(report: Report, plan: Mapping[str, Any], require: Sequence[str] = ()) -> str:
    """A page for people; everything from the target is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(package_file("data")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=figure, breakable=breakable)
    return environment.get_template("report.html.j2").render(
        version=__version__,
        report=report,
        plan=plan,
        passed=report.passed(require),
        required=list(require),
        failed=report.of("fail"),
        anchor=lambda check: f"check-{report.checks.index(check) + 1}",
        counts={status: len(report.of(status)) for status in STATUSES},
        levels=levels_of(report),
        verdicts=verdicts_of(report.necessity),
        simulated=sorted({part for check in report.checks for part in check.simulated}),
    )


def levels_of(report: Report) -> list[Level]:
    """Every level that there is, with or without checks."""
    names = dict.fromkeys([*LEVELS, *(check.level for check in report.checks)])
    return [Level(n, [check for check in report.checks if check.level == n]) for n in names]


def verdicts_of(necessity: Sequence[Necessity] | None) -> dict[str, Necessity]:
    """Verdicts by layer; none where none was asked for."""
    return {verdict.layer: verdict for verdict in necessity or ()}


def figure(value: float) -> str:
    """A number as people read it: ``12,800``, ``17.5``."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def breakable(text: str) -> Markup:
    """A path or reference that may be broken after its separators, and not within a word."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[/:@.,_=])", text)
    return Markup("<wbr>").join(escape(part) for part in parts)
