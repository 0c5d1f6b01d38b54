"""The evidence as a self-contained HTML page, without scripts, fonts or external files.

Status is told three ways, so that it is clear without colour too: by a word, by a sign, and by the
form of the mark (filled, outlined or dashed) and of the edge beside it.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder import __version__, settings
from builder.common.escape import plain
from builder.common.model.base import base_kind
from builder.common.model.reference import Ref
from builder.common.paths import package_file
from builder.images.engines.overlay import name_of_both
from builder.images.engines.runcommands import RUN
from builder.proof.kinds import KINDS
from builder.proof.levels import LEVELS
from builder.proof.report import kernel_of, layer_words, serve_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from builder.common.documents.plan import PlanDocument
    from builder.proof.checks import Check, Necessity, Status
    from builder.proof.report import Report
STATUSES: tuple[Status, ...] = ("pass", "fail", "not-run")
#: Figures of a table that ought to be zero, and how a sentence says them.
BAD = {
    "wrong": ("wrong value", "wrong values"),
    "races": ("race", "races"),
    "did not end": ("run that did not end", "runs that did not end"),
}


def counted(checks: Sequence[Check]) -> dict[str, int]:
    """Checks by status; expected refusals, and what a release does not have, by themselves."""
    counts: dict[str, int] = {
        s: sum(c.status == s and not c.refusal and not c.idle for c in checks) for s in STATUSES
    }
    refused = sum(bool(check.refusal) for check in checks)
    return {**counts, "refused": refused, "idle": sum(check.idle for check in checks)}


def _in_table(level: str) -> bool:
    return level in LEVELS and LEVELS[level].one_table


def _plain(check: Check) -> bool:
    """Whether there is nothing to see in a check but that it passed."""
    drawn = check.figures and not _in_table(check.level)
    return check.status == "pass" and not check.refusal and not drawn


@dataclass(frozen=True)
class Level:
    """The checks of a level."""

    name: str
    checks: Sequence[Check]

    @property
    def about(self) -> str:
        """What it looks at."""
        return LEVELS[self.name].about if self.name in LEVELS else ""

    @property
    def counts(self) -> dict[str, int]:
        """Checks by status, with expected refusals beside the passes."""
        return counted(self.checks)

    @property
    def status(self) -> Status:
        """The worst of its checks' status: a level that did not wholly run did not pass."""
        counts = self.counts
        if counts["fail"]:
            return "fail"
        return "not-run" if counts["not-run"] or counts["idle"] == len(self.checks) else "pass"

    @property
    def open(self) -> list[Check]:
        """The checks that are to be seen at once: all but plain passes."""
        return [check for check in self.checks if not _plain(check)]

    @property
    def folded(self) -> list[Check]:
        """The plain passes."""
        return [check for check in self.checks if _plain(check)]

    @property
    def total(self) -> str:
        """What its table comes to, in one sentence."""
        rows = [check.figures for check in self.rows]
        values = sum(figures.get("values", 0) for figures in rows)
        bad = {name: sum(figures.get(name, 0) for figures in rows) for name in BAD}
        schedules = max((figures.get("schedules", 0) for figures in rows), default=0)
        failed = sum(check.status == "fail" for check in self.rows)
        found = ", ".join(
            f"{figure(bad[name])} {words[bad[name] != 1]}"
            for name, words in BAD.items()
            if bad[name]
        )
        said = f"{failed} of them failed: {found}." if failed else "Nothing wrong was found."
        return (
            f"{len(rows)} checks computed {figure(values)} values, each input in "
            f"{figure(schedules)} schedules. {said}"
        )

    @property
    def rows(self) -> list[Check]:
        """The checks of its table, where it has one."""
        return [check for check in self.checks if check.figures and _in_table(self.name)]

    def compared(self, check: Check) -> dict[str, float]:
        """Those figures that other checks have too, as percent of the largest of their name."""
        shares = {}
        for name, value in check.figures.items():
            same = [other.figures[name] for other in self.checks if name in other.figures]
            if len(same) > 1 and max(same) > 0:
                shares[name] = round(100 * max(value, 0) / max(same), 1)
        return shares


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What vLLM selects for one kind of layer."""

    kind: str
    name: str
    check: Check


def render_html(
    report: Report,
    require: Sequence[str] = (),
    made: datetime.datetime | None = None,
) -> str:
    """A page for people; everything from the target is escaped.

    ``made`` is when that was: now, or ``SOURCE_DATE_EPOCH``.
    """
    return render_page(
        "report.html.j2",
        report=report,
        plan=report.plan,
        made=made or now(),
        kernels=kernels_of(report),
        run=run_lines(report),
        overlay=is_overlay(report),
        links=links_of(report.plan),
        tag=tag_of(report.target),
        words=lambda layer: layer_words(report, layer),
        verdict=report.verdict(require),
        required=list(require),
        failed=report.of("fail"),
        bad=BAD,
        anchor=lambda check: f"check-{report.checks.index(check) + 1}",
        counts=counted(report.checks),
        levels=levels_of(report),
        verdicts=verdicts_of(report.necessity),
        simulated=sorted({part for check in report.checks for part in check.simulated}),
    )


def render_page(template: str, **values: object) -> str:
    """A page of ``builder/data``; everything in it is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(package_file("data")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=figure, breakable=breakable)
    page = environment.get_template(template).render(version=__version__, **values)
    return plain(page)  # no control or bidirectional character, as on a terminal


