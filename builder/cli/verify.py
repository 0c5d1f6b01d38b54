"""``spark-build verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import print_json
from builder.pipeline.show import CheckLines, show_report, show_verdict
from builder.pipeline.verify import verify_target

if TYPE_CHECKING:
    from builder.pipeline.options import VerifyOptions

_WORDS = {"proven": "verified", "not-proven": "NOT PROVEN", "failed": "failed"}


def verify_command(options: VerifyOptions, *, json: bool) -> None:
    """Verify a target; exit 5 if a check failed or a named level did not run."""
    done = verify_target(options, None if json else CheckLines())
    if json:
        print_json(done.report.document(done.required))
    else:
        show_report(done.report)
    verdict = done.report.verdict(done.required)
    if done.passed:
        if not json:
            print(f"{_WORDS[verdict.status]} {options.target}", flush=True)
        show_verdict(verdict)
    done.refuse_failed(options.target)
