"""``spark-build diagnose``."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console, print_json
from builder.common.hints import os_hint
from builder.diagnose import report
from builder.diagnose.live import IDLE, watched
from builder.diagnose.report import Diagnosed, Entries, EntryRow, lines_of, lines_of_several
from builder.diagnose.sources import Source, found, texts
from builder.diagnose.verdict import diagnoses, earliest_failure_first, verdict
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.diagnose.verdict import Diagnosis, Finding

_PIPE = "docker logs NAME 2>&1 | spark-build diagnose -"
_AGAIN = "when the server runs again, check its log: " + _PIPE
#: First words that are not logs; write ./list for a file of such a name.
WORDS = ("list", "show", "check", "table")


def diagnose_command(
    logs: Sequence[str], vllm: str | None, json: bool, *, watch: bool = False, idle: float = IDLE
) -> None:
    """Read logs and explain them; exit 5 if one shows a failure.

    Raises:
        UsageError: a log cannot be read, no file is a log, or ``--vllm`` is not a version.
        SparkBuildError: a log shows a failure, or a start that does not finish (exit 5).
    """
    if logs and logs[0] in WORDS:
        _catalogue(logs[0], logs[1:], json)
        return
    if not logs and sys.stdin.isatty():
        raise UsageError("no log", hint=_PIPE)
    if (fd := _growing(logs, watch=watch)) is not None:
        results = watched(fd, vllm, _say, idle=idle)
    else:
        results = _read(logs or ["-"], vllm)
    if not any(result.is_log for result in results):
        _refuse(logs, results, json=json)
    if len(results) > 1:
        results = earliest_failure_first(results)
    if json:
        print_json(Diagnosed.of(results))
    else:
        _show(results)
    _end(results)


def _refuse(logs: Sequence[str], results: Sequence[Diagnosis], *, json: bool) -> None:
    """Refuse files without any log.

    Raises:
        UsageError: names each file with the reason.
    """
    if json:
        print_json(Diagnosed.of(results))
    only = logs[0] if logs and logs[0] != "-" else "standard input"
    said = [f"{result.file or only}: {result.verdict.sentence}" for result in results]
    raise UsageError("\n  ".join(said) or "it contains no log", hint=_PIPE)


def _growing(logs: Sequence[str], *, watch: bool) -> int | None:
    """The log to follow: a pipe, or one file with ``--watch``."""
    if len(logs) > 1 and watch:
        raise UsageError("--watch reads one log", hint="spark-build diagnose server.log --watch")
    if logs and logs[0] != "-":
        return os.open(logs[0], os.O_RDONLY) if watch and Path(logs[0]).is_file() else None
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError):  # a stream of a test
        return None
    return fd if stat.S_ISFIFO(os.fstat(fd).st_mode) else None


def _say(finding: Finding) -> None:
    console.say(f"  line {finding.line}: {finding.id}: {finding.quote[:200]}")


def _read(logs: Sequence[str], vllm: str | None) -> list[Diagnosis]:
    standard = Source("standard input", lambda: contextlib.nullcontext(sys.stdin.buffer))
    results = []
    for source in [standard] if list(logs) == ["-"] else found(logs):
        try:
            with source.open() as stream:
                results += [
                    (name, result)
                    for name, text in texts(stream, source.name)
                    for result in diagnoses(text, vllm)
                ]
        except OSError as error:
            raise UsageError(
                f"cannot read {source.name}: {error.strerror or error}",
                hint=os_hint(error, _PIPE),
            ) from None
    if len(results) == 1:
        return [results[0][1]]
    return [result.in_log(name) for name, result in results]


def _end(results: Sequence[Diagnosis]) -> None:
    findings = [f for result in results for f in result.findings if f.severity == "error"]
    if wrong := list(dict.fromkeys(f.id for f in findings)):
        search = next((f.search for f in findings if f.search), "")
        known = next((f.id for f in findings if not f.search), "")
        hint = (
            f"spark-build diagnose show {known}"
            if known
            else f"search the issues of the engine for: {search}"
        )
        what = "the log shows" if len(results) == 1 else "the logs show"
        raise SparkBuildError(f"{what} {', '.join(wrong)}", Exit.VERIFY_FAILED, hint)
    state = results[0].verdict.state if len(results) == 1 else verdict(results).state
    if state in ("failed", "stopped", "unclear"):
        was_ready = len(results) == 1 and results[0].ready
        what = "the server is not healthy" if was_ready else "the server did not become ready"
        raise SparkBuildError(what, Exit.VERIFY_FAILED, _AGAIN)


def _show(results: Sequence[Diagnosis]) -> None:
    """Print a diagnosis to stdout."""
    for line in lines_of(results[0]) if len(results) == 1 else lines_of_several(results):
        print(line)
    for result in results:
        if len(result.releases) > 1:
            others = ", ".join(v for v in result.releases if v != result.vllm)
            console.warn(f"the log also mentions vLLM {others}; judged as {result.vllm}")


def _catalogue(word: str, names: Sequence[str], json: bool) -> None:
    """``diagnose list``, ``show ID``, ``check [FILE...]`` and ``table``."""
    if word == "check":
        _check(names)
        return
    if word == "show" and not names:
        raise UsageError("no entry named", hint="spark-build diagnose list")
    entries = (
        [report.find_entry(name) for name in names]
        if word == "show"
        else report.entries_to_check(())
    )
    if json:
        print_json(Entries(entries=tuple(map(EntryRow.of, entries))))
    elif word == "table":
        print(report.page(entries), end="")
    elif word == "show":
        for entry in entries:
            print("\n".join(report.entry_lines(entry)))
    else:
        for entry in entries:
            print(f"{entry.id:<36} {entry.severity:<8} {report.releases(entry)}")


def _check(names: Sequence[str]) -> None:
    """Run the examples of entries; exit 5 if one fails."""
    entries = report.entries_to_check(names)
    wrong = report.failed_examples(entries)
    for entry, example, why in wrong:
        print(f"{entry}: {f'example {example}: ' if example else ''}{why}")
    if wrong:
        raise SparkBuildError(
            f"{len(wrong)} examples of {len(entries)} entries fail",
            Exit.VERIFY_FAILED,
            "fix the entry, then run: spark-build diagnose check FILE.toml",
        )
    count = sum(len(entry.examples) for entry in entries)
    print(f"{len(entries)} entries, {count} examples: all pass")