def levels_of(report: Report) -> list[Level]:
    """Every level that there is, with or without checks."""
    names = dict.fromkeys([*LEVELS, *(check.level for check in report.checks)])
    return [Level(n, [check for check in report.checks if check.level == n]) for n in names]


def now() -> datetime.datetime:
    """The time on a page: now, or ``SOURCE_DATE_EPOCH``."""
    named = settings.EPOCH.value
    if named.isdigit():
        return datetime.datetime.fromtimestamp(int(named), datetime.UTC)
    return datetime.datetime.now(datetime.UTC)


def kernels_of(report: Report) -> list[Kernel]:
    """The kernel of each kind of layer, or why there is none."""
    asked = [check for check in report.checks if check.level == "dispatch" and not check.moot]
    return [
        Kernel(
            kind=KINDS.get(check.name, check.name),
            name=kernel_of(check.seen) if check.status == "pass" and not check.refusal else "",
            check=check,
        )
        for check in asked
    ]


def tag_of(target: str) -> str:
    """The tag of an image in a registry or an engine; empty for what has none."""
    name = target.partition("@")[0].rpartition("/")[2]
    return name.partition(":")[2] if Ref(target).has_name else ""


def is_overlay(report: Report) -> bool:
    """Whether a target is the changed files alone, in a layout."""
    return Ref(report.target).in_layout and base_kind(report.plan.base.kind).is_wheels


def run_lines(report: Report) -> list[str]:
    """What starts the server: in a container where this is an image, else in its environment."""
    ref = Ref(name_of_both(report.plan) if is_overlay(report) else report.target)
    if not (ref.has_name and report.digests):
        return list(serve_lines(report.plan))
    return [f"{RUN} {ref.place} {line.removeprefix('vllm ')}" for line in serve_lines(report.plan)]


def links_of(plan: PlanDocument) -> dict[str, str]:
    """Pages about what the image is made of: the release, and pull requests among the layers."""
    vllm = plan.base.packages.get("vllm", "")
    found = {}
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)+(?:\.post[0-9]+|rc[0-9]+)?", vllm):
        page = "https://github.com/vllm-project/vllm/releases/tag"
        found[f"vLLM {vllm}"] = f"{page}/v{vllm}"
    pulls = {pull.request: pull.url for pull in plan.pulls}
    return {**found, **{n: url for n, url in pulls.items() if url.startswith("https://")}}


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
