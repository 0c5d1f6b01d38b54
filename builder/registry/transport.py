"""HTTP requests to one registry: retries, redirects, deadlines and byte counts.

Nothing of an exception's own text reaches a message: it may carry an address with a signature.
"""

from __future__ import annotations

import math
import re
import threading
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import requests

from builder.errors import RemoteError
from builder.net.failures import RequestFailed, reason_of
from builder.net.messages import resolved, through
from builder.net.retry import RETRIED, Retries, retry_after
from builder.net.session import FixedAuthorization, Session
from builder.net.tls import speaks_tls
from builder.registry.options import Traffic
from builder.registry.reference import is_loopback
from builder.registry.responses import drain, problem, read_all
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.registry.options import Options

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: Docker's client follows ten; a blob store needs one or two.
_REDIRECT_LIMIT = 10


class Authorization(Protocol):
    """Leave to do something at the registry."""

    def header(self) -> str | None:
        """The ``Authorization`` to send, as far as it is known."""

    def answer(self, response: requests.Response) -> None:
        """Get what the registry asks for in a 401, or raise a RemoteError."""


class Transport:
    """Requests to one registry and to the places that it sends us to."""

    def __init__(self, host: str, options: Options, traffic: Traffic | None = None) -> None:
        self.host = host
        self.options = options
        self.traffic = traffic or Traffic()
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._scheme: str | None = None
        self._session = Session()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def say_once(self, message: str) -> None:
        """Talk about trouble, once for each kind of it."""
        kind = re.sub(r"\d+", "", message.partition(";")[0])
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        console.say(message)

    def retries(self, subject: str, *, small: bool = False) -> Retries:
        """The tries of one task: a manifest, or a blob with all that is needed to move it.

        ``small`` is a task that moves no blob, which is over soon or never.
        """
        return Retries(
            self.host,
            subject,
            self.options,
            seconds=min(self.options.deadline, self.options.small_deadline if small else math.inf),
            say=self.say_once,
        )

    # -- where

    @property
    def root(self) -> str:
        """``https://HOST``, or ``http://HOST`` where that was asked for or is harmless."""
        with self._lock:
            if self._scheme is None:
                self._scheme = self._find_scheme()
            return f"{self._scheme}://{self.host}"

    def _find_scheme(self) -> str:
        """A registry on this machine may speak either."""
        if self.host in self.options.plain_http:
            return "http"
        if is_loopback(self.host) and not speaks_tls(self.host):
            return "http"
        return "https"

    # -- one exchange

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        authorization: str | None = None,
        retries: Retries | None = None,
    ) -> requests.Response:
        """Send once, follow redirects of reads, and give the answer with its body unread.

        ``authorization`` goes to this address only: a redirect to another host is followed
        without it, and none leads from https to http.

        Raises:
            RequestFailed: there was no answer.
            RemoteError: the redirects do not end, or lead to a place that is refused.
        """
        seen = {url}
        allowed = dict(headers or {})
        home = origin(url)
        for _ in range(_REDIRECT_LIMIT):
            header = authorization if origin(url) == home else None
            response = self._exchange(method, url, allowed, body, header, retries)
            location = response.headers.get("Location")
            reads = method in ("GET", "HEAD")
            if response.status_code not in _REDIRECTS or not location or not reads:
                return response
            drain(response)
            url = self._next(url, location)
            if url in seen:
                raise RemoteError(f"{self.host}: a redirect leads back to {place(url)}")
            seen.add(url)
        raise RemoteError(f"{self.host}: more than {_REDIRECT_LIMIT} redirects")

    def _next(self, url: str, location: str) -> str:
        target = resolved(url, location, f"a redirect of {self.host}")
        scheme, old = urlsplit(target).scheme, urlsplit(url).scheme
        if scheme not in ("http", "https") or (scheme == "http" and old == "https"):
            raise RemoteError(f"{self.host}: a redirect from {old} to {scheme!r} is refused")
        return target

    def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        authorization: str | None,
        retries: Retries | None,
    ) -> requests.Response:
        left = retries.time_left() if retries is not None else self.options.deadline
        parts = urlsplit(url)
        try:
            response = self._session.request(
                method,
                url,
                headers=dict(headers),
                data=body,
                auth=FixedAuthorization(authorization),
                timeout=(min(self.options.connect_timeout, left),
                         min(self.options.read_timeout, left)),
                allow_redirects=False,
                stream=True,
                proxies={"no_proxy": parts.hostname or ""} if is_loopback(parts.netloc) else None,
            )  # fmt: skip
        except (requests.RequestException, OSError, ValueError) as error:
            self.traffic.add(requests=1)
            lost = reason_of(error, parts.netloc.rpartition("@")[2])
            by = "" if is_loopback(parts.netloc) else through(url)
            raise RequestFailed(f"{lost}{by}", fatal=lost.fatal, hint=lost.hint) from None
        sent = response.request
        self.traffic.add(
            requests=1,
            sent=_head(sent.headers) + len(sent.path_url) + len(body or b""),
            received=_head(response.headers),
        )
        return response

    # -- with patience

    def request(
        self,
        method: str,
        url: str,
        subject: str,
        *,
        expect: frozenset[int],
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        authorization: str | None = None,
        permit: Authorization | None = None,
        retries: Retries | None = None,
        settle: frozenset[int] = frozenset(),
    ) -> requests.Response:
        """Send until there is a final answer, authenticating when the registry asks for it.

        Only for what may be sent twice.  The body of the answer is unread.  A status of ``settle``
        is tried again, too, and is the answer if it does not change.

        Raises:
            RemoteError: no answer in time, or an unexpected status.
        """
        retries = retries or self.retries(subject, small=True)
        challenged = False
        while True:
            header = permit.header() if permit is not None else authorization
            try:
                response = self.send(
                    method, url, headers=headers, body=body, authorization=header, retries=retries
                )
            except RequestFailed as lost:
                retries.lost(lost)
                continue
            status = response.status_code
            if status == 401 and permit is not None and not challenged:
                challenged = True
                drain(response)
                permit.answer(response)
            elif status in expect:
                return response
            elif status in RETRIED:
                drain(response)
                if status in settle and retries.at_last_try:
                    return response
                retries.failed(f"answered {status}", retry_after(response))
            else:
                raise problem(response, self.host, subject)

    def fetch(
        self,
        url: str,
        subject: str,
        *,
        limit: int,
        method: str = "GET",
        expect: frozenset[int] = frozenset({200}),
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        authorization: str | None = None,
        permit: Authorization | None = None,
    ) -> tuple[requests.Response, bytes]:
        """A small document whole: the answer, and its body of at most ``limit`` bytes.

        Raises:
            RemoteError: as for ``request``, or the body is too large.
        """
        retries = self.retries(subject, small=True)
        while True:
            response = self.request(
                method,
                url,
                subject,
                expect=expect,
                headers=headers,
                body=body,
                authorization=authorization,
                permit=permit,
                retries=retries,
            )
            try:
                data = read_all(response, limit, f"{self.host}: {subject}")
            except RequestFailed as lost:
                retries.lost(lost)
                continue
            self.traffic.add(received=len(data))
            return response, data


def place(url: str) -> str:
    """An address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def origin(url: str) -> tuple[str, str]:
    """Scheme, host and port: what a secret is bound to."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _head(headers: Mapping[str, str]) -> int:
    """Bytes of a request's or answer's head: its first line, less the path, and its headers."""
    return 20 + sum(len(name) + len(value) + 4 for name, value in headers.items())
