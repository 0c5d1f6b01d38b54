"""What a unit test may not do: start a program, open a port, or wait.

Tests that must do so are in ``tests/processes``.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Python's audit events of these, and their names in the message.
_EVENTS = {
    "subprocess.Popen": "starts a program",
    "os.exec": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.system": "starts a program",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "socket.bind": "opens a port",
}
#: Seconds that a unit test may sleep at a time: a retry's pause, which the tests set to 1 ms.
_NAP = 0.005

_really_sleep = time.sleep
#: How a process of ``multiprocessing`` starts that is not forked: without an audit event.
_really_spawn = util.spawnv_passfds


class Limits:
    """Refuses what a unit test may not do, for as long as :meth:`hold` holds."""

    def __init__(self) -> None:
        #: what was refused; None: nobody is held
        self._refused: list[str] | None = None
        self._added = False

    def _audit(self, event: str, words: tuple[Any, ...]) -> None:
        if event in _EVENTS and self._refused is not None:
            self._refuse(f"{_EVENTS[event]}: {event} {words[:2]}")

    def _sleep(self, seconds: float) -> None:
        if seconds > _NAP:
            self._refuse(f"sleeps for {seconds} s")
        _really_sleep(seconds)

    def _spawn(self, path: bytes, words: Sequence[str], fds: Sequence[int]) -> int:
        if self._refused is not None:
            self._refuse(f"starts a process: multiprocessing {words[:1]}")
        return _really_spawn(path, words, fds)

    def _refuse(self, what: str) -> None:
        message = f"a unit test {what}; tests that must do so are in tests/processes"
        if self._refused is not None:
            self._refused.append(message)
        pytest.fail(message)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Fail on what is refused, even if the code under test catches the failure."""
        if not self._added:  # an audit hook stays to the end of the process
            sys.addaudithook(self._audit)
            self._added = True
        before = self._refused, time.sleep, util.spawnv_passfds
        self._refused = []
        time.sleep = self._sleep  # type: ignore[assignment]
        util.spawnv_passfds = self._spawn  # type: ignore[assignment]
        try:
            yield
            if self._refused:
                pytest.fail(self._refused[0])
        finally:
            self._refused, time.sleep, util.spawnv_passfds = before


LIMITS = Limits()
