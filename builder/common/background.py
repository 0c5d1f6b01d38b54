"""Background work that ends with the command."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds that cancelled work has to clean up.
_GRACE = 5.0
#: Seconds between checks for cancellation while waiting.
_LOOK = 0.2


class WorkCancelled(Exception):
    """The background work was cancelled."""


class _BackgroundThread(threading.Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="beside", daemon=True)
        self._work = work
        self._begun_by = threading.current_thread()
        self._ended = threading.Event()

    @property
    def unwanted(self) -> bool:
        """Whether its block, or an enclosing one, has ended."""
        above = self._begun_by
        return self._ended.is_set() or (isinstance(above, _BackgroundThread) and above.unwanted)

    def is_below(self, above: threading.Thread) -> bool:
        """Whether it was begun by a thread, or by one that this thread began."""
        by = self._begun_by
        return by is above or (isinstance(by, _BackgroundThread) and by.is_below(above))

    def end(self) -> None:
        """Mark its block as ended."""
        self._ended.set()

    def run(self) -> None:
        with suppress(Exception):  # whoever needs what was to be made does it again, and says why
            self._work()


#: The current background work.
_running: list[_BackgroundThread] = []


def check_cancelled() -> None:
    """Raise if this thread's work was cancelled; long work calls it regularly.

    Raises:
        WorkCancelled: the work of this thread was cancelled.
    """
    thread = threading.current_thread()
    if isinstance(thread, _BackgroundThread) and thread.unwanted:
        raise WorkCancelled


@contextmanager
def in_background(work: Callable[[], object] | None) -> Iterator[None]:
    """Run work in a thread during the block, and cancel it at the end of the block.

    Errors of the work are not raised: whoever needs the result does the work again.
    """
    if work is None:
        yield
        return
    thread = _BackgroundThread(work)
    _running.append(thread)
    try:
        thread.start()
        yield
    finally:
        _running.remove(thread)
        thread.end()
        if thread.ident is not None:
            thread.join(_GRACE)


def wait_for_background() -> None:
    """Wait until the background work is done.

    Background work itself waits for what it began and for what was begun before it, so that no two
    wait for each other.

    Raises:
        WorkCancelled: the work of this thread was cancelled.
    """
    own = threading.current_thread()
    begun = tuple(_running)
    before = begun.index(own) if own in begun else len(begun)
    for number, thread in enumerate(begun):
        while (number < before or thread.is_below(own)) and thread.is_alive():
            check_cancelled()
            thread.join(_LOOK)


def acquire(lock: threading.Lock) -> None:
    """Wait for a lock that another thread has.

    Raises:
        WorkCancelled: the work of this thread was cancelled.
    """
    while not lock.acquire(timeout=_LOOK):
        check_cancelled()
