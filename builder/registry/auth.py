"""Answers a registry's 401: basic authentication, or a bearer token from a token server.

The protocol is that of the distribution project ("token authentication"): the challenge names a
realm, a service and a scope; the realm gives a short-lived token for them.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from builder.errors import RemoteError
from builder.net.messages import resolved
from builder.registry.credentials import find_credential
from builder.registry.model import parse_json
from builder.registry.reference import is_loopback, wrong_host

if TYPE_CHECKING:
    import requests

    from builder.registry.credentials import Credential
    from builder.registry.transport import Transport

#: Lifetime of a token in seconds if the server does not give one (token specification).
_DEFAULT_LIFE = 60.0
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
    found: dict[str, Challenge] = {}
    marks = list(re.finditer(r"(?:^|,)\s*(bearer|basic)(?=\s|$|,)", value, re.IGNORECASE))
    ends = [*(mark.start() for mark in marks[1:]), len(value)]
    for mark, end in zip(marks, ends, strict=False):
        text = value[mark.end() : end]
        parameters = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
            for name, quoted, plain in _PARAMETER.findall(text)
        }
        scheme = mark[1].lower()
        found.setdefault(scheme, Challenge(scheme=scheme, parameters=parameters))
    return found.get("bearer") or found.get("basic")


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
        """Where to get a token.  The credential is sent there, so the rules for redirects apply.

        Plain HTTP is allowed only for a registry that is used over plain HTTP: to its own host,
        from this machine to this machine, or where the user allows it.
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
    except (ValueError, TypeError, AttributeError):
        raise RemoteError(f"{host}: its token server's answer is not a token") from None
    return _checked(token, host), max(life, _DEFAULT_LIFE)


def _checked(token: object, host: str) -> str:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise RemoteError(f"{host}: its token server's answer is not a token")
    return token
