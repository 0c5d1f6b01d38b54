"""When to retry, and when to give up."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.net import sockets
from builder.net.attempts import Attempts, seconds_asked

if TYPE_CHECKING:
    import requests

    from builder.net.failures import RequestFailed
    from builder.registry.transport import Transport

#: What another try may cure: overload, and gateways that lost their backend.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
#: Bytes that must have come through before earlier failures are forgotten.
_PROGRESS = 1 << 20


class Retries:
    """Counts failures in a row of one task, waits between them, and gives up in time.

    A task is one method of a repository: a manifest, a blob with all that is needed to move it.
    Its time begins here: a large image, or a client that lives long, has no end of its own.
    """

    def __init__(self, transport: Transport, subject: str, *, small: bool = False) -> None:
        """``small`` is a task that moves no blob, which is over soon or never."""
        options = transport.options
        self._transport = transport
        self._subject = subject
        self._seconds = min(options.deadline, options.small_deadline if small else math.inf)
        self._until = time.monotonic() + self._seconds
        self._attempts = Attempts(
            options.attempts,
            lambda failures: options.backoff * 2 ** (failures - 1) * random.uniform(0.5, 1.5),  # noqa: S311
        )
        self._moved = 0

    def time_left(self) -> float:
        """Seconds until the task must be done.

        Raises:
            RemoteError: they are over, or the user has interrupted us.
        """
        sockets.check()
        left = self._until - time.monotonic()
        if left <= 0:
            raise RemoteError(
                f"{self._transport.host}: {self._subject}: not done after {self._seconds:.0f} s, "
                "which is the limit",
                hint="run the same command again; completed work is reused",
            )
        return left

    @property
    def at_last_try(self) -> bool:
        """Whether one more failure in a row is the end."""
        return self._attempts.at_last

    def moved(self, count: int) -> None:
        """Bytes came through; enough of them make up for earlier failures."""
        self._moved += count
        if self._moved >= _PROGRESS:
            self._attempts.forget()

    def lost(self, lost: RequestFailed) -> None:
        """The same for a connection; some need no second try."""
        if lost.fatal:
            message = f"{self._transport.host}: {self._subject}: {lost}"
            raise RemoteError(message, hint=lost.hint)
        self.failed(str(lost))

    def failed(self, reason: str, wait: float | None = None) -> None:
        """Wait before the next try: as long as the registry asks, else longer each time.

        Raises:
            RemoteError: this was the last try, or the wait would be too long.
        """
        options, host = self._transport.options, self._transport.host
        pause = self._attempts.failed()
        self._moved = 0
        if pause is None:
            raise RemoteError(
                f"{host}: {self._subject}: {reason}, {options.attempts} times",
                hint="run the same command again; completed work is reused",
            )
        limit = min(options.longest_wait, self.time_left())
        if wait is not None and wait > limit:
            raise RemoteError(
                f"{host}: {self._subject}: {reason}, and asks to wait {wait:.0f} s",
                hint="run the same command again after that time",
            )
        wait = pause if wait is None else wait
        soon = f" in {wait:.0f} s" if wait >= 2 else ""
        count = f"{self._attempts.failures} of {options.attempts - 1}"
        self._transport.say_once(f"  {host}: {reason}; trying again{soon} ({count})")
        sockets.pause(min(wait, limit))


def retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks us to wait, given as a number or as a date; None if it says not.

    Only 429 and 503 give it that meaning.
    """
    meant = response.status_code in (429, 503)
    return seconds_asked(response.headers.get("Retry-After", "")) if meant else None
