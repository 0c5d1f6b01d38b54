"""Follows a growing log until the server is ready or has failed."""

from __future__ import annotations

import io
import os
import select
import stat
import time
from typing import TYPE_CHECKING, NamedTuple, cast

from builder.diagnose.catalog import load_catalog
from builder.diagnose.scan import Log
from builder.diagnose.sources import SAMPLE, joined, texts
from builder.diagnose.verdict import diagnoses, judged, worst

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from builder.diagnose.verdict import Diagnosis, Finding

#: Seconds without a new line after which the log is judged.
IDLE = 1.0
#: Pauses to wait after a failure without the server's end, because it may continue.
_PATIENCE = 30


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
    log, entries = Log(), load_catalog()
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
