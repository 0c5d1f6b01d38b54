"""Reads the logs that a command line names, whole or while they grow, and ends with a verdict."""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from builder.common.console import console
from builder.common.hints import os_hint
from builder.diagnose import report
from builder.diagnose.entries import load_entries
from builder.diagnose.logs import SAMPLE, Source, joined, sources_at, texts
from builder.diagnose.matching import Log
from builder.diagnose.verdict import diagnoses, earliest_failure_first, judged, verdict, worst
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from builder.diagnose.verdict import Diagnosis, Finding


#: Seconds without a new line after which the log is judged.
IDLE = 1.0
#: Pauses to wait after a failure without the server's end, because it may continue.
_PATIENCE = 30
_PIPE = "docker logs NAME 2>&1 | spark-build diagnose -"
_AGAIN = "when the server runs again, check its log: " + _PIPE


def read_logs(
    logs: Sequence[str], vllm: str | None, *, watch: bool = False, idle: float = IDLE
) -> list[Diagnosis]:
    """What each log shows; of several, the earliest failure first.

    Raises:
        UsageError: a log cannot be read, or ``--vllm`` is not a version.
    """
    if not logs and sys.stdin.isatty():
        raise UsageError("no log", hint=_PIPE)
    if (fd := _growing(logs, watch=watch)) is not None:
        results = watched(fd, vllm, _say, idle=idle)
    else:
        results = _read(logs or ["-"], vllm)
    if len(results) < 2 or not any(result.is_log for result in results):
        return results
    return earliest_failure_first(results)


def refuse_no_log(logs: Sequence[str], results: Sequence[Diagnosis]) -> None:
    """Refuse files without any log.

    Raises:
        UsageError: names each file with the reason.
    """
    if any(result.is_log for result in results):
        return
    only = logs[0] if logs and logs[0] != "-" else "standard input"
    reasons = [f"{result.file or only}: {result.verdict.sentence}" for result in results]
    raise UsageError("\n  ".join(reasons) or "it contains no log", hint=_PIPE)


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
    for source in [standard] if list(logs) == ["-"] else sources_at(logs):
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


def refuse_failed(results: Sequence[Diagnosis]) -> None:
    """Refuse logs that show a failure.

    Raises:
        SparkBuildError: a log shows a failure, or a start that does not finish (exit 5).
    """
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


def check_entries(names: Sequence[str]) -> str:
    """Run the examples of catalogue entries, and say how many passed.

    Raises:
        SparkBuildError: one fails (exit 5); each is printed.
    """
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
    return f"{len(entries)} entries, {count} examples: all pass"


class Live(io.RawIOBase):
    """A pipe or a growing file; ``waiting`` is called at every pause, and tells if it ended."""

    def __init__(self, fd: int, waiting: Callable[[], bool], *, idle: float = IDLE) -> None:
        self.fd, self.waiting, self.idle = fd, waiting, idle
        self.grows = stat.S_ISREG(os.fstat(fd).st_mode)
        self.ended = False

    def readable(self) -> bool:
        return True

    def first(self) -> bytes:
        """The data available immediately, up to a sample's size."""
        data = b""
        while len(data) < SAMPLE and (piece := self._now(SAMPLE - len(data))):
            data += piece
        return data

    def _now(self, size: int) -> bytes:
        """The data that arrives within the pause."""
        if not self.grows and not select.select([self.fd], [], [], self.idle)[0]:
            return b""
        data = os.read(self.fd, size)
        if not data and self.grows:
            time.sleep(self.idle)
            data = os.read(self.fd, size)
        elif not data:
            self.ended = True
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self.ended:
            if data := self._now(len(buffer)):
                buffer[: len(data)] = data
                return len(data)
            self.ended = self.ended or self.waiting()
        return 0


class LiveResult(NamedTuple):
    """Findings printed while the log grew, and the number of pauses."""

    findings: set[tuple[str, int]]
    pauses: list[int]


def watched(
    fd: int,
    vllm: str | None,
    say: Callable[[Finding], None],
    *,
    idle: float = IDLE,
) -> list[Diagnosis]:
    """Read a log until it ends, or its server is ready or dead; ``say`` gets findings at once.

    An archive in a pipe can hold several logs.
    """
    log, entries = Log(), load_entries()
    told = LiveResult(set(), [])

    def waiting() -> bool:
        log.flush()
        partial = judged(log, entries, vllm)
        for finding in [found for one in partial for found in one.findings]:
            if (finding.id, finding.line) not in told.findings and finding.severity != "info":
                told.findings.add((finding.id, finding.line))
                say(finding)
        states = {one.verdict.state for one in partial}
        if states == {"ready"}:
            return True
        if worst(partial).verdict.state != "failed":
            return False
        told.pauses.append(1)
        return len(told.pauses) >= _PATIENCE or log.broken()

    live = Live(fd, waiting, idle=idle)
    start = live.first()
    whole = joined(start, cast("BinaryIO", live))
    results: list[Diagnosis] = []
    for number, (name, stream) in enumerate(texts(whole, "standard input")):
        if number:
            found = diagnoses(stream, vllm, entries)
        else:
            found = diagnoses(stream, vllm, entries, log=log, live=not live.ended)
        results += [result.in_log(name) for result in found]
    return results if len(results) > 1 else [results[0].in_file("")]
