"""When a failed request is tried again, how long to wait first, and when to give up.

This is the one rule, for registries, package indexes, wheels and forges.  urllib3's ``Retry``,
which comes with ``requests``, covers one request until its headers are there: no body that breaks
off, no upload that goes on where it stopped, no limit on the time of all tries.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from builder.errors import RemoteError
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.net.failures import RequestFailed

#: What another try may cure (RFC 9110, 15.5 and 15.6): overload, and gateways that lost their
#: backend.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
#: Bytes that must have come through before earlier failures are forgotten.
_PROGRESS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, for which answers, and for how many seconds.

    The pause doubles with each failure from ``backoff`` on; ``small_deadline`` is for a task with
    all its tries that moves no large file.
    """

    attempts: int = 5
    backoff: float = 0.5
    longest_wait: float = 120.0
    small_deadline: float = 180.0
    retried: frozenset[int] = RETRIED


class NoAnswer(RemoteError):
    """Nobody answered: the network is the matter, or the host."""


class Retries:
    """Counts failures in a row of one task, waits between them, and gives up in time.

    Its time begins here: a large image, or a client that lives long, has no end of its own.
    """

    def __init__(
        self,
        host: str,
        subject: str,
        policy: RetryPolicy,
        *,
        seconds: float | None = None,
        hint: str = "run the same command again; completed work is reused",
        say: Callable[[str], None] = console.say,
    ) -> None:
        """``subject`` is the task, as messages name it; ``seconds`` is its deadline."""
        self._hint = hint
        self.policy = policy
        self._name = f"{host}: {subject}" if subject else host
        self._host = host
        self._seconds = policy.small_deadline if seconds is None else seconds
        self._until = time.monotonic() + self._seconds
        self._failures = 0
        self._moved = 0
        self._say = say

    def time_left(self) -> float:
        """Seconds until the task must be done.

        Raises:
            RemoteError: they are over, or the user has interrupted us.
        """
        from builder.net import sockets

        sockets.check()
        left = self._until - time.monotonic()
        if left <= 0:
            raise RemoteError(
                f"{self._name}: not done after {self._seconds:.0f} s, which is the limit",
                hint=self._hint,
            )
        return left

    @property
    def at_last_try(self) -> bool:
        """Whether one more failure in a row is the end."""
        return self._failures + 1 >= self.policy.attempts

    def moved(self, count: int) -> None:
        """Bytes came through; enough of them make up for earlier failures."""
        self._moved += count
        if self._moved >= _PROGRESS:
            self._failures = 0

    def lost(self, lost: RequestFailed) -> None:
        """The same as ``failed`` for a request without an answer; some need no second try.

        Raises:
            NoAnswer: this was the last try.
        """
        if lost.fatal:
            raise NoAnswer(f"{self._name}: {lost}", hint=lost.hint)
        if self.at_last_try:
            raise NoAnswer(self._given_up(str(lost)), hint=self._hint)
        self.failed(str(lost))

    def failed(self, reason: str, wait: float | None = None) -> None:
        """Wait before the next try: as long as the server asks, else longer each time.

        Raises:
            RemoteError: this was the last try, or the wait would be too long.
        """
        from builder.net import sockets

        if self.at_last_try:
            raise RemoteError(self._given_up(reason), hint=self._hint)
        self._failures += 1
        self._moved = 0
        limit = min(self.policy.longest_wait, self.time_left())
        if wait is not None and wait > limit:
            raise RemoteError(
                f"{self._name}: {reason}, and asks to wait {wait:.0f} s",
                hint="run the same command again after that time",
            )
        if wait is None:
            doubled = self.policy.backoff * 2 ** (self._failures - 1)
            wait = doubled * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        soon = f" in {wait:.0f} s" if wait >= 2 else ""
        count = f"{self._failures} of {self.policy.attempts - 1}"
        self._say(f"  {self._host}: {reason}; trying again{soon} ({count})")
        sockets.pause(min(wait, limit))

    def _given_up(self, reason: str) -> str:
        times = f", {self.policy.attempts} times" if self.policy.attempts > 1 else ""
        return f"{self._name}: {reason}{times}"


class _Answer(Protocol):
    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


Answer = TypeVar("Answer", bound=_Answer)


def final_answer(
    ask: Callable[[], Answer],
    url: str,
    retries: Retries,
    said: Callable[[Answer], str] = lambda answer: f"answered {answer.status_code}",
) -> Answer:
    """Send a request that may be sent twice until its answer needs no other try.

    Raises:
        NoAnswer: no attempt got an answer.
        RemoteError: the last answer still was one to try again after.
    """
    import requests

    from builder.net.failures import RequestFailed, reason_of
    from builder.net.messages import host_of, through

    while True:
        try:
            answer = ask()
        except requests.RequestException as error:
            failure = reason_of(error, host_of(url))
            retries.lost(
                RequestFailed(f"{failure}{through(url)}", fatal=failure.fatal, hint=failure.hint)
            )
            continue
        if answer.status_code not in retries.policy.retried:
            return answer
        retries.failed(said(answer), retry_after(answer))


def retry_after(answer: _Answer) -> float | None:
    """Seconds that the server asks us to wait, given as a number or as a date; None if it says not.

    Only 429 and 503 give ``Retry-After`` that meaning (RFC 9110, 10.2.3, and RFC 6585, 4).
    """
    if answer.status_code not in (429, 503):
        return None
    value = answer.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())
