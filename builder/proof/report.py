"""The report of a verification, and its verdict: what is proven, what is not, and the next step.

Text, JSON, the page and the Markdown summary all print this verdict.
"""

from __future__ import annotations

import datetime
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder import __version__, settings
from builder.common.console import plain
from builder.common.document import Count, Digest, Document, Moment, Part, Text
from builder.common.paths import package_file
from builder.common.reference import LAYOUT, Ref, base_kind
from builder.errors import SparkBuildError
from builder.images.engines.oci import name_of_both
from builder.images.engines.runcommands import RUN
from builder.layers.catalog import Catalog
from builder.proof.checks import DEFAULT_LEVELS, KINDS, LEVELS, Check, Necessity, few

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from markupsafe import Markup

    from builder.common.plan import PlanDocument, PlannedLayer
    from builder.proof.checks import Status


#: The main kinds of layer of a profile; other kinds are in the list of kernels.
_MAIN = {"nvfp4-linear": "linear", "nvfp4-moe": "MoE"}
#: Common names of kernel families, by a part of the kernel's name; the first match counts.
_FAMILIES = (
    ("b12x", "b12x"),
    ("marlin", "Marlin"),
    ("flashinfercutlass", "FlashInfer's CUTLASS"),
    ("cutlass", "CUTLASS"),
)
_SELECTED = re.compile(r"(?:Using|Selected|selected) '?(?:NvFp4LinearBackend\.)?([\w.]*\w)'?")
_SHOWN = 3
#: Where a command of the verdict writes the image that another one verifies.
_PATCHED = "oci:patched"

Proof = Literal["proven", "not-proven", "failed"]


class Verdict(Part, frozen=True, kw_only=True):
    """What is proven, what is not, and the next step."""

    status: Annotated[
        Proof, Meta(description="not-proven: nothing failed, and something did not run")
    ]
    sentence: Annotated[Text, Meta(description="the verdict in a few words")]
    kernels: Annotated[
        dict[str, Text], Meta(description="kind of layer: the kernel that vLLM selected")
    ]
    limits: Annotated[
        tuple[Text, ...], Meta(description="models that do not start with this profile")
    ]
    serve: Annotated[
        tuple[Text, ...],
        Meta(
            description="command lines of a server: for every model, then for MoE models; none "
            "if a check failed"
        ),
    ]
    todo: Annotated[
        tuple[Text, ...],
        Meta(description="commands that prove what is missing, or build what failed"),
    ]


class ReportDocument(Document, frozen=True, kw_only=True):
    """The evidence of one verification."""

    target: Text
    digests: Annotated[
        tuple[Digest, ...],
        Meta(description="of the verified image, under every name; none if it is not an image"),
    ]
    plan_digest: Digest
    passed: Annotated[
        bool,
        Meta(
            description="no check failed, at least one passed, and no required level was left out"
        ),
    ]
    not_run: Count
    verdict: Verdict
    checks: tuple[Check, ...]
    necessity: Annotated[
        tuple[Necessity, ...] | None,
        Meta(description="a verdict on each layer, in order of application; only if requested"),
    ] = None
    cached: Annotated[
        Moment | None,
        Meta(description="when these checks ran, if an earlier run with the same content did"),
    ] = None


