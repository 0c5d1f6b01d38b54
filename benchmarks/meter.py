"""What one way of doing something costs: seconds, processor, memory, and bytes over a proxy."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tests.countproxy import CountProxy

#: Python keeps the bytecode that it has compiled, as it does for an installed package.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
#: Seconds between two looks at a command's memory; the kernel keeps each process's own peak.
_LOOK = 0.005


@dataclass(frozen=True)
class Run:
    """One run: wall and processor seconds, bytes each way with all headers, bytes of memory."""

    seconds: float
    cpu: float
    sent: int
    received: int
    memory: int


class CommandFailed(RuntimeError):
    """A command of a way ended with an error; its own last words are the message."""


class Meter:
    """Runs commands, and knows what they and the daemons that serve them have taken."""

    def __init__(self, proxy: CountProxy) -> None:
        self.proxy = proxy
        self._peak = 0

    def call(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run one command of a way, and give its stdout.

        Raises:
            CommandFailed: it did not end with 0.
        """
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [str(word) for word in words],
                env={**ENVIRONMENT, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=said,
            )
            try:
                while process.poll() is None:
                    self._peak = max(self._peak, peaks(_tree(process.pid)))
                    time.sleep(_LOOK)
            except BaseException:
                process.kill()
                process.wait()
                raise
            out.seek(0)
            if process.returncode == 0:
                return out.read().decode(errors="replace")
            said.seek(0)
            tail = (said.read() or out.read()).decode(errors="replace").strip()[-600:]
            raise CommandFailed(f"{Path(words[0]).name} {words[1]}: {tail}")

    def measure(self, action: Callable[[], object], daemons: Sequence[int] = ()) -> Run:
        """Run a way once; the memory of daemons counts as a whole, also what they need idle."""
        self._peak = 0
        reset_peaks(daemons)
        self.proxy.take()
        began, used = time.perf_counter(), _processor_seconds(daemons)
        action()
        seconds, cpu = time.perf_counter() - began, _processor_seconds(daemons) - used
        sent, received = self.proxy.take()
        return Run(seconds, cpu, sent, received, self._peak + peaks(daemons))


def _processor_seconds(daemons: Iterable[int]) -> float:
    """What commands that ended, and these processes, have used so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime
    for pid in daemons:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _tree(pid: int) -> list[int]:
    """A process and all that it has started and that still run."""
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        found.append(current)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
    return found


def reset_peaks(pids: Iterable[int]) -> None:
    """Forget how much memory processes have taken so far (Linux: ``clear_refs``)."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peaks(pids: Iterable[int]) -> int:
    """The most memory that processes have taken since, in bytes, added up."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def median(runs: Iterable[Run], key: str) -> float:
    """The median of one of the numbers of some runs."""
    return float(statistics.median(getattr(run, key) for run in runs))


def ratios(runs: Sequence[Run], first: Sequence[Run], key: str = "seconds") -> tuple[float, float]:
    """Least and median ratio to the runs of another way, round by round."""
    each = [getattr(r, key) / getattr(f, key) for r, f in zip(runs, first, strict=False)]
    return min(each), statistics.median(each)
