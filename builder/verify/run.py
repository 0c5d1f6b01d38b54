"""Runs the levels of verification."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from builder.util.console import console
from builder.verify.binaries import check_binaries
from builder.verify.codegen import check_codegen
from builder.verify.dispatch import check_dispatch
from builder.verify.imports import check_imports
from builder.verify.numbers import check_numbers
from builder.verify.ongpu import check_on_gpu
from builder.verify.report import Report
from builder.verify.static import check_static

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from builder.verify.checks import Check, Listener
    from builder.verify.target import VerifyTarget

#: The function of each level, by its name in ``levels.py``.
RUNNERS: dict[str, Callable[[VerifyTarget], Iterable[Check]]] = {
    "static": check_static,
    "imports": check_imports,
    "dispatch": check_dispatch,
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
    )
    for level in levels:
        with console.progress(f"checking {level}", None, "checks", said=False, whole=True) as bar:
            for check in RUNNERS[level](target):
                report.checks.append(check)
                bar.advance()
                if heard is not None:
                    heard(check)
        if heard is not None:
            heard.end()
    return report
