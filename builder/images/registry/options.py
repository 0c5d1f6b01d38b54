"""Timeouts and limits of a registry client, and its traffic counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder import settings
from builder.common.hints import instead
from builder.common.retry import RetryPolicy
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Hosts given on this run's command line.
_asked_for: frozenset[str] = frozenset()


def ask_for_plain_http(hosts: Iterable[str]) -> None:
    """Allow plain HTTP to these hosts in this run, replacing hosts of an earlier call.

    Raises:
        UsageError: one is not ``HOST[:PORT]``.
    """
    global _asked_for  # noqa: PLW0603 - one command line, one process
    _asked_for = frozenset()
    wanted = frozenset(hosts)
    for host in wanted:
        _check_host(host)
    _asked_for = wanted


def _check_host(host: str) -> None:
    from builder.images.registry.reference import wrong_host

    problem = wrong_host(host)
    if problem:
        raise UsageError(
            f"--plain-http {host}: {problem}",
            hint=instead(host, "registry.local:5000"),
        )


@dataclass(frozen=True, kw_only=True)
class Options(RetryPolicy):
    """Timeouts in seconds, and chunk sizes in bytes.

    ``read_timeout`` is the window of ``builder.common.net``; ``deadline`` limits the transfer of a
    blob, including all retries.
    """

    plain_http: frozenset[str] = frozenset()
    connect_timeout: float = 15.0
    read_timeout: float = 60.0
    deadline: float = 6 * 3600.0
    #: between writing a tag that must not move and the last look at it: longer than the request
    #: of another publisher who looked before it was written is on its way
    settle: float = 1.0
    chunk: int = 8 << 20

    @classmethod
    def from_environment(cls) -> Options:
        """The defaults, and the hosts of ``--plain-http`` and ``SPARK_BUILD_PLAIN_HTTP``."""
        hosts = settings.PLAIN_HTTP.value.split(",")
        named = frozenset(host.strip() for host in hosts if host.strip())
        return cls(plain_http=named | _asked_for)


@dataclass
class Traffic:
    """Bytes sent and received over HTTP, headers included, without TLS and TCP overhead."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, requests: int = 0, sent: int = 0, received: int = 0) -> None:
        """Add to the counts; thread-safe."""
        with self._lock:
            self.requests += requests
            self.sent += sent
            self.received += received
