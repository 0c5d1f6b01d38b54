"""``spark-build diagnose``."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from builder.console import console, print_json
from builder.diagnose import Diagnosis, diagnose
from builder.diagnose.report import lines_of
from builder.diagnose.sources import found, texts
from builder.errors import Exit, SparkBuildError, UsageError
from builder.hints import os_hint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_PIPE = "docker logs NAME 2>&1 | spark-build diagnose -"

_AGAIN = "when the server runs again, read its log again: " + _PIPE


def diagnose_command(log: str | None, vllm: str | None, json: bool) -> None:
    """Read a log and say what it shows; exit 5 when it shows a failure.

    Raises:
        UsageError: the log cannot be read, or ``--vllm`` is not a version.
        SparkBuildError: the log shows a failure, or a start that does not finish (exit 5).
    """
    try:
        with _opened(log) as stream:
            name = log if log not in (None, "-") else "standard input"
            results = [diagnose(text, vllm) for _, text in texts(stream, str(name))]
    except OSError as error:
        raise UsageError(
            f"cannot read {log}: {error.strerror or error}", hint=os_hint(error, _PIPE)
        ) from None
    for result in results:
        if json:
            print_json(result.as_json())
        else:
            _show(result)
        _end(result)


def _end(result: Diagnosis) -> None:
    wrong = list(dict.fromkeys(f.id for f in result.findings if f.severity == "error"))
    if wrong:
        search = next((f.search for f in result.findings if f.search), "")
        hint = f"search the issues of the engine for: {search}" if search else _AGAIN
        raise SparkBuildError(f"the log shows {', '.join(wrong)}", Exit.VERIFY_FAILED, hint)
    if result.failed:
        raise SparkBuildError("the server is not seen ready", Exit.VERIFY_FAILED, _AGAIN)


@contextlib.contextmanager
def _opened(log: str | None) -> Iterator[BinaryIO]:
    """The log: a file, or standard input for ``-`` and when something is piped in."""
    if log is None and sys.stdin.isatty():
        raise UsageError("no log", hint=_PIPE)
    if log in (None, "-"):
        yield sys.stdin.buffer
        return
    (source,) = found([str(log)])
    with source.open() as stream:
        yield stream


def _show(result: Diagnosis) -> None:
    """A diagnosis on stdout: it is what the command is for."""
    for line in lines_of(result):
        print(line)
    if len(result.releases) > 1:
        others = ", ".join(v for v in result.releases if v != result.vllm)
        console.warn(f"the log also names vLLM {others}; judged as {result.vllm}")
