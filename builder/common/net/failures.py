"""Reasons for failed requests, and whether a retry can help."""

from __future__ import annotations

import re
import socket
import ssl
from typing import TYPE_CHECKING

import requests

from builder.common.net.connections import TooSlow

if TYPE_CHECKING:
    from collections.abc import Iterator

#: OpenSSL's names of TLS alerts (RFC 8446, 6.2) with which a server refuses a client
#: certificate, or its absence.
_REFUSES_US = re.compile(r"_ALERT_(\w*CERTIFICATE\w*|UNKNOWN_CA)$")


class RequestFailed(Exception):
    """There was no response, or it broke off.  ``fatal`` means that a retry cannot help."""

    def __init__(self, reason: str, *, fatal: bool = False, hint: str = "") -> None:
        super().__init__(reason)
        self.fatal = fatal
        self.hint = hint


def reason_of(error: BaseException, host: str) -> RequestFailed:
    """Why there was no response, without URLs or secrets."""
    causes = list(_causes(error))
    for cause in causes:
        found = _last_word(cause, host)
        if found is not None:
            return found
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
