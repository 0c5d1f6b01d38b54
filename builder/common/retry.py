"""Retries: which failed requests are repeated, after which pause, and for how long.

It is used for registries, package indexes, wheels and forges.  urllib3's ``Retry``,
which comes with ``requests``, covers one request until its headers arrive: no interrupted
body, no resumed upload, no limit on the total time.  Nothing here imports ``requests``.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urljoin, urlsplit

from builder.common.console import console
from builder.common.shutdown import check, pause
from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: Retryable statuses (RFC 9110, 15.5 and 15.6): overload, and gateways that lost their
#: backend.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
#: Transferred bytes after which earlier failures no longer count.
_PROGRESS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The number of retries, the statuses, and the time limits in seconds.

    The pause starts at ``backoff`` and doubles; ``small_deadline`` limits a task, with
    all its retries, that transfers no large file.
    """

    attempts: int = 5
    backoff: float = 0.5
    longest_wait: float = 120.0
    small_deadline: float = 180.0
    retried: frozenset[int] = RETRIED
    #: waits for so many seconds
    pause: Callable[[float], None] = pause


class RequestFailed(Exception):
    """There was no response, or it broke off.  ``fatal`` means that a retry cannot help."""

    def __init__(self, reason: str, *, fatal: bool = False, hint: str = "") -> None:
        super().__init__(reason)
        self.fatal = fatal
        self.hint = hint


class NoAnswer(RemoteError):
    """There was no response: the network or the host has a problem."""


class Retries:
    """Counts consecutive failures of one task, waits between them, and gives up at the deadline.

    The time starts here.
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
        """``subject`` describes the task in messages; ``seconds`` is its deadline."""
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
        """Seconds until the deadline.

        Raises:
            RemoteError: the deadline has passed, or the run was interrupted.
        """
        check()
        left = self._until - time.monotonic()
        if left <= 0:
            raise RemoteError(
                f"{self._name}: not done after {self._seconds:.0f} s, which is the limit",
                hint=self._hint,
            )
        return left

    @property
    def at_last_try(self) -> bool:
        """Whether one more consecutive failure is final."""
        return self._failures + 1 >= self.policy.attempts

    def moved(self, count: int) -> None:
        """Count transferred bytes; enough of them reset the failure count."""
        self._moved += count
        if self._moved >= _PROGRESS:
            self._failures = 0

    def lost(self, lost: RequestFailed) -> None:
        """Like ``failed``, for a request without a response; some failures are final.

        Raises:
            NoAnswer: this was the last attempt.
        """
        if lost.fatal:
            raise NoAnswer(f"{self._name}: {lost}", hint=lost.hint)
        if self.at_last_try:
            raise NoAnswer(self._given_up(str(lost)), hint=self._hint)
        self.failed(str(lost))

    def failed(self, reason: str, wait: float | None = None) -> None:
        """Wait before the next attempt: as long as the server asks, else with exponential backoff.

        Raises:
            RemoteError: this was the last attempt, or the wait would be too long.
        """
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
        self.policy.pause(min(wait, limit))

    def _given_up(self, reason: str) -> str:
        times = f", {self.policy.attempts} times" if self.policy.attempts > 1 else ""
        return f"{self._name}: {reason}{times}"


class StatusAnswer(Protocol):
    """A response, as far as retries need it."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


def retry_after(answer: StatusAnswer) -> float | None:
    """``Retry-After`` in seconds; None if there is none.

    Only 429 and 503 give ``Retry-After`` that meaning (RFC 9110, 10.2.3, and RFC 6585, 4).
    """
    return asked_wait(answer.headers) if answer.status_code in (429, 503) else None


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds that ``Retry-After`` asks for, with a number or a date; None if with neither.

    A date is one of the server's clock, which may differ from ours.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    until = _moment(value)
    return None if until is None else max(0.0, until - server_time(headers))


def server_time(headers: Mapping[str, str]) -> float:
    """The server's time in an answer, in seconds since the epoch; ours if it does not say."""
    said = _moment(headers.get("Date", ""))
    return time.time() if said is None else said


def _moment(date: str) -> float | None:
    """A date of HTTP in seconds since the epoch."""
    from email.utils import mktime_tz, parsedate_tz

    try:
        parts = parsedate_tz(date)
        return None if parts is None else float(mktime_tz((*parts[:9], parts[9] or 0)))
    except (ValueError, TypeError, OverflowError):  # not a date, or one before the year 1
        return None


# -------------------------------------------------------------------------------- URLs in messages


def host_of(url: str) -> str:
    """Host and port of a URL, without parts that may be secret; "" if it is not a URL."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return ""


def shown(url: str) -> str:
    """A URL without user, password and query; if it is not a URL, the beginning of its text."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return repr(url.rpartition("@")[2][:80])
    return parts._replace(netloc=host_of(url), query="", fragment="").geturl()


def resolved(url: str, location: str, subject: str) -> str:
    """The URL in a response from ``url``, relative or absolute.

    Raises:
        RemoteError: it is not a valid URL.
    """
    try:
        target = urljoin(url, location)
        _ = urlsplit(target).port
    except ValueError as error:
        raise RemoteError(
            f"{subject} names {location!r:.120}, which is not a valid address: {error}"
        ) from None
    return target
