"""Verifies a given target, or a new image."""

from __future__ import annotations

import dataclasses
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.hints import ELSEWHERE, os_hint
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import Exit, SparkBuildError, UsageError
from builder.layers.lock import (
    NAME,
    LockedFacts,
    lock_path,
    plan_differences,
    read_lock,
    stale,
    wheels_of,
)
from builder.layers.pinned import IndexSources
from builder.pipeline.inputs import inputs_of
from builder.pipeline.show import CheckLines, show_report
from builder.proof.cached import EvidenceCache, report_of
from builder.proof.checks import DEFAULT_LEVELS, PROOF_LEVELS, parse_levels
from builder.proof.opening import Opening, open_target
from builder.proof.run import verify
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from builder.common.plan import BuildPlan, PlanDocument
    from builder.layers.catalog import Selection
    from builder.pipeline.imageoptions import ImageOptions
    from builder.pipeline.inputs import Inputs
    from builder.pipeline.options import PlanOptions
    from builder.pipeline.verifyoptions import VerifyOptions
    from builder.proof.report import Report
    from builder.proof.target import ModelToBuild, VerifyTarget

    #: kinds of layers and a release of vLLM -> models to build
    Models = Callable[[Collection[str], str], Sequence[ModelToBuild]]

#: Failed checks that an error names; all were printed before it.
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The evidence for a target, and the required levels."""

    report: Report
    required: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed and every requested level ran."""
        return self.report.passed(self.required)

    def refuse_failed(self, target: str) -> None:
        """Raise if it did not pass.

        Raises:
            SparkBuildError: names the failed checks, or else those that did not run (exit 5).
        """
        if self.passed:
            return
        failed = self.report.of("fail")
        if not failed:
            verdict = self.report.verdict(self.required)
            hint = verdict.todo[0] if verdict.todo else ""
            raise SparkBuildError(f"{target}: {verdict.sentence}", Exit.VERIFY_FAILED, hint)
        lines = [f"{c.level} {c.name}: {c.reason or c.seen}" for c in failed[:_SHOWN]]
        if len(failed) > _SHOWN:
            lines.append(f"and {len(failed) - _SHOWN} more")
        number = "a check" if len(failed) == 1 else f"{len(failed)} checks"
        as_is = f", {self.report.as_it_is}" if self.report.unapplied else ""
        message = f"{target}{as_is}: {number} failed:\n  " + "\n  ".join(lines)
        (hint, *_) = (*self.report.verdict(self.required).todo, "")
        raise SparkBuildError(message, Exit.VERIFY_FAILED, hint)


def verify_target(
    options: VerifyOptions, told: CheckLines | None, models: Models | None = None
) -> Verified:
    """Open a target, run the levels, and write the requested pages.

    ``models`` chooses what level ``model`` builds.

    Raises:
        UsageError: the options contradict each other, or the expected state is unknown.
    """
    from builder.proof.report import render_html, render_summary

    default = PROOF_LEVELS if options.prove_necessary else DEFAULT_LEVELS
    chosen = parse_levels(options.level, default=default)
    # requested explicitly, so it must run
    required = parse_levels([*options.level, *options.require], default=())
    chosen = tuple(dict.fromkeys([*chosen, *required]))
    options.gpu.check(chosen)  # wrong input is said before anything runs
    for file in (options.html, options.summary):
        if file is not None:
            _refuse_unwritable(file)
    report = _reported(options, chosen, told, models)
    if options.html is not None:
        write_atomically(options.html, render_html(report, required).encode())
        console.say(f"  evidence: {options.html}")
    if options.summary is not None:
        with options.summary.open("a", encoding="utf-8") as page:
            page.write(render_summary(report, required))
    return Verified(report=report, required=required)


def _with_models(
    target: VerifyTarget, levels: Sequence[str], models: Models | None
) -> VerifyTarget:
    """The target with the models that level ``model`` builds, if it is requested."""
    if models is None or "model" not in levels:
        return target
    plan = target.plan
    promised = {one.kind for one in plan.expect if one.selected != "*"}
    chosen = models(promised, plan.base.packages["vllm"])
    return dataclasses.replace(target, models=chosen)


def _refuse_unwritable(path: Path) -> None:
    """Refuse an output file that is not writable; writes nothing.

    Raises:
        UsageError: it is a folder, is below a file, or is not writable.
    """
    number = _problem(path.absolute())
    if number:
        error = OSError(number, os.strerror(number), str(path))
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=os_hint(error, ELSEWHERE))


def _problem(path: Path) -> int:
    try:
        if path.is_dir():
            return errno.EISDIR
        above = path.parent
        while not above.exists():
            above = above.parent
    except OSError as error:  # a name that is too long, a folder that must not be looked into
        return error.errno or errno.EIO
    if not above.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(above, os.W_OK | os.X_OK) else errno.EACCES


