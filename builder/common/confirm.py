"""The question that ``--yes`` skips."""

from __future__ import annotations

import sys

from builder.common.console import console
from builder.common.hints import again
from builder.errors import Exit, SparkBuildError, UsageError


def confirm(action: str, note: str, otherwise: str) -> None:
    """Continue only if the user confirms on the terminal.

    Raises:
        UsageError: there is no terminal.
        SparkBuildError: the user declined; ``otherwise`` describes the result.
    """
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"this would {action}, and there is no terminal to confirm it",
            hint=again("--yes"),
        )
    console.warn(f"this will {action}{note}")
    print("continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise SparkBuildError(otherwise, Exit.NOTHING_TO_DO, hint=again("--yes"))
