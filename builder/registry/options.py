"""How patient a registry client is, and what it has moved."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Options:
    """How patient to be, in seconds, and what to send at once, in bytes."""

    plain_http: frozenset[str] = frozenset()
    attempts: int = 5
    backoff: float = 0.5
    longest_wait: float = 120.0
    connect_timeout: float = 15.0
    read_timeout: float = 60.0
    deadline: float = 6 * 3600.0
    chunk: int = 8 << 20

    @classmethod
    def from_environment(cls) -> Options:
        """The defaults, and the hosts that ``SPARK_BUILD_PLAIN_HTTP`` lists."""
        hosts = os.environ.get("SPARK_BUILD_PLAIN_HTTP", "").split(",")
        return cls(plain_http=frozenset(host.strip() for host in hosts if host.strip()))


@dataclass
class Traffic:
    """What went over HTTP, headers included; TLS and TCP are not counted."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, requests: int = 0, sent: int = 0, received: int = 0) -> None:
        """Count more; safe from several threads."""
        with self._lock:
            self.requests += requests
            self.sent += sent
            self.received += received