@dataclass(kw_only=True)
class Report:
    """All checks of one verification."""

    target: str
    #: the plan that the target was compared with
    plan: PlanDocument
    #: all digests of the verified image; empty if it is not an image
    digests: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)
    #: the necessity of each layer, if requested
    necessity: list[Necessity] | None = None
    #: when an earlier run made these checks; None if this run did
    cached: Moment | None = None
    #: layers of the plan that the target was not built with, and that would change files of it
    unapplied: tuple[str, ...] = ()

    @property
    def as_it_is(self) -> str:
        """In words, which layers the target lacks."""
        layers = f"{len(self.unapplied)} layers" if len(self.unapplied) > 1 else "a layer"
        return f"as it is, without {layers} of the plan ({few(self.unapplied)})"

    def of(self, status: Status) -> list[Check]:
        """Checks with a status."""
        return [check for check in self.checks if check.status == status]

    def counts(self) -> list[str]:
        """Numbers of checks by result, as text: ``19 pass``, ``1 expected refusal``."""
        refused = sum(bool(check.refusal) for check in self.checks)
        also = [f"{refused} expected refusal{'s' if refused > 1 else ''}"] if refused else []
        good, bad, idle = (len(self.of(status)) for status in ("pass", "fail", "not-run"))
        return [f"{good - refused} pass", *also, f"{bad} fail", f"{idle} not run"]

    def passed(self, require: Sequence[str] = ()) -> bool:
        """Whether no check failed, at least one passed, and all required levels ran."""
        skipped = [c for c in self.of("not-run") if c.level in require and not c.idle]
        ran = {check.level for check in self.checks}
        absent = [level for level in require if level not in ran]
        return bool(self.of("pass")) and not self.of("fail") and not skipped and not absent

    def verdict(self, require: Sequence[str] = ()) -> Verdict:
        """The overall verdict; ``require`` are the levels that must run."""
        return _verdict_of(self, require)

    def document(self, require: Sequence[str] = ()) -> ReportDocument:
        """The evidence."""
        return ReportDocument(
            target=self.target,
            digests=self.digests,
            plan_digest=self.plan.plan_digest,
            passed=self.passed(require),
            not_run=len(self.of("not-run")),
            verdict=self.verdict(require),
            checks=tuple(self.checks),
            necessity=None if self.necessity is None else tuple(self.necessity),
            cached=self.cached,
        )


def _verdict_of(report: Report, require: Sequence[str]) -> Verdict:
    ran = {check.level for check in report.checks}
    missing = [c for c in report.of("not-run") if not c.moot or (c.level in require and not c.idle)]
    absent = [level for level in require if level not in ran]
    parts = []
    if report.unapplied:
        with_them = "" if report.plan.base.ref == LAYOUT else next(_building(report))
        words = f"; with them: {with_them}" if with_them else ""
        parts.append(f"The target {report.as_it_is}{words}.")
    status: Proof = "proven"
    if failed := report.of("fail"):
        status = "failed"
        parts.append(f"FAILED: {_named(failed)}.")
    elif missing or absent or not report.of("pass"):
        status = "not-proven"
    if missing or absent or status == "not-proven":
        parts.append(f"NOT PROVEN: {'; '.join(_unproven(missing, absent))}.")
    known = list(_proven(report))
    if known and not failed:
        parts.append(f"Proven without hardware: {'; '.join(known)}.")
    if "dispatch" not in ran and report.plan.expect:
        parts.append(f"Not checked: {LEVELS['dispatch'].unknown}.")
    parts.append(_hardware(report))
    return Verdict(
        status=status,
        sentence=" ".join(parts),
        kernels={c.name: kernel for c in _selected(report) if (kernel := kernel_of(c.seen))},
        limits=tuple(check.refusal for check in report.of("pass") if check.refusal),
        serve=() if failed else serve_lines(report.plan),
        todo=tuple(_repairs(report) if failed else _todo(report, missing)),
    )


def serve_lines(plan: PlanDocument) -> tuple[str, ...]:
    """The server's command line with the flags of a plan, and the one for MoE models."""
    plain = " ".join(["vllm serve MODEL", *plan.serve_flags])
    return tuple(dict.fromkeys([plain, " ".join([plain, *plan.moe_serve_flags])]))


def layer_words(report: Report, layer: PlannedLayer) -> tuple[str, str]:
    """A layer's state and reason; in a passed target, *needed* becomes *added*."""
    good = {check.name for check in report.of("pass") if check.level == "static"}
    if layer.state != "needed" or f"layer {layer.name}" not in good:
        return layer.state, layer.reason
    return "added", re.sub(r"\b(files?) to change\b", r"\1 changed", layer.reason)


