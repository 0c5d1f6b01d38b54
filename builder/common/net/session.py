"""The HTTP session of every client: certificates per host, time limits, no cookies."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError

from builder.common.net.connections import WINDOW, Adapter, HostAdapter
from builder.common.net.messages import host_of, resolved, shown
from builder.common.net.retry import Retries, final_answer
from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from requests.adapters import BaseAdapter

    from builder.common.net.retry import RetryPolicy


#: Bytes that are read at once, and between updates of a progress bar.
BLOCK = 256 << 10


@dataclass(frozen=True)
class Answer:
    """A response with its whole body; ``url`` is the one after redirects."""

    status_code: int
    headers: Mapping[str, str]
    url: str
    body: bytes


def blocks(response: requests.Response, most: int) -> Iterator[bytes]:
    """The body as it was sent, without undoing a content encoding; it ends after ``most`` bytes.

    Raises:
        requests.ConnectionError: the connection broke.
    """
    while most > 0:
        try:
            block: bytes = response.raw.read(min(most, BLOCK), decode_content=False)
        except (HTTPError, OSError, ValueError) as error:
            raise requests.ConnectionError(error) from error
        if not block:
            return
        most -= len(block)
        yield block


def _body(response: requests.Response, limit: int) -> bytes:
    """The whole body, with gzip undone.

    Raises:
        RemoteError: it has more than ``limit`` bytes, or another content encoding.
    """
    data = b"".join(blocks(response, limit + 1))
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "gzip" and len(data) <= limit:  # which was not asked for
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, limit + 1)
        except zlib.error as error:
            raise RemoteError(f"the answer is not the gzip that it claims to be: {error}") from None
    elif encoding not in ("identity", "gzip", ""):
        raise RemoteError(f"the answer has content encoding {encoding[:40]!r}, not asked for")
    if len(data) > limit:
        raise RemoteError(f"the answer has more than {limit >> 20} MiB, which is the limit")
    return data


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

    def small(self, url: str, headers: Mapping[str, str], limit: int) -> Answer:
        """GET an answer of at most ``limit`` bytes, with retries until its body has arrived.

        Raises:
            requests.RequestException: there is no answer, and no policy.
            RemoteError: the answer is too large, or the retries are exhausted.
        """

        def ask() -> Answer:
            ordinary = super(Session, self).request
            with ordinary("GET", url, headers=dict(headers), stream=True) as response:
                body = _body(response, limit)
                return Answer(response.status_code, response.headers, response.url, body)

        if self._policy is None:
            return ask()
        return final_answer(ask, url, Retries(host_of(url), "", self._policy))

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a response redirects to.

        Raises:
            RemoteError: from https to plain http, where anybody on the way could change it.
        """
        target: str | None = super().get_redirect_target(resp)
        if target is not None and urlsplit(resp.url).scheme == "https":
            following = resolved(resp.url, target, f"a redirect of {host_of(resp.url)}")
            if urlsplit(following).scheme != "https":
                raise RemoteError(f"{host_of(resp.url)} redirects from https to {shown(following)}")
        return target

    def close(self) -> None:
        """Close every connection."""
        super().close()
        for adapter in self._hosts.values():
            adapter.close()
