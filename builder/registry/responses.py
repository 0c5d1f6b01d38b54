"""Bounded reading of responses, and messages for failures."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from urllib3.exceptions import HTTPError

from builder.errors import RemoteError
from builder.net.failures import RequestFailed, reason_of
from builder.registry.model import parse_json

if TYPE_CHECKING:
    import requests

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
