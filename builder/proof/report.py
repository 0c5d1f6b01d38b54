"""The report of a verification, and its verdict: what is proven, what is not, and the next step.

Text, JSON, the page and the Markdown summary all print this verdict.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.common.document import Count, Digest, Document, Part, Text
from builder.common.model.base import LAYOUT, base_kind
from builder.common.model.reference import Ref
from builder.errors import SparkBuildError
from builder.layers.catalog import Catalog
from builder.proof.checks import Check, Necessity
from builder.proof.levels import LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.common.documents.plan import PlanDocument, PlannedLayer
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
        )


def _verdict_of(report: Report, require: Sequence[str]) -> Verdict:
    ran = {check.level for check in report.checks}
    missing = [c for c in report.of("not-run") if not c.moot or (c.level in require and not c.idle)]
    absent = [level for level in require if level not in ran]
    parts = []
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
    found = _SELECTED.search(seen)
    return found[1].rpartition(".")[2] if found else ""


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
    plan = report.plan
    if plan.base.ref == LAYOUT or not any(
        check.level == "static" and check.name.startswith("layer ") for check in report.of("fail")
    ):
        return
    pulls = {pull.layer: pull.request for pull in plan.pulls}
    layers = [*plan.profiles, *(n for n in _outside_profiles(plan) if n not in pulls)]
    words = ["--layers", ",".join(layers)] if layers else []
    words += [word for request in pulls.values() for word in ("--with-pr", request)]
    if base_kind(plan.base.kind).is_installed:
        yield shlex.join(["spark-build", "apply", Ref(plan.base.ref).place, *words])
    else:
        yield shlex.join(["spark-build", "image", *words, "--base", plan.base.ref])


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
    found = {check.name: family_of(kernel_of(check.seen)) for check in _selected(report)}
    main = {kind: found[kind] for kind in _MAIN if found.get(kind)}
    for family in dict.fromkeys(main.values()):
        words = [_MAIN[kind] for kind, name in main.items() if name == family]
        uses = "use" if len(words) > 1 else "uses"
        yield f"NVFP4 {' and '.join(words)} {uses} {family}{_with_flags(report.plan)}"
    others = [kind for kind in found if kind not in _MAIN]
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