def kernel_of(seen: str) -> str:
    """The kernel in a log line or reply of vLLM; empty if there is none."""
    match = _SELECTED.search(seen)
    return match[1].rpartition(".")[2] if match else ""


def family_of(kernel: str) -> str:
    """The common name of a kernel's family."""
    plain = kernel.lower().replace("_", "")
    return next((name for part, name in _FAMILIES if part in plain), kernel)


def _named(checks: Sequence[Check]) -> str:
    names = [f"{check.level} {check.name}" for check in checks[:_SHOWN]]
    more = [f"{len(checks) - _SHOWN} more"] if len(checks) > _SHOWN else []
    return ", ".join([*names, *more])


def _unproven(missing: Sequence[Check], absent: Sequence[str]) -> Iterator[str]:
    """What is not proven, and why, by level."""
    if not missing and not absent:
        yield "nothing was checked"
    for level in dict.fromkeys(check.level for check in missing):
        of_level = [check for check in missing if check.level == level]
        reasons = dict.fromkeys(_brief(_why(check)[0]) for check in of_level)
        yield f"{_unknown(level)}, because {level} did not run: {'; '.join(list(reasons)[:_SHOWN])}"
    for name in absent:
        yield f"{_unknown(name)}, because {name} did not run"


def _unknown(level: str) -> str:
    return LEVELS[level].unknown if level in LEVELS else f"what level {level} proves"


def _on_gb10(level: str) -> bool:
    return level in LEVELS and LEVELS[level].on_gb10


def _brief(reason: str, limit: int = 240) -> str:
    """A reason in one sentence; for a command's output, its end."""
    last = reason.rpartition(" | ")[2] if len(reason) > limit else reason
    return last if len(last) <= limit else f"{last[:limit]}..."


def _why(check: Check) -> tuple[str, str]:
    """Why a check did not run, and the command in its reason."""
    reason, _, command = check.reason.replace("; on the Spark: ", "; try: ").partition("; try: ")
    return reason.rstrip("."), command


def _todo(report: Report, missing: Sequence[Check]) -> Iterator[str]:
    yield from dict.fromkeys(command for check in missing if (command := _why(check)[1]))
    levels = dict.fromkeys(c.level for c in missing if not _on_gb10(c.level) and not c.moot)
    if levels:
        yield f"spark-build verify {report.target} --level {','.join(levels)}"


def _repairs(report: Report) -> Iterator[str]:
    """The command that builds the plan, if the target lacks layers of it or has other files."""
    lacks = any(
        check.level == "static" and check.name.startswith("layer ") for check in report.of("fail")
    )
    if report.plan.base.ref != LAYOUT and (lacks or report.unapplied):
        yield from _building(report)


def _building(report: Report) -> Iterator[str]:
    """The command that builds the plan, and the one that runs the same levels on that."""
    plan = report.plan
    ran = dict.fromkeys(check.level for check in report.checks)
    if base_kind(plan.base.kind).is_installed or {*ran} <= {*DEFAULT_LEVELS}:
        yield _built(plan)
        return
    yield f"{_built(plan)} --output {_PATCHED}"
    yield f"spark-build verify {_PATCHED} --level {','.join(ran)}"


def _built(plan: PlanDocument) -> str:
    """The command that builds a plan."""
    pulls = {pull.layer: pull.request for pull in plan.pulls}
    layers = [*plan.profiles, *(n for n in _outside_profiles(plan) if n not in pulls)]
    words = ["--layers", ",".join(layers)] if layers else []
    words += [word for request in pulls.values() for word in ("--with-pr", request)]
    if base_kind(plan.base.kind).is_installed:
        return shlex.join(["spark-build", "apply", Ref(plan.base.ref).place, *words])
    return shlex.join(["spark-build", "image", *words, "--base", plan.base.ref])


