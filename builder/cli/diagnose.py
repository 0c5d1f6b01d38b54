"""``spark-build diagnose``."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from builder.cli.show import print_json
from builder.console import console, counted
from builder.diagnose import diagnose
from builder.diagnose.dispatch import LABELS
from builder.errors import Exit, SparkBuildError, UsageError
from builder.hints import os_hint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.diagnose import Diagnosis, Finding

_PIPE = "docker logs NAME 2>&1 | spark-build diagnose -"


def diagnose_command(log: str | None, vllm: str | None, json: bool) -> None:
    """Read a log and say what it shows; exit 5 when it shows an error.

    Raises:
        UsageError: the log cannot be read, or ``--vllm`` is not a version.
        SparkBuildError: the log shows an error (exit 5).
    """
    try:
        with _opened(log) as stream:
            result = diagnose(stream, vllm)
    except OSError as error:
        raise UsageError(
            f"cannot read {log}: {error.strerror or error}", hint=os_hint(error, _PIPE)
        ) from None
    if json:
        print_json(result.as_json())
    else:
        _show(result)
    wrong = [finding.id for finding in result.findings if finding.severity == "error"]
    if wrong:
        raise SparkBuildError(f"the log shows {', '.join(wrong)}", Exit.VERIFY_FAILED)


@contextlib.contextmanager
def _opened(log: str | None) -> Iterator[BinaryIO]:
    """The log: a file, or standard input for ``-`` and when something is piped in."""
    if log is None and sys.stdin.isatty():
        raise UsageError("no log", hint=_PIPE)
    if log in (None, "-"):
        yield sys.stdin.buffer
        return
    with Path(str(log)).open("rb") as stream:
        yield stream


def _show(result: Diagnosis) -> None:
    """A diagnosis on stdout: it is what the command is for."""
    if not result.lines:
        print("nothing found: the log is empty")
        return
    print(f"{_engine(result)}, {counted(result.lines, 'line')}")
    if len(result.releases) > 1:
        others = ", ".join(v for v in result.releases if v != result.vllm)
        console.warn(f"the log also names vLLM {others}; judged as {result.vllm}")
    print()
    if result.dispatch:
        print("  selected")
        width = max(len(LABELS[s.kind]) for s in result.dispatch)
        kernels = max(len(s.kernel) for s in result.dispatch)
        for chosen in result.dispatch:
            label, kernel = LABELS[chosen.kind], chosen.kernel
            print(f"    {label:<{width}}  {kernel:<{kernels}}  line {chosen.line}")
    else:
        print("  no line says which kernels were selected (the start of the log is needed)")
    print()
    for finding in result.findings:
        _show_finding(finding)
    if not result.findings:
        print("  nothing wrong was found")


def _engine(result: Diagnosis) -> str:
    if result.vllm:
        return f"vLLM {result.vllm}"
    if result.tensorrt_llm:
        return f"TensorRT-LLM {result.tensorrt_llm}"
    return "vLLM of an unknown release (say which: --vllm VERSION)"


def _show_finding(finding: Finding) -> None:
    print(f"  {finding.severity:<8}line {finding.line}: {finding.id}")
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    for lead, text in (("", finding.message), ("fix: ", finding.fix)):
        if text:
            indent = " " * 10
            after = indent + " " * len(lead)
            print(textwrap.fill(lead + text, width, initial_indent=indent, subsequent_indent=after))
    print()
