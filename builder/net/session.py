"""The HTTP session of every client: certificates per host, time limits, no cookies."""

from __future__ import annotations

import threading
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from builder.net.connections import WINDOW, Adapter, HostAdapter
from builder.net.messages import host_of
from builder.net.retry import Retries, final_answer

if TYPE_CHECKING:
    from requests.adapters import BaseAdapter

    from builder.net.retry import RetryPolicy


class FixedAuthorization(AuthBase):
    """Sends only the given header: otherwise ``requests`` would read ``~/.netrc``."""

    def __init__(self, header: str | None) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._header is not None:
            request.headers["Authorization"] = self._header
        return request


class Session(requests.Session):
    """A session with one adapter per https host, each with its own trusted certificates."""

    def __init__(self, window: float = WINDOW, policy: RetryPolicy | None = None) -> None:
        """``window`` is for requests without their own limit.

        With a ``policy``, GET and HEAD are retried: until the headers of a streamed response
        arrive, else until its body does.
        """
        super().__init__()
        self._lock = threading.Lock()
        self._hosts: dict[str, HostAdapter] = {}
        self._window = window
        self._policy = policy
        self.mount("http://", Adapter(window))
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.headers.update({"Accept-Encoding": "identity", "User-Agent": "spark-build"})

    def get_adapter(self, url: str | bytes) -> BaseAdapter:
        """The adapter of a host; thread-safe."""
        parts = urlsplit(str(url))
        if parts.scheme != "https":
            return super().get_adapter(str(url))
        with self._lock:
            if parts.netloc not in self._hosts:
                self._hosts[parts.netloc] = HostAdapter(parts.netloc, self._window)
            return self._hosts[parts.netloc]

    def request(self, method: Any, url: Any, *words: Any, **named: Any) -> requests.Response:
        """Send a request.

        Raises:
            RemoteError: there is a policy, and the retries are exhausted.
        """
        ask = partial(super().request, method, url, *words, **named)
        if self._policy is None or str(method).upper() not in ("GET", "HEAD"):
            return ask()
        return final_answer(ask, str(url), Retries(host_of(str(url)), "", self._policy))

    def close(self) -> None:
        """Close every connection."""
        super().close()
        for adapter in self._hosts.values():
            adapter.close()
