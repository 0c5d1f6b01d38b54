"""HTTP to registries, package indexes and forges: sessions, TLS, retries, and time limits.

``requests`` and urllib3 limit one read, not an exchange: a server that sends one byte per second
would be read forever.  So the sockets enforce a limit.  An exchange must transfer ``STEP`` bytes in
each window of seconds, counting both directions and all phases: small ones finish within one
window, and large ones keep a minimum speed.

Trusted are the system's certificate authorities, the environment's, and a registry's own.  As with
Docker and Podman, ``certs.d/HOST/`` below ``/etc/docker`` or ``/etc/containers`` may have ``*.crt``
(authorities for that host only) and ``NAME.cert`` with ``NAME.key`` (a client certificate).
``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the system's store, as everywhere with OpenSSL;
``REQUESTS_CA_BUNDLE`` and ``CURL_CA_BUNDLE`` add to it.
"""

from __future__ import annotations

import math
import os
import queue
import re
import socket
import ssl
import threading
import time
import weakref
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from requests.utils import DEFAULT_CA_BUNDLE_PATH, get_environ_proxies, select_proxy
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
)

from builder.common.retry import (
    RequestFailed,
    Retries,
    StatusAnswer,
    host_of,
    resolved,
    retry_after,
    shown,
)
from builder.common.shutdown import check, when_ended
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from requests import PreparedRequest, Response
    from requests.adapters import BaseAdapter

    from builder.common.retry import RetryPolicy


# ------------------------------------------------------------------------- sockets with time limits


#: Default seconds to connect, and of a window.
CONNECT, WINDOW = 15.0, 60.0
#: Bytes per window: about 1 kB/s, like the limit that curl's documentation suggests.
STEP = 64 << 10
#: Most bytes of a response's head, with all interim responses (1xx) before it.
HEAD = 1 << 20
#: Bytes per send, so that progress is visible while sending.
_PIECE = 64 << 10
#: Seconds between checks for the run's end during a name lookup.
_LOOK = 0.05

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.RLock()  # a signal may come while its own thread holds it
_here = threading.local()


class TooSlow(TimeoutError):
    """An exchange transferred less than ``STEP`` bytes in a window without finishing."""


class HeadTooLong(OSError):
    """A response has endless headers or interim responses: more than ``HEAD`` bytes."""


def _cut() -> None:
    """Close every connection, because the run was ended."""
    with _lock:
        for opened in list(_open):
            # not SSLSocket.shutdown, which removes the TLS state while a thread reads
            try:
                socket.socket.shutdown(opened, socket.SHUT_RDWR)
            except OSError:  # not connected
                continue


when_ended(_cut)


class MinimumSpeed:
    """The minimum speed of an exchange, the size of its response's head, and its deadline."""

    def __init__(
        self,
        window: float,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = math.inf,
    ) -> None:
        """``seconds`` limits the whole exchange, whatever its speed."""
        self._window = window
        self._clock = clock
        self._last = clock() + seconds
        self._until = min(clock() + window, self._last)
        self._moved = 0
        #: bytes that may still arrive before the head is complete
        self.head_left: int | None = None

    @property
    def over(self) -> bool:
        """Whether too few bytes were transferred."""
        return self._clock() >= self._until

    def left(self) -> float:
        """Seconds left in the window.

        Raises:
            TooSlow: the window is over.
            RemoteError: the run was ended.
        """
        check()
        if self.over:
            if self._clock() >= self._last:
                raise TooSlow("not even within the time limit of the whole task")
            raise TooSlow(f"only {self._moved} bytes in {self._window:g} s")
        return max(self._until - self._clock(), 0.001)  # 0 would mean not to wait at all

    def moved(self, count: int) -> None:
        """Bytes were sent or received."""
        self._moved += count
        if self._moved >= STEP:
            self._moved = 0
            self._until = min(self._clock() + self._window, self._last)

    def received(self, count: int) -> None:
        """Bytes were received.

        Raises:
            HeadTooLong: they are more than a response's head may have.
        """
        if self.head_left is not None:
            self.head_left -= count
            if self.head_left < 0:
                raise HeadTooLong
        self.moved(count)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit the exchanges that this thread begins in the block, with the bodies of their responses.

    A minimum speed alone would let a server take an hour for a small document.
    """
    _here.seconds = seconds
    try:
        yield
    finally:
        del _here.seconds


@contextmanager
def exchange(window: float) -> Iterator[None]:
    """Treat everything that this thread's connections do in the block as one exchange.

    At its end the response's head has arrived, but not its body.
    """
    pace = MinimumSpeed(window, seconds=getattr(_here, "seconds", math.inf))
    pace.head_left = HEAD
    _here.pace = pace
    try:
        yield
    finally:
        pace.head_left = None
        del _here.pace


def minimum_speed() -> MinimumSpeed:
    """The minimum speed of this thread's current exchange."""
    speed = getattr(_here, "pace", None)
    return speed if isinstance(speed, MinimumSpeed) else MinimumSpeed(WINDOW)


