"""HTTP requests to one registry: authorization, retries, redirects, deadlines, counts, failures.

No exception's own text appears in a message, because it can contain a signed URL.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import requests
from urllib3.exceptions import HTTPError

from builder import settings
from builder.applier.files import DOCUMENT, read_regular
from builder.common.console import console
from builder.common.net import (
    FixedAuthorization,
    Session,
    deadline,
    reason_of,
    speaks_tls,
    through,
)
from builder.common.retry import RETRIED, RequestFailed, Retries, resolved, retry_after
from builder.errors import RemoteError, UsageError
from builder.images.registry.model import parse_json
from builder.images.registry.reference import DOCKER_HUB, Traffic, is_loopback, wrong_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.images.registry.reference import Options


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
        self._printed: set[str] = set()
        self._scheme: str | None = None
        self._session = Session()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def say_once(self, message: str) -> None:
        """Print a message about a problem once for each kind."""
        kind = re.sub(r"\d+", "", message.partition(";")[0])
        with self._lock:
            if kind in self._printed:
                return
            self._printed.add(kind)
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
        limits = min(self.options.connect_timeout, left), min(self.options.read_timeout, left)
        parts = urlsplit(url)
        here = is_loopback(parts.netloc)
        try:
            with deadline(left):
                response = self._session.request(
                    method,
                    url,
                    headers=dict(headers),
                    data=body,
                    auth=FixedAuthorization(authorization),
                    timeout=limits,
                    allow_redirects=False,
                    stream=True,
                    proxies={"no_proxy": parts.hostname or ""} if here else None,
                )
        except (requests.RequestException, OSError, ValueError) as error:
            self.traffic.add(requests=1)
            lost = reason_of(error, parts.netloc.rpartition("@")[2])
            by = "" if here else through(url)
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


# ----------------------------------------------------------------------------------- authorization
#
# The answer is basic authentication, or a bearer token from a token server: the protocol of the
# distribution project ("token authentication"), in which the challenge names a realm, a service and
# a scope, and the realm gives a short-lived token for them.  No secret appears in a message, a
# ``repr`` or a command line.

# -------------------------------------------------------------------------------------- credentials


#: The key that ``docker login`` uses for Docker Hub.
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
#: Timeout in seconds: helpers may query a key chain or a cloud, but must not wait for user input.
HELPER_TIMEOUT = 30.0
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: The user name that helpers return with an identity token, which is exchanged and never sent.
_TOKEN_USER = "<token>"  # noqa: S105 - a name of the helpers' protocol, not a secret
_VARIABLES = (settings.REGISTRY, settings.REGISTRY_USER, settings.REGISTRY_PASSWORD)


@dataclass(frozen=True, kw_only=True)
class Credential:
    """A registry credential.

    ``kind`` is ``basic`` (user and password), ``identity`` (a refresh token that the token
    server exchanges) or ``bearer`` (a registry token, sent as it is).
    """

    kind: Literal["basic", "identity", "bearer"]
    source: str
    username: str = ""
    secret: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an ``Authorization: Basic`` header."""
        pair = f"{self.username}:{self.secret}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


def find_credential(host: str, repository: str = "") -> Credential | None:
    """The credential for a repository, or None for anonymous access.

    In this order: our own three variables, where they name this host; ``REGISTRY_AUTH_FILE`` if it
    is set, else Docker's ``config.json``, then Podman's ``auth.json``.

    Raises:
        UsageError: a file or variable is malformed.
        RemoteError: a helper program failed.
    """
    credential = _from_environment(host)
    if credential is not None:
        return credential
    for path in _files():
        config = _read(path)
        if config is not None:
            credential = _from_config(config, path, host, repository)
            if credential is not None:
                return credential
    return None


def _from_environment(host: str) -> Credential | None:
    registry, user, password = (variable.value for variable in _VARIABLES)
    if not (user or password):
        return None
    if not (registry and user and password):
        names = ", ".join(variable.name for variable in _VARIABLES)
        raise UsageError(
            f"{names} must be set together; the first names the only host that receives the "
            f"other two"
        )
    if registry not in _names(host):
        return None
    return Credential(
        kind="basic", source=settings.REGISTRY_PASSWORD.name, username=user, secret=password
    )


