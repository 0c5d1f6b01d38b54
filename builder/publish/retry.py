"""Retries after conflicts with another client that writes at the same time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from builder.errors import RemoteError
from builder.net import sockets

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

#: docker-registry rewrites links of blobs and manifests in place, and returns one of these
#: while another client's push writes a link.
_PASSING = ("MANIFEST_BLOB_UNKNOWN", "DIGEST_INVALID")
_TRIES = 6


def with_retries(run: Callable[[], Result]) -> Result:
    """Retry an idempotent action after errors that may be temporary.

    Raises:
        RemoteError: the retries are exhausted, or the error is permanent.
    """
    for turn in range(1, _TRIES):
        try:
            return run()
        except RemoteError as error:
            if not any(word in str(error) for word in _PASSING):
                raise
        pause(turn)
    return run()


def pause(turn: int) -> None:
    """Wait with exponential backoff and jitter."""
    sockets.pause(random.uniform(0, 0.02 * 2**turn))  # noqa: S311 - no secret
