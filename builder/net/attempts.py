"""Tries that we repeat ourselves, of registries and forges: how many, and how long between them."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Attempts:
    """Counts failures in a row of one task, up to ``most``."""

    def __init__(self, most: int, pause: Callable[[int], float]) -> None:
        """``pause`` gives the seconds to wait after the first, second, ... failure."""
        self.most = most
        self.failures = 0
        self._pause = pause

    @property
    def at_last(self) -> bool:
        """Whether one more failure in a row is the end."""
        return self.failures + 1 >= self.most

    def failed(self) -> float | None:
        """The seconds until the next try; None where this was the last one."""
        self.failures += 1
        return None if self.failures >= self.most else self._pause(self.failures)

    def forget(self) -> None:
        """What came through makes up for earlier failures."""
        self.failures = 0


def seconds_asked(retry_after: str) -> float | None:
    """What ``Retry-After`` asks for, a number of seconds or a date (RFC 9110, 10.2.3)."""
    value = retry_after.strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())
