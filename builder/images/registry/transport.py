"""HTTP requests to one registry: retries, redirects, deadlines, byte counts, failures.

No exception's own text appears in a message, because it can contain a signed URL.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError

from builder.common.console import console
from builder.common.net import FixedAuthorization, Session, reason_of, speaks_tls, through
from builder.common.retry import RETRIED, RequestFailed, Retries, resolved, retry_after
from builder.errors import RemoteError
from builder.images.registry.model import parse_json
from builder.images.registry.options import Traffic
from builder.images.registry.reference import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.images.registry.options import Options

# ---------------------------------------------------------------------------------------- responses


#: Bytes of an error response that are read.
_ERROR_LIMIT = 64 << 10
_BLOCK = 64 << 10


class NotFound(RemoteError):
    """Status 404: it does not exist, or access is not allowed."""


def number(text: str) -> int | None:
    """A byte count from a header, or None if invalid; 18 digits are an exabyte."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def read_block(response: requests.Response, size: int) -> bytes:
    """Up to ``size`` bytes of the body, ``b""`` at its end.

    Raises:
        RequestFailed: the connection broke.
    """
    try:
        data: bytes = response.raw.read(size, decode_content=False)
    except (HTTPError, OSError, ValueError) as error:
        raise reason_of(error, "") from None
    return data


def read_all(response: requests.Response, limit: int, subject: str) -> bytes:
    """The whole body, closed afterwards.

    Raises:
        RequestFailed: the connection broke, or the body is shorter than announced.
        RemoteError: the body is larger than ``limit`` bytes.
    """
    too_large = RemoteError(f"{subject} is larger than the limit of {limit} bytes")
    try:
        announced = number(response.headers.get("Content-Length", "")) or 0
        if announced > limit:
            raise too_large
        blocks, size = [], 0
        while block := read_block(response, _BLOCK):
            size += len(block)
            if size > limit:
                raise too_large
            blocks.append(block)
        if size < announced:
            raise RequestFailed("connection cut")
    finally:
        response.close()
    return b"".join(blocks)


def drain(response: requests.Response) -> None:
    """Finish a response: read the rest of a short body, so that the connection can be reused."""
    left = _ERROR_LIMIT
    with contextlib.suppress(RequestFailed):
        while left > 0 and (data := read_block(response, left)):
            left -= len(data)
    response.close()


def answered(response: requests.Response) -> str:
    """The status and the registry's own message."""
    try:
        message = _registry_words(read_all(response, _ERROR_LIMIT, "the error"))
    except (RequestFailed, RemoteError):
        message = ""
    return f"answered {response.status_code}{message}"


def problem(response: requests.Response, host: str, subject: str) -> RemoteError:
    """The error for an unexpected response."""
    hint = ""
    if response.status_code in (401, 403):
        hint = f"docker login {host}, with an account that has access"
    elif response.status_code == 404:
        hint = "check the name and the tag"
    kind = NotFound if response.status_code == 404 else RemoteError
    return kind(f"{host}: {subject}: {answered(response)}", hint=hint)


def _registry_words(data: bytes) -> str:
    """Codes and messages of the errors in a registry's response; nothing else."""
    try:
        errors: Any = parse_json(data)["errors"]
        words = [f"{error['code']}: {error.get('message', '')}" for error in errors[:3]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    text = "; ".join(words)
    return f" ({re.sub(r'[^ -~]+', ' ', text)[:300]})" if text else ""


# ----------------------------------------------------------------------------------------- requests


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: Limit of redirects, as in Docker's client; a blob store needs one or two.
_REDIRECT_LIMIT = 10


class Authorization(Protocol):
    """An authorization for requests to the registry."""

    def header(self) -> str | None:
        """The ``Authorization`` header to send; None if the registry has not asked for one."""

    def answer(self, response: requests.Response) -> None:
        """Get a token or header after a 401, or raise a RemoteError."""


class Transport:
    """Requests to one registry and to the hosts that it redirects to."""

    def __init__(self, host: str, options: Options, traffic: Traffic | None = None) -> None:
        self.host = host
        self.options = options
        self.traffic = traffic or Traffic()
        #: Bytes per request of an upload; reduced after the registry refuses a size.
        self.piece = options.chunk
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._scheme: str | None = None
        self._session = Session()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def say_once(self, message: str) -> None:
        """Print a message about a problem once for each kind."""
        kind = re.sub(r"\d+", "", message.partition(";")[0])
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        console.say(message)

    def retries(self, subject: str, *, small: bool = False) -> Retries:
        """The retry policy of one task: a manifest, or the transfer of a blob.

        ``small`` means a task without a blob, with a short deadline.
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
        """``https://HOST``, or ``http://HOST`` if the user allowed it or it is this machine."""
        with self._lock:
            if self._scheme is None:
                self._scheme = self._find_scheme()
            return f"{self._scheme}://{self.host}"

    def _find_scheme(self) -> str:
        """A registry on this machine may use either scheme."""
        if self.host in self.options.plain_http:
            return "http"
        if is_loopback(self.host) and not speaks_tls(self.host):
            return "http"
        return "https"

    # -- one request

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
        """Send once, follow redirects of reads, and return the response with its body unread.

        ``authorization`` goes to this address only: a redirect to another host is followed
        without it, and none leads from https to http.

        Raises:
            RequestFailed: there was no response.
            RemoteError: there are too many redirects, or one leads to a refused location.
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

    # -- with retries

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
        """Send with retries until a final response, authenticating if the registry asks.

        Only for idempotent requests.  The body of the response is unread.  A status in ``settle``
        is retried too, and returned if it does not change.

        Raises:
            RemoteError: no response in time, or an unexpected status.
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
        """A small document: the response, and its body of at most ``limit`` bytes.

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
    """A URL without parts that may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def origin(url: str) -> tuple[str, str]:
    """Scheme, host and port, which a credential is bound to."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _head(headers: Mapping[str, str]) -> int:
    """Size of a request's or response's head: its first line without the path, and its headers."""
    return 20 + sum(len(name) + len(value) + 4 for name, value in headers.items())