def _files() -> Iterator[Path]:
    named = os.environ.get("REGISTRY_AUTH_FILE")
    if named:
        yield Path(named)
        return
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no such user: a bare container
        home = Path("/nonexistent")
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "containers" / "auth.json"
    config = os.environ.get("XDG_CONFIG_HOME")
    yield (Path(config) if config else home / ".config") / "containers" / "auth.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = read_regular(path, DOCUMENT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        value = parse_json(data or b"{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object", hint=f"docker login, or remove {path}")
    return value


def _from_config(
    config: Mapping[str, Any], path: Path, host: str, repository: str
) -> Credential | None:
    """``credHelpers`` before ``credsStore`` before ``auths``, as Docker does."""
    helpers = _table(config, "credHelpers", path)
    for key in _names(host):
        if key in helpers:
            return _ask_helper(helpers[key], key, path)
    store = config.get("credsStore")
    if store:
        credential = _ask_helper(store, _DOCKER_HUB_KEY if host == DOCKER_HUB else host, path)
        if credential is not None:
            return credential
    auths = {_plain(key): value for key, value in _table(config, "auths", path).items()}
    for key in _names_in_a_file(host, repository):
        entry = auths.get(key)
        if isinstance(entry, dict) and (credential := _from_entry(entry, path, key)) is not None:
            return credential
    return None


def _table(config: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name!r} is not an object")
    return value


def _names(host: str) -> tuple[str, ...]:
    if host == DOCKER_HUB:
        return (_DOCKER_HUB_KEY, DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
    return (host, f"https://{host}")


def _plain(key: str) -> str:
    """Host and path of a key: old files hold addresses of the version 1 API."""
    plain = re.sub(r"^https?://", "", key).rstrip("/")
    return re.sub(r"/v[12]$", "", plain)


def _names_in_a_file(host: str, repository: str) -> Iterator[str]:
    """Podman keys by path, the longest wins; Docker keys by host."""
    parts = repository.split("/") if repository else []
    for name in dict.fromkeys(_plain(name) for name in _names(host)):
        for length in range(len(parts), -1, -1):
            yield "/".join([name, *parts[:length]])


def _from_entry(entry: Mapping[str, Any], path: Path, key: str) -> Credential | None:
    source = f"{path} ({key})"
    texts = {name: value for name, value in entry.items() if isinstance(value, str) and value}
    if "identitytoken" in texts:
        return Credential(kind="identity", source=source, secret=texts["identitytoken"])
    if "registrytoken" in texts:
        return Credential(kind="bearer", source=source, secret=texts["registrytoken"])
    username, password = texts.get("username", ""), texts.get("password", "")
    if "auth" in texts:
        try:
            pair = base64.b64decode(texts["auth"], validate=True).decode()
        except (binascii.Error, ValueError):
            raise UsageError(
                f"{path}: 'auth' of {key} is not base64", hint=f"docker login {key}"
            ) from None
        username, _, password = pair.partition(":")
        password = password.rstrip("\0")
    if not username:
        return None
    return Credential(kind="basic", source=source, username=username, secret=password)


def _ask_helper(name: object, server: str, path: Path) -> Credential | None:
    """``docker-credential-NAME get``: the server goes to its stdin, JSON comes from its stdout."""
    if not isinstance(name, str) or not _HELPER_NAME.fullmatch(name):
        raise UsageError(f"{path}: {name!r} is not the name of a credential helper")
    program = f"docker-credential-{name}"
    if shutil.which(program) is None:
        console.warn(f"{path} names {program}, which is not on PATH; continuing without it")
        return None
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RemoteError(
            f"{program} did not answer for {server} in {HELPER_TIMEOUT:.0f} s",
            hint=f"try it by hand: echo {server} | {program} get",
        ) from None
    except OSError as error:
        raise RemoteError(f"{program} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise RemoteError(
            f"{program} exited {done.returncode} for {server}",
            hint=f"try it by hand: echo {server} | {program} get",
        )
    return _from_helper(done.stdout, program)


def _from_helper(output: bytes, program: str) -> Credential | None:
    try:
        answer = parse_json(output)
        username, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError, TypeError):
        answer = username = secret = None
    if not isinstance(username, str) or not isinstance(secret, str):
        raise RemoteError(f"{program} returned no user name and secret")
    if not secret:
        return None
    if username == _TOKEN_USER:
        return Credential(kind="identity", source=program, secret=secret)
    return Credential(kind="basic", source=program, username=username, secret=secret)


# ------------------------------------------------------------------------------------ authorization


#: Lifetime of a token in seconds if the server does not give one (token specification).
_DEFAULT_LIFE = 60.0
#: The longest lifetime that is believed, in seconds; tokens live for minutes.
_LONGEST_LIFE = 7 * 24 * 3600.0
#: A token is not used shortly before it expires, because a request takes time to arrive.
_SAFE_PART = 0.9
_ANSWER_LIMIT = 1 << 20
#: RFC 6750, b64token: what may stand in a header; anything else would end the header line.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_PARAMETER = re.compile(r'([A-Za-z_]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_CLIENT = "spark-build"
_FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class AccessDenied(RemoteError):
    """The registry or its token server refuses access, with or without a credential."""


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """One ``WWW-Authenticate``: its scheme in lower case, and its parameters."""

    scheme: str
    parameters: dict[str, str]


def parse_challenge(value: str) -> Challenge | None:
    """The bearer challenge in a header if there is one, else the basic one, else None."""
    challenges: dict[str, Challenge] = {}
    marks = list(re.finditer(r"(?:^|,)\s*(bearer|basic)(?=\s|$|,)", value, re.IGNORECASE))
    ends = [*(mark.start() for mark in marks[1:]), len(value)]
    for mark, end in zip(marks, ends, strict=False):
        text = value[mark.end() : end]
        parameters = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
            for name, quoted, plain in _PARAMETER.findall(text)
        }
        scheme = mark[1].lower()
        challenges.setdefault(scheme, Challenge(scheme=scheme, parameters=parameters))
    return challenges.get("bearer") or challenges.get("basic")


