"""The time limit of a command: ends it like an interruption, and reports the step."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from builder.util.console import console
from builder.util.shutdown import note_what_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The message of an exceeded limit, for the command's end.
_over: list[str] = []


@contextmanager
def time_limit(seconds: float, said: str) -> Iterator[None]:
    """Interrupt the block after some seconds; ``said`` is the limit as given."""

    def stop(_signum: int, _frame: object) -> NoReturn:
        where = f" in the step {console.running!r}" if console.running else ""
        _over.append(f"the time limit of {said} was reached{where}; {console.left}")
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