class _Paced(socket.socket):
    """A socket with the time limit of the current exchange."""

    #: one item, which a connection shares with its sockets
    paces: list[MinimumSpeed]

    def recv_into(self, *words: Any, **named: Any) -> int:
        now = self.paces[0]
        self.settimeout(now.left())
        count = super().recv_into(*words, **named)
        check()
        now.received(count)
        return count

    def recv(self, *words: Any, **named: Any) -> bytes:
        now = self.paces[0]
        self.settimeout(now.left())
        data = super().recv(*words, **named)
        check()
        now.received(len(data))
        return data

    def sendall(self, data: Any, flags: int = 0) -> None:
        with memoryview(data) as given, given.cast("B") as left:
            at = 0
            while at < len(left):
                now = self.paces[0]
                self.settimeout(now.left())
                count = self.send(left[at : at + _PIECE], flags)
                now.moved(count)
                at += count


class PlainSocket(_Paced):
    """A TCP connection."""


class TlsSocket(_Paced, ssl.SSLSocket):
    """A TLS connection; ``SSLContext.sslsocket_class`` makes contexts use it."""

    def do_handshake(self, block: bool = False) -> None:
        """Do the TLS handshake, with one limit for its whole duration."""
        close_at_exit(self)
        self.paces = [minimum_speed()]
        super().do_handshake(block)


def close_at_exit(opened: socket.socket) -> None:
    """Close a socket when the run ends."""
    with _lock:
        _open.add(opened)


def connect(
    host: str, port: int, timeout: float, options: Iterable[tuple[int, int, int | bytes]] = ()
) -> PlainSocket:
    """Connect to the first reachable address of a host.

    Raises:
        OSError: none is reachable in time, or the host does not exist.
        RemoteError: the run was ended.
    """
    until = time.monotonic() + timeout
    failed: OSError = TimeoutError("timed out")
    for family, kind, protocol, where in _addresses(host.strip("[]"), port, timeout):
        opened = PlainSocket(family, kind, protocol)
        close_at_exit(opened)
        opened.paces = [minimum_speed()]
        try:
            for option in options:
                opened.setsockopt(*option)
            check()
            opened.settimeout(max(until - time.monotonic(), 0.001))
            opened.connect(where)
            check()
        except OSError as error:
            opened.close()
            check()
            failed = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failed


_Address = tuple[int, int, int, Any]


