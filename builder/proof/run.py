"""Runs the levels of verification."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from builder.common.console import console
from builder.proof.binaries import check_binaries
from builder.proof.checks import Check, few
from builder.proof.codegen import check_codegen
from builder.proof.dispatch import check_dispatch
from builder.proof.gpulevels import check_on_gpu
from builder.proof.imports import check_imports
from builder.proof.model import check_model
from builder.proof.numbers import check_numbers
from builder.proof.report import Report
from builder.proof.static import check_static, shadows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from builder.proof.checks import Level, Listener
    from builder.proof.target import VerifyTarget
    from builder.proof.unrecorded import Shadow

#: Levels whose probes import copies of the target's Python files, outside of the target.
_OF_COPIES = ("dispatch", "model", "codegen", "numbers")
#: The function of each level, by its name in ``checks.LEVELS``.
RUNNERS: dict[str, Callable[[VerifyTarget], Iterable[Check]]] = {
    "static": check_static,
    "imports": check_imports,
    "dispatch": check_dispatch,
    "model": check_model,
    "codegen": check_codegen,
    "numbers": check_numbers,
    "binaries": check_binaries,
    "device": partial(check_on_gpu, level="device"),
    "serve": partial(check_on_gpu, level="serve"),
}


def verify(
    target: VerifyTarget,
    levels: Sequence[str],
    heard: Listener | None = None,
) -> Report:
    """Run the levels and collect the evidence; ``heard`` is called for each check."""
    report = Report(
        target=target.name,
        plan=target.plan,
        digests=target.digests,
        unapplied=target.unapplied,
    )
    for level in levels:
        with console.progress(
            f"checking {level}", None, "checks", leaves_line=False, whole=True
        ) as bar:
            for check in _checks(target, level):
                report.checks.append(check)
                bar.advance()
                if heard is not None:
                    heard(check)
        if heard is not None:
            heard.end()
    return report


def _checks(target: VerifyTarget, level: str) -> Iterable[Check]:
    """The checks of a level; only if what it imports here is what Python imports in the target."""
    in_itself = target.subject.in_engine and level != "model"
    if level not in _OF_COPIES or in_itself:
        return RUNNERS[level](target)
    shadows = shadows_of(target)
    return [_not_alike(level, shadows)] if shadows else RUNNERS[level](target)


def _not_alike(level: str, shadows: Sequence[Shadow]) -> Check:
    return Check(
        level=cast("Level", level),
        name="imported modules",
        status="not-run",
        expected="the files that are imported here are those that Python imports in the target",
        seen=f"Python runs {few(shadows)}",
        where=shadows[0].path,
        reason=f"in the target, Python runs {few(shadows)}; only the latter could be imported here",
    )
