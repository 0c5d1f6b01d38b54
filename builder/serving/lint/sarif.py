"""Findings as SARIF 2.1.0, which GitHub and editors show beside the lines.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder import __version__
from builder.serving.lint.rules import RULES

if TYPE_CHECKING:
    from builder.serving.lint.rules import LintReport


def sarif(report: LintReport) -> dict[str, Any]:
    """The report as one run."""
    used = sorted({finding.rule for finding in report.findings})
    rules = [
        {
            "id": name,
            "shortDescription": {"text": RULES[name].summary},
            "help": {"text": f"Source: {RULES[name].source}"},
            "defaultConfiguration": {"level": RULES[name].severity},
        }
        for name in used
    ]
    results = [
        {
            "ruleId": one.rule,
            "ruleIndex": used.index(one.rule),
            "level": one.severity,
            "message": {"text": f"{one.message}. {one.help}" if one.help else one.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": one.file},
                        "region": {"startLine": max(1, one.line)},
                    }
                }
            ],
        }
        for one in report.findings
    ]
    tool = {"driver": {"name": "spark-build lint", "version": __version__, "rules": rules}}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": tool, "results": results}],
    }