def _addresses(host: str, port: int, timeout: float) -> list[_Address]:
    """Look up addresses in a thread, because nothing interrupts the system's resolver."""
    answers: queue.SimpleQueue[list[_Address] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([(*row[:3], row[4]) for row in rows])
        except OSError as error:
            answers.put(error)
        except UnicodeError:  # a label that is empty or too long
            answers.put(socket.gaierror(socket.EAI_NONAME, "no such name"))

    threading.Thread(target=ask, daemon=True).start()
    until = time.monotonic() + timeout
    while True:
        check()
        try:
            answer = answers.get(timeout=_LOOK)
        except queue.Empty:
            if time.monotonic() > until:
                raise TimeoutError("the name lookup timed out") from None
            continue
        if isinstance(answer, OSError):
            raise answer
        return answer


# -------------------------------------------------------------------------- the adapter of requests


#: Connections per host: parallel transfers and a few small requests.
CONNECTIONS = 16


class _Plain(HTTPConnection):
    """A connection whose sockets use the limits of the current exchange."""

    _paces: list[MinimumSpeed]

    def _new_conn(self) -> socket.socket:
        timeout = self.timeout if isinstance(self.timeout, int | float) else CONNECT
        options = self.socket_options or ()
        try:
            opened = connect(self.host, self.port, timeout, options)
        except TimeoutError as error:
            raise ConnectTimeoutError(self, f"no connection in {timeout:g} s") from error
        except OSError as error:
            if type(error).__name__ == "gaierror":
                raise NameResolutionError(self.host, self, error) from error  # type: ignore[arg-type]
            raise NewConnectionError(self, f"no connection: {error}") from error
        self._paces = opened.paces
        return opened

    def request(self, *words: Any, **named: Any) -> None:
        if self.sock is not None:  # from an earlier exchange, or with TLS by now
            self._paces[0] = minimum_speed()
        super().request(*words, **named)


class _Tls(_Plain, HTTPSConnection):
    """The same, with TLS."""

    def connect(self) -> None:
        super().connect()
        if isinstance(self.sock, TlsSocket):
            self.sock.paces = self._paces


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _Tls


_POOLS = {"http": _PlainPool, "https": _TlsPool}


class Adapter(HTTPAdapter):
    """The connections of a session; one ``send`` is one exchange and one attempt."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        super().__init__(2, CONNECTIONS)

    def init_poolmanager(self, *words: Any, **named: Any) -> None:
        """Use our connections in every pool."""
        super().init_poolmanager(*words, **named)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **named: Any) -> Any:
        """The same for a proxy."""
        manager = super().proxy_manager_for(proxy, **named)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Send within the limits; ``timeout`` is a pair: connect timeout and window."""
        window = timeout or self._window
        limits = timeout if isinstance(timeout, tuple) else (min(CONNECT, window), window)
        with exchange(limits[1]):
            return super().send(request, stream, limits, verify, cert, proxies)


# -------------------------------------------------------------------------- certificate authorities


_ADDED = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_FILES = ("SSL_CERT_FILE", *_ADDED)
#: Timeout in seconds for a local server's TLS handshake.
_GREETING_TIMEOUT = 5.0


def certificate_folders(host: str) -> list[Path]:
    """Folders that may have certificates for ``HOST[:PORT]``."""
    roots = [Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d")]
    config = os.environ.get("DOCKER_CONFIG")
    if config:  # where a Docker without root looks
        roots.insert(0, Path(config) / "certs.d")
    return [root / host for root in roots]


def trust(host: str) -> ssl.SSLContext:
    """The TLS settings for one host.

    Raises:
        UsageError: a certificate file of that host, or one that the environment names, cannot
            be used.
    """
    named = {name: Path(os.environ[name]) for name in _FILES if os.environ.get(name)}
    for name, path in named.items():
        if not path.exists():
            raise UsageError(f"{name} names {path}, which does not exist")
    context = ssl.create_default_context()
    context.sslsocket_class = TlsSocket
    for path in {named[name] for name in _ADDED if name in named}:
        context.load_verify_locations(**{"capath" if path.is_dir() else "cafile": str(path)})
    if not context.cert_store_stats()["x509_ca"]:  # a system without a store of its own
        context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    for folder in certificate_folders(host):
        try:
            files = sorted(folder.iterdir())
        except OSError:
            continue
        for path in files:
            _add(context, path)
    return context


def _add(context: ssl.SSLContext, path: Path) -> None:
    try:
        if path.suffix == ".crt":
            context.load_verify_locations(path)
        elif path.suffix == ".cert":
            context.load_cert_chain(path, path.with_suffix(".key"))
    except (OSError, ssl.SSLError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not PEM"
        raise UsageError(f"{path} cannot be used as a certificate: {why}") from None


def speaks_tls(host: str) -> bool:
    """Whether a server on this machine supports TLS; sends only a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslsocket_class = TlsSocket
    parts = urlsplit(f"https://{host}")
    try:
        plain = connect(parts.hostname or "", parts.port or 443, _GREETING_TIMEOUT)
        with plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:  # one that wants to know first who we are says so in TLS
        return "_ALERT_" in (error.reason or "")
    except (OSError, ValueError):
        return False


class HostAdapter(Adapter):
    """Connections to one host, with its own trusted certificates."""

    def __init__(self, host: str, window: float) -> None:
        self._context = trust(host)
        super().__init__(window)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Use our TLS settings in every pool."""
        super().init_poolmanager(*args, ssl_context=self._context, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """The same for a proxy."""
        return super().proxy_manager_for(proxy, ssl_context=self._context, **kwargs)

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:  # noqa: ARG002
        """Does nothing: the settings already have all certificate authorities."""
        conn.cert_reqs = "CERT_REQUIRED"
        conn.ca_certs = conn.ca_cert_dir = None


# ---------------------------------------------------------------------------- why a request failed

#: OpenSSL's names of TLS alerts (RFC 8446, 6.2) with which a server refuses a client
#: certificate, or its absence.
_REFUSES_US = re.compile(r"_ALERT_(\w*CERTIFICATE\w*|UNKNOWN_CA)$")


def reason_of(error: BaseException, host: str) -> RequestFailed:
    """Why there was no response, without URLs or secrets."""
    causes = list(_causes(error))
    for cause in causes:
        reason = _last_word(cause, host)
        if reason is not None:
            return reason
    if any(isinstance(cause, HeadTooLong) for cause in causes):
        return RequestFailed(f"the head of its answer has more than {HEAD >> 20} MiB", fatal=True)
    slow = next((cause for cause in causes if isinstance(cause, TooSlow)), None)
    if slow is not None:
        return RequestFailed(f"no answer in time, {slow}")
    answer = getattr(error, "response", None)
    if isinstance(error, requests.HTTPError) and answer is not None:
        return RequestFailed(f"answered {answer.status_code}")
    kinds: tuple[tuple[type[BaseException], str], ...] = (
        (requests.exceptions.ProxyError, "the proxy refused the connection"),
        (requests.Timeout, "no answer in time"),
        (TimeoutError, "no answer in time"),
        (ConnectionRefusedError, "connection refused"),
        (socket.gaierror, f"the name {host} does not resolve"),
    )
    for kind, words in kinds:
        if any(isinstance(cause, kind) for cause in causes):
            return RequestFailed(words)
    return RequestFailed("connection cut")


def _last_word(cause: BaseException, host: str) -> RequestFailed | None:
    """The reason if a retry cannot help."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return RequestFailed(
            f"its certificate is not trusted ({cause.verify_message})",
            fatal=True,
            hint=f"put its authority at /etc/docker/certs.d/{host}/ca.crt, "
            "or name a bundle with SSL_CERT_FILE",
        )
    if isinstance(cause, ssl.SSLError) and _REFUSES_US.search(cause.reason or ""):
        return RequestFailed(
            "it requires a client certificate",
            fatal=True,
            hint=f"put yours at /etc/docker/certs.d/{host}/client.cert, its key at client.key",
        )
    if _not_tls(cause):
        hint = f"if the registry uses plain HTTP: --plain-http {host}"
        return RequestFailed("the TLS handshake failed", fatal=True, hint=hint)
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        hint = "check the name, and this machine's network and DNS"
        return RequestFailed(f"unknown host {host}", fatal=True, hint=hint)
    if isinstance(cause, (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema)):
        return RequestFailed("the address is not valid", fatal=True)
    return None


def _not_tls(cause: BaseException) -> bool:
    broke_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, broke_off)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes: ``requests`` and urllib3 wrap exceptions several times."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        linked = (current.__cause__, current.__context__, getattr(current, "reason", None))
        pending += [item for item in (*current.args, *linked) if isinstance(item, BaseException)]


def through(url: str) -> str:
    """`` (proxy: HOST)`` if the environment sets a proxy for a URL, else ``""``."""
    proxy = select_proxy(url, get_environ_proxies(url, no_proxy=None))
    return f" (proxy: {host_of(proxy) or proxy})" if proxy else ""


def no_answer(error: BaseException, url: str) -> str:
    """The error for a URL without a usable response."""
    if isinstance(error, RemoteError):  # the tries are used up, and it names the host
        return str(error)

    host = host_of(url)
    return f"{host}: {reason_of(error, host)}{through(url)}"


# ---------------------------------------------------------------------------------------- sessions

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


AnyAnswer = TypeVar("AnyAnswer", bound=StatusAnswer)


def final_answer(
    ask: Callable[[], AnyAnswer],
    url: str,
    retries: Retries,
    describe: Callable[[AnyAnswer], str] = lambda answer: f"answered {answer.status_code}",
) -> AnyAnswer:
    """Send an idempotent request with retries.

    Raises:
        NoAnswer: no attempt got an answer.
        RemoteError: the last response still had a retryable status.
    """
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
        retries.failed(describe(answer), retry_after(answer))


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
            RemoteError: it is no address, which ``requests`` also looks at if it is told to follow
                none; or from https to plain http, where anybody on the way could change it.
        """
        host = host_of(resp.url)
        try:
            target: str | None = super().get_redirect_target(resp)
        except UnicodeError:
            raise RemoteError(f"{host} redirects to what is not a valid address") from None
        if target is None:
            return None
        following = resolved(resp.url, target, f"a redirect of {host}")
        if urlsplit(resp.url).scheme == "https" != urlsplit(following).scheme:
            raise RemoteError(f"{host} redirects from https to {shown(following)}")
        return target

    def close(self) -> None:
        """Close every connection."""
        super().close()
        for adapter in self._hosts.values():
            adapter.close()
