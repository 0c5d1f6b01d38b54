"""Background work that ends with the command."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds that work which is no longer wanted has to clean up.
_GRACE = 5.0
#: Seconds between two looks whether a thread that waits is wanted.
_LOOK = 0.2


class WorkCancelled(Exception):
    """The work that this thread does is no longer wanted."""


class _BackgroundThread(threading.Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="beside", daemon=True)
        self._work = work
        self._begun_by = threading.current_thread()
        self._ended = threading.Event()

    @property
    def unwanted(self) -> bool:
        """Whether the block that it works for, or one of those around that, has ended."""
        above = self._begun_by
        return self._ended.is_set() or (isinstance(above, _BackgroundThread) and above.unwanted)

    def end(self) -> None:
        """Its block has ended."""
        self._ended.set()

    def run(self) -> None:
        with suppress(Exception):  # whoever needs what was to be made does it again, and says why
            self._work()


#: What is being done beside the main line.
_running: list[_BackgroundThread] = []


def check_cancelled() -> None:
    """To be called now and then by what takes long.

    Raises:
        WorkCancelled: the work of this thread was cancelled.
    """
    thread = threading.current_thread()
    if isinstance(thread, _BackgroundThread) and thread.unwanted:
        raise WorkCancelled


@contextmanager
def in_background(work: Callable[[], object] | None) -> Iterator[None]:
    """Do work while the block runs, and end it with the block.

    An error of the work is not raised: do the same work again to have it.
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
    """Wait until what is done beside this thread is done.

    Raises:
        WorkCancelled: the work of this thread was cancelled.
    """
    for thread in tuple(_running):
        while thread is not threading.current_thread() and thread.is_alive():
            check_cancelled()
            thread.join(_LOOK)