def scope_of(repository: str, *actions: str) -> str:
    """The scope for actions (``pull``, ``push``, ``delete``) on a repository."""
    return f"repository:{repository}:{','.join(actions)}"


@dataclass(frozen=True)
class _Token:
    header: str
    until: float
    scopes: frozenset[str]

    def serves(self, wanted: frozenset[str]) -> bool:
        return time.monotonic() < self.until and _atoms(wanted) <= _atoms(self.scopes)


def _atoms(scopes: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Scopes split into single actions, for comparison."""
    pairs = ((name, actions) for name, _, actions in (scope.rpartition(":") for scope in scopes))
    return frozenset((name, action) for name, actions in pairs for action in actions.split(","))


@dataclass(frozen=True, kw_only=True)
class ScopedAuthorization:
    """An authorization for some scopes, and the authenticator that gets tokens for them."""

    authenticator: Authenticator
    scopes: frozenset[str]

    def header(self) -> str | None:
        """The ``Authorization`` header to send; None if the registry has not asked for one."""
        return self.authenticator.header(self.scopes)

    def answer(self, response: requests.Response) -> None:
        """Get a token or header after a 401, or raise a RemoteError."""
        self.authenticator.answer(response, self.scopes)


class Authenticator:
    """Holds the tokens for one registry.  Its ``repr`` shows none of them."""

    def __init__(self, transport: Transport, host: str, repository: str) -> None:
        self._transport = transport
        self._host = host
        self._repository = repository
        self._lock = threading.RLock()
        self._tokens: list[_Token] = []
        self._basic: str | None = None
        self._challenge: Challenge | None = None
        self._credential: Credential | None = None
        self._looked_up = False

    @property
    def credential(self) -> Credential | None:
        """The credential for this registry; looked up once, on its first request for one."""
        with self._lock:
            if not self._looked_up:
                self._credential = find_credential(self._host, self._repository)
                self._looked_up = True
            return self._credential

    def permit(self, *scopes: str) -> ScopedAuthorization:
        """The authorization for requests that need these scopes."""
        return ScopedAuthorization(authenticator=self, scopes=frozenset(scopes))

    def header(self, scopes: frozenset[str]) -> str | None:
        """The ``Authorization`` header to send; None before the registry has asked for one.

        Raises:
            RemoteError: a token is needed, and its server does not give one.
        """
        with self._lock:
            known = self._known(scopes)
            if known is None and self._challenge is not None:
                self._fetch(self._challenge, scopes)
                known = self._known(scopes)
            return known

    def _known(self, scopes: frozenset[str]) -> str | None:
        if self._basic is not None:
            return self._basic
        return next((token.header for token in self._tokens if token.serves(scopes)), None)

    def answer(self, response: requests.Response, scopes: frozenset[str]) -> None:
        """Get a header for the request that was refused with this 401.

        Raises:
            RemoteError: no known scheme is offered, or the credential is refused.
        """
        challenge = parse_challenge(response.headers.get("WWW-Authenticate", ""))
        refused = response.request.headers.get("Authorization")
        with self._lock:
            self._tokens = [token for token in self._tokens if token.header != refused]
            if self._known(scopes) not in (None, refused):
                return  # another thread has been here
            if challenge is None:
                raise self._refused("requires authentication without a supported challenge")
            if challenge.scheme == "basic":
                self._use_basic(refused)
            else:
                self._challenge = challenge
                asked = challenge.parameters.get("scope", "").split()
                more = {s for s in asked if not _atoms(frozenset({s})) <= _atoms(scopes)}
                self._fetch(challenge, scopes | more)

    def _use_basic(self, refused: object) -> None:
        credential = self.credential
        if credential is None:
            raise self._refused("needs a user name and a password")
        if credential.kind != "basic" or credential.basic == refused:
            raise self._refused(f"refuses the credential from {credential.source}")
        self._basic = credential.basic

    def _refused(self, why: str) -> AccessDenied:
        return AccessDenied(f"{self._host} {why}", hint=f"docker login {self._host}")

    def _fetch(self, challenge: Challenge, scopes: frozenset[str]) -> None:
        credential = self.credential
        if credential is not None and credential.kind == "bearer":
            header = f"Bearer {_checked(credential.secret, self._host)}"
            self._tokens = [_Token(header, float("inf"), scopes)]
            return
        token, life = self._exchange(self._realm(challenge), challenge, scopes, credential)
        self._tokens.append(_Token(f"Bearer {token}", time.monotonic() + life * _SAFE_PART, scopes))

    def _realm(self, challenge: Challenge) -> str:
        """Where to get a token, on any host: the registry decides who gets its credential.

        The credential is sent there, so plain HTTP is allowed only for a registry that is used
        over plain HTTP: to its own host, from this machine to this machine, or where the user
        allows it.
        """
        realm = resolved(
            "", challenge.parameters.get("realm", ""), f"the token realm of {self._host}"
        )
        parts, root = urlsplit(realm), urlsplit(self._transport.root)
        plain = (parts.scheme, root.scheme) == ("http", "http") and (
            parts.netloc in (root.netloc, *self._transport.options.plain_http)
            or (is_loopback(parts.netloc) and is_loopback(root.netloc))
        )
        why = ""
        if "@" in parts.netloc:
            why = "its address contains a user name"
        elif not parts.hostname or not (parts.scheme == "https" or plain):
            why = "it is not https"
        if why:
            may = parts.scheme == root.scheme == "http" and not wrong_host(parts.netloc)
            raise RemoteError(
                f"{self._host} names {parts.scheme or 'no'}://{parts.hostname or ''} as its "
                f"token server; this is refused because {why}",
                hint=f"--plain-http {parts.netloc}" if may else "",
            )
        return realm

    def _exchange(
        self,
        realm: str,
        challenge: Challenge,
        scopes: frozenset[str],
        credential: Credential | None,
    ) -> tuple[str, float]:
        service = challenge.parameters.get("service", "")
        query = [("service", service)] if service else []
        subject = f"a token from {urlsplit(realm).hostname}"
        if credential is not None and credential.kind == "identity":
            form = [
                *query,
                ("client_id", _CLIENT),
                ("grant_type", "refresh_token"),
                ("refresh_token", credential.secret),
                ("scope", " ".join(sorted(scopes))),
            ]
            return self._ask("POST", realm, subject, form, None)
        query += [("scope", scope) for scope in sorted(scopes)]
        if credential is None:
            return self._ask("GET", realm, subject, query, None)
        query.append(("account", credential.username))
        return self._ask("GET", realm, subject, query, credential.basic)

    def _ask(
        self,
        method: str,
        realm: str,
        subject: str,
        values: list[tuple[str, str]],
        authorization: str | None,
    ) -> tuple[str, float]:
        parts = urlsplit(realm)
        if method == "GET":
            query = urlencode([*parse_qsl(parts.query), *values])
            realm = urlunsplit(parts._replace(query=query))
        response, data = self._transport.fetch(
            realm,
            subject,
            limit=_ANSWER_LIMIT,
            expect=frozenset({200, 400, 401, 403}),
            method=method,
            body=urlencode(values).encode() if method == "POST" else None,
            headers=_FORM if method == "POST" else None,
            authorization=authorization,
        )
        if response.status_code != 200:
            credential = self._credential
            who = f"the credential from {credential.source}" if credential else "anonymous visitors"
            raise self._refused(f"has a token server that rejects {who} ({response.status_code})")
        return _token_of(data, self._host)


def _token_of(data: bytes, host: str) -> tuple[str, float]:
    try:
        answer: Any = parse_json(data)
        token = answer.get("token") or answer.get("access_token")
        life = float(answer.get("expires_in") or _DEFAULT_LIFE)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise RemoteError(f"{host}: its token server's answer is not a token") from None
    believed = life if _DEFAULT_LIFE <= life <= _LONGEST_LIFE else _DEFAULT_LIFE
    return _checked(token, host), believed


def _checked(token: object, host: str) -> str:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise RemoteError(f"{host}: its token server's answer is not a token")
    return token
