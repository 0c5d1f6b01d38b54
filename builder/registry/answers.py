"""What came back, or did not: bounded reading of answers, and words for failures."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from typing import TYPE_CHECKING, Any

import requests
from urllib3.exceptions import HTTPError

from builder.errors import RemoteError
from builder.net.sockets import TooSlow
from builder.registry.model import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

#: More than this of an error page is of no use to anybody.
_ERROR_LIMIT = 64 << 10
_BLOCK = 64 << 10
#: OpenSSL's names of the alerts of RFC 8446, 6.2, with which a server refuses a client's
#: certificate, or that there is none.
_REFUSES_US = re.compile(r"_ALERT_(\w*CERTIFICATE\w*|UNKNOWN_CA)$")


class Lost(Exception):
    """There was no answer, or it broke off.  ``fatal``: another try would end the same."""

    def __init__(self, reason: str, *, fatal: bool = False, hint: str = "") -> None:
        super().__init__(reason)
        self.fatal = fatal
        self.hint = hint


class Missing(RemoteError):
    """The answer was 404: the registry has no such thing, or does not show it."""


def reason_of(error: BaseException, host: str) -> Lost:
    """Why there was no answer, in words that hold no address and no secret."""
    causes = list(_causes(error))
    for cause in causes:
        found = _last_word(cause, host)
        if found is not None:
            return found
    slow = next((cause for cause in causes if isinstance(cause, TooSlow)), None)
    if slow is not None:
        return Lost(f"no answer in time, {slow}")
    kinds: tuple[tuple[type[BaseException], str], ...] = (
        (requests.exceptions.ProxyError, "the proxy did not let us through"),
        (requests.Timeout, "no answer in time"),
        (TimeoutError, "no answer in time"),
        (ConnectionRefusedError, "connection refused"),
        (socket.gaierror, f"the name {host} does not resolve now"),
    )
    for kind, words in kinds:
        if any(isinstance(cause, kind) for cause in causes):
            return Lost(words)
    return Lost("connection cut")


def _last_word(cause: BaseException, host: str) -> Lost | None:
    """What another try would not change."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Lost(
            f"its certificate is not trusted ({cause.verify_message})",
            fatal=True,
            hint=f"put its authority at /etc/docker/certs.d/{host}/ca.crt, "
            "or name a bundle with SSL_CERT_FILE",
        )
    if isinstance(cause, ssl.SSLError) and _REFUSES_US.search(cause.reason or ""):
        return Lost(
            "it lets in only who has a certificate that it knows",
            fatal=True,
            hint=f"put yours at /etc/docker/certs.d/{host}/client.cert, its key at client.key",
        )
    if _not_tls(cause):
        hint = f"if it speaks plain http and that is meant: --plain-http {host}"
        return Lost("it does not speak TLS as we do", fatal=True, hint=hint)
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return Lost(f"there is no host {host}", fatal=True, hint="check the name")
    if isinstance(cause, (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema)):
        return Lost("the address is not valid", fatal=True)
    return None


def _not_tls(cause: BaseException) -> bool:
    broke_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, broke_off)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was made from: ``requests`` and urllib3 wrap twice and more."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        linked = (current.__cause__, current.__context__, getattr(current, "reason", None))
        pending += [item for item in (*current.args, *linked) if isinstance(item, BaseException)]


def number(text: str) -> int | None:
    """A number of bytes in a header, None where it is none; 18 digits are an exabyte."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def read_block(response: requests.Response, size: int) -> bytes:
    """Up to ``size`` bytes of the body, ``b""`` at its end.

    Raises:
        Lost: the connection broke.
    """
    try:
        data: bytes = response.raw.read(size, decode_content=False)
    except (HTTPError, OSError, ValueError) as error:
        raise reason_of(error, "") from None
    return data


def read_all(response: requests.Response, limit: int, subject: str) -> bytes:
    """The whole body, closed afterwards.

    Raises:
        Lost: the connection broke, or the body is shorter than announced.
        RemoteError: there are more than ``limit`` bytes.
    """
    too_large = RemoteError(f"{subject} is larger than {limit} bytes, which is the limit")
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
            raise Lost("connection cut")
    finally:
        response.close()
    return b"".join(blocks)


def drain(response: requests.Response) -> None:
    """Be done with an answer: read what is left of a short body, so that the connection is kept."""
    left = _ERROR_LIMIT
    with contextlib.suppress(Lost):
        while left > 0 and (data := read_block(response, left)):
            left -= len(data)
    response.close()


def answered(response: requests.Response) -> str:
    """The status, and what the registry says itself."""
    try:
        said = _registry_words(read_all(response, _ERROR_LIMIT, "the error"))
    except (Lost, RemoteError):
        said = ""
    return f"answered {response.status_code}{said}"


def problem(response: requests.Response, host: str, subject: str) -> RemoteError:
    """The error for an answer that was not expected."""
    hint = ""
    if response.status_code in (401, 403):
        hint = f"docker login {host}, with an account that may do this"
    elif response.status_code == 404:
        hint = "check the name and the tag"
    kind = Missing if response.status_code == 404 else RemoteError
    return kind(f"{host}: {subject}: {answered(response)}", hint=hint)


def _registry_words(data: bytes) -> str:
    """Code and message of the errors in a registry's answer; anything else is left out."""
    try:
        errors: Any = parse_json(data)["errors"]
        words = [f"{error['code']}: {error.get('message', '')}" for error in errors[:3]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    text = "; ".join(words)
    return f" ({re.sub(r'[^ -~]+', ' ', text)[:300]})" if text else ""
