"""``spark-build lint``."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

from builder.common.console import console, counted, print_json
from builder.common.hints import again
from builder.errors import Exit, SparkBuildError, UsageError
from builder.serving.lint import RULES, Linter, RuleList, lint, read_file, sarif
from builder.serving.models import Models

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.serving.lint import Finding, LintReport


def rules_command(files: Sequence[Path], *, as_sarif: bool, json: bool) -> None:
    """Print the rules.

    Raises:
        UsageError: files to lint or another output format are given too.
    """
    if files:
        raise UsageError("--rules prints the rules and lints no file", hint="leave --rules out")
    if as_sarif:
        raise UsageError("--rules is not printed as SARIF", hint="leave --sarif out")
    if json:
        print_json(RuleList(rules=tuple(RULES.values())))
        return
    for rule in RULES.values():
        print(f"{rule.id:<18}{rule.severity:<9}{rule.summary}\n  {'':<25}({rule.source})")


def lint_command(
    files: list[Path],
    linter: Linter,
    models: list[Path] | None,
    *,
    strict: bool,
    as_sarif: bool,
    json: bool,
) -> None:
    """Lint files and print what was found.

    Raises:
        UsageError: a file cannot be read, or has no serve command.
        SparkBuildError: a command has a problem (exit 5).
    """
    if as_sarif and json:
        raise UsageError("--json and --sarif print different documents", hint="leave --json out")
    if not files:
        raise UsageError("no file to lint (- is standard input)", hint=again("FILE"))
    texts = [(str(path), read_file(path)) for path in files]
    report = lint(texts, linter, Models.discover(models or ()))
    for name in report.skipped:
        console.say(f"note: {name} has no serve command")
    for name in report.cut:
        console.warn(f"{name} has more findings than are listed")
    if as_sarif:
        print(json_module.dumps(sarif(report), indent=2))
    elif json:
        print_json(report)
    else:
        _print(report)
    serious = [one for one in report.findings if strict or one.severity == "error"]
    if serious or report.cut:
        raise SparkBuildError(
            f"{counted(len(serious), 'serve setting')} to change", Exit.VERIFY_FAILED, _fix(serious)
        )


def _fix(findings: Sequence[Finding]) -> str:
    """The first finding's fix, or where all that is valid is shown."""
    fixed = next((one for one in findings if one.help), None)
    if fixed is None:
        return "spark-build lint --rules"
    return f"{fixed.file}:{fixed.line}: {fixed.help}"


def _print(report: LintReport) -> None:
    for one in report.findings:
        print(f"{one.file}:{one.line}: {one.severity}: {one.message} [{one.rule}]")
        if one.help:
            print(f"    {one.help}")
    for command in report.asked:
        left = "".join(f"; not asked: {words}" for words in command.left_out)
        print(f"{command.file}:{command.line}: vLLM {command.vllm}: {command.answer}{left}")
    ignored = f", {report.ignored} ignored" if report.ignored else ""
    release = f" for vLLM {report.vllm}" if report.vllm else ""
    print(
        f"{counted(len(report.findings), 'finding')} in "
        f"{counted(report.commands, 'serve command')}{release}{ignored}"
    )