class TargetInputs:
    """What a target is compared with: an optional selection, and the lock."""

    def __init__(self, options: PlanOptions) -> None:
        self.path = lock_path(Path.cwd())
        self._lock = read_lock(self.path) if options.locked else None
        if options.locked and self._lock is None:
            raise SparkBuildError(
                f"--locked, and there is no {NAME} ({self.path})",
                Exit.STALE,
                hint="spark-build lock --layers L --base BASE",
            )
        self.facts = (
            LockedFacts(self._lock, strict=True)
            if options.locked
            else LockedFacts.beside(self.path)
        )
        self.selection: Selection | None = None
        if options.names or options.with_pr:
            inputs = inputs_of(options)
            self.selection, self.index = inputs.selection, inputs.index
        else:
            self.index = PackageIndex(refresh=options.refresh)
        for entry in self._lock.entries.values() if self._lock else ():
            self.index.hold(wheels_of(entry))

    def check(self, plan: PlanDocument) -> None:
        """Compare a target's plan with the lock, with ``--locked``.

        Raises:
            SparkBuildError: no entry of the lock matches the target (exit 9).
        """
        if self._lock is None:
            return
        changes = [plan_differences(entry, plan) for entry in self._lock.entries.values()]
        if not changes:
            raise SparkBuildError(f"{self.path} locks nothing", Exit.STALE, hint="spark-build lock")
        least = min(changes, key=len)
        if least:
            raise stale(self.path, least)


def _reported(
    options: VerifyOptions,
    levels: tuple[str, ...],
    told: CheckLines | None,
    models: Models | None,
) -> Report:
    """The evidence: from the cache, or from a run."""
    ref, inputs = Ref(options.target), TargetInputs(options.plan)
    opening = Opening(
        index=inputs.index,
        sources=IndexSources(inputs.index),
        selection=inputs.selection,
        platform=options.plan.platform,
        gpu=options.gpu,
        facts_of=inputs.facts.of,
        trust=TrustedSources(patches=options.plan.patches, everything=options.trust_image),
    )
    evidence = EvidenceCache(
        levels=levels,
        trust=opening.trust,
        index=inputs.index,
        lock=inputs.path,
        platform=options.plan.platform,
        refresh=options.plan.refresh,
    )
    alone = options.prove_necessary
    key = "" if alone or inputs.selection is not None else evidence.key_of_layout(ref)
    if cached := evidence.get(key):
        report = report_of(cached, ref.text, told)
        inputs.check(report.plan)
        return report
    target = open_target(ref, opening)
    try:
        inputs.check(target.plan)
        if alone:
            return _proven(_with_models(target, levels, models), levels, told)
        key = key or evidence.key_of(target, ref)
        if cached := evidence.get(key):
            return report_of(cached, ref.text, told, target)
        report = _run(_with_models(target, levels, models), levels, told)
        evidence.put(key, report, ref)
        return report
    finally:
        target.close()


def _run(target: VerifyTarget, levels: Sequence[str], told: CheckLines | None) -> Report:
    with console.step(f"verify {target.name}"):
        return verify(target, levels, told)


def _proven(target: VerifyTarget, levels: Sequence[str], told: CheckLines | None) -> Report:
    """The report on all layers together, then the necessity of each."""
    from builder.proof.necessity import prove, whole

    with whole(target) as (full, apart):
        report = _run(full, levels, told)
        report.necessity = prove(full, apart, report)
    return report


def trust_of(plan: BuildPlan, inputs: Inputs, options: ImageOptions) -> TrustedSources:
    """The trusted sources of an image's files, with those that its plan writes."""
    trust = TrustedSources(
        index=inputs.index, patches=options.plan.patches, everything=options.trust_image
    )
    return trust.with_plan(plan.document)


def verify_built(ref: Ref, inputs: Inputs, plan: BuildPlan, options: ImageOptions) -> Report:
    """Verify a new image, read back from its destination, or known from the cache."""
    opening = Opening(
        index=inputs.index,
        sources=inputs.sources,
        facts_of=inputs.facts.of,
        trust=trust_of(plan, inputs, options),
    )
    evidence = EvidenceCache(
        levels=DEFAULT_LEVELS,
        trust=opening.trust,
        index=inputs.index,
        lock=inputs.path,
        refresh=options.plan.refresh,
    )
    key = evidence.key_of_layout(ref)
    if cached := evidence.get(key):
        report = report_of(cached, ref.text, CheckLines())
    else:
        report = _verified(ref, opening, evidence, key)
    show_report(report)
    return report


def _verified(ref: Ref, opening: Opening, evidence: EvidenceCache, key: str) -> Report:
    target = open_target(ref, opening)
    try:
        key = key or evidence.key_of(target, ref)
        if cached := evidence.get(key):
            return report_of(cached, ref.text, CheckLines(), target)
        report = verify(target, DEFAULT_LEVELS, CheckLines())
        evidence.put(key, report, ref)
        return report
    finally:
        target.close()