def _outside_profiles(plan: PlanDocument) -> list[str]:
    """Layers that were selected by name, beside the profiles."""
    within: set[str] = set()
    with suppress(SparkBuildError):  # of another version of spark-build
        chosen = Catalog.discover().select(plan.profiles) if plan.profiles else None
        within = {layer.name for layer in chosen.layers} if chosen else set()
    return [layer.name for layer in plan.layers if layer.name not in within]


def _selected(report: Report) -> list[Check]:
    passed = [check for check in report.of("pass") if check.level == "dispatch"]
    return [check for check in passed if not check.refusal]


def _proven(report: Report) -> Iterator[str]:
    """What is proven without hardware: the kernels, and their evidence."""
    kernels = list(_kernels(report))
    yield from kernels
    levels = dict.fromkeys(c.level for c in report.checks if not _on_gb10(c.level))
    whole = [
        level
        for level in levels
        if all(c.status == "pass" or c.idle for c in report.checks if c.level == level)
    ]
    yield from (LEVELS[level].known for level in whole if level in LEVELS and LEVELS[level].known)
    if "static" in whole and not kernels:
        yield "the files are as planned"


def _kernels(report: Report) -> Iterator[str]:
    """``NVFP4 linear and MoE use b12x``, with the required flags."""
    kernels = {check.name: family_of(kernel_of(check.seen)) for check in _selected(report)}
    main = {kind: kernels[kind] for kind in _MAIN if kernels.get(kind)}
    for family in dict.fromkeys(main.values()):
        words = [_MAIN[kind] for kind, name in main.items() if name == family]
        uses = "use" if len(words) > 1 else "uses"
        yield f"NVFP4 {' and '.join(words)} {uses} {family}{_with_flags(report.plan)}"
    others = [kind for kind in kernels if kind not in _MAIN]
    if others and not main:
        yield f"vLLM selects the expected kernels for {', '.join(others)}{_with_flags(report.plan)}"


def _with_flags(plan: PlanDocument) -> str:
    moe = plan.moe_serve_flags
    if plan.serve_flags:
        return f" with the flags {' '.join([*plan.serve_flags, *moe])}"
    return f" (MoE with {' '.join(moe)})" if moe else ""


def _hardware(report: Report) -> str:
    """What has run on the hardware."""
    passed = [
        kind.known
        for level, kind in LEVELS.items()
        if kind.on_gb10
        and (checks := [check for check in report.checks if check.level == level])
        and all(check.status == "pass" for check in checks)
    ]
    return f"Run on a GB10: {' and '.join(passed)}." if passed else "Not run on a GB10."


# ---------------------------------------------------------------------------------------- Markdown

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
    if report.cached is not None:
        lines += ["", f"From the cache: these checks ran on the same content on {report.cached}."]
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


# ---------------------------------------------------------------------------------------- the page
#
# Status is told three ways, so that it is clear without colour too: by a word, by a sign, and by
# the form of the mark (filled, outlined or dashed) and of the edge beside it.

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
        totals = ", ".join(
            f"{figure(bad[name])} {words[bad[name] != 1]}"
            for name, words in BAD.items()
            if bad[name]
        )
        verdict = f"{failed} of them failed: {totals}." if failed else "Nothing wrong was found."
        return (
            f"{len(rows)} checks computed {figure(values)} values, each input in "
            f"{figure(schedules)} schedules. {verdict}"
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
    time: datetime.datetime | None = None,
) -> str:
    """A page for people; everything from the target is escaped.

    ``time`` is when that was: now, or ``SOURCE_DATE_EPOCH``.
    """
    return render_page(
        "report.html.j2",
        report=report,
        plan=report.plan,
        made=time or now(),
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
    links = {}
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)+(?:\.post[0-9]+|rc[0-9]+)?", vllm):
        page = "https://github.com/vllm-project/vllm/releases/tag"
        links[f"vLLM {vllm}"] = f"{page}/v{vllm}"
    pulls = {pull.request: pull.url for pull in plan.pulls}
    return {**links, **{n: url for n, url in pulls.items() if url.startswith("https://")}}


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
