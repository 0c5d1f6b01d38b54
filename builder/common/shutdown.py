"""Shutdown: signals, child processes, the folder for temporary files, and a command's time limit.

A time limit ends a command like an interruption, and reports the step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from builder.common import leftovers
from builder.common.console import console
from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds for child processes to end before they are killed.
_GRACE = 1.5
#: The signals that ended this run, in order.
_by: list[int] = []
#: Descendants when the first signal arrived: process IDs with start times.
_started: dict[int, str] = {}
_interrupted: list[bool] = []
#: Set when the run is ended from outside.
ended = threading.Event()
_cuts: list[Callable[[], None]] = []


def ended_by() -> signal.Signals | None:
    """The signal that ended this run; None for an interruption without a signal."""
    return signal.Signals(_by[0]) if _by else None


def handle_signals() -> None:
    """Let SIGTERM and SIGHUP end a run like Ctrl-C; ignored signals (``nohup``) stay ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def ignore_signals() -> None:
    """Ignore signals, because nothing is left to interrupt."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def when_ended(cut: Callable[[], None]) -> None:
    """Register a function that unblocks waiting threads when the run is ended."""
    _cuts.append(cut)


def end_waits() -> None:
    """End the run: waits end, and no new work starts."""
    ended.set()
    for cut in _cuts:
        cut()


def check() -> None:
    """Raise if the run was ended.

    Raises:
        RemoteError: the run was ended.
    """
    if ended.is_set():
        raise RemoteError("interrupted")


def pause(seconds: float) -> None:
    """Sleep, at most until the run is ended.

    Raises:
        RemoteError: the run was ended meanwhile.
    """
    ended.wait(seconds)
    check()


def note_what_runs() -> None:
    """Record child processes at an interruption, before their children are re-parented."""
    end_waits()
    _interrupted.append(True)
    _started.update(_below_us())


def _end(number: int, _frame: object) -> NoReturn:
    _by.append(number)
    note_what_runs()
    if number != signal.SIGINT:  # which a terminal sends to all of them itself
        for other in (signal.SIGTERM, signal.SIGHUP):  # a closing terminal sends more than one
            signal.signal(other, signal.SIG_IGN)
        _send(signal.SIGTERM, _started)
    raise KeyboardInterrupt


def end_what_we_started() -> None:
    """After an interruption: end all processes that this run started."""
    if not _interrupted:
        return
    note_what_runs()
    _send(signal.SIGTERM, _started)
    until = time.monotonic() + _GRACE
    while (left := _alive(_started)) and time.monotonic() < until:
        time.sleep(0.02)
    _send(signal.SIGKILL, left)


def _send(number: signal.Signals, processes: dict[int, str]) -> None:
    for process in _alive(processes):
        with suppress(OSError):
            os.kill(process, number)


def _alive(processes: dict[int, str]) -> dict[int, str]:
    """Processes that are still running; reused process IDs are ignored."""
    return {p: began for p, began in processes.items() if _stat(p)[1:] == [began]}


def _stat(process: int) -> list[str]:
    """Parent and start time of a process; None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:  # ended meanwhile, or a system without /proc
        return []
    fields = text.rpartition(")")[2].split()
    return [] if fields[0] in "ZX" else [fields[1], fields[19]]


def _below_us() -> dict[int, str]:
    """All descendants of this process, in other sessions too."""
    try:
        running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return {}
    stats = {process: stat for process in running if (stat := _stat(process))}
    below: dict[int, str] = {}
    parents = {str(os.getpid())}
    while parents:
        children = {p: began for p, (parent, began) in stats.items() if parent in parents}
        below |= children
        parents = {str(process) for process in children}
    return below


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """A folder for all temporary files of this run and its child processes."""
    parent = os.environ.get("TMPDIR")
    place = Path(parent or "/tmp")  # noqa: S108 - for an unpredictable name
    leftovers.sweep_temporary(place)
    folder = place / leftovers.temporary_name()
    try:
        folder.mkdir(0o700)
    except OSError:  # who needs one says so
        yield
        leftovers.close()
        return
    os.environ["TMPDIR"] = str(folder.absolute())
    handle = leftovers.hold(folder)
    try:
        yield
    finally:
        leftovers.close()
        if handle is not None:
            os.close(handle)
        if parent is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = parent
        try:
            folder.rmdir()
        except OSError:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


# ----------------------------------------------------------------------------------- the time limit


#: The message of an exceeded limit, for the command's end.
_over: list[str] = []


@contextmanager
def time_limit(seconds: float, limit: str) -> Iterator[None]:
    """Interrupt the block after some seconds; ``limit`` is the limit as given."""

    def stop(_signum: int, _frame: object) -> NoReturn:
        where = f" in the step {console.running!r}" if console.running else ""
        _over.append(f"the time limit of {limit} was reached{where}; {console.left}")
        note_what_runs()
        raise KeyboardInterrupt

    _over.clear()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_over() -> str:
    """The message if a time limit ended the command; returned once."""
    return _over.pop() if _over else ""
