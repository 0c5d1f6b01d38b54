"""Retries after conflicts with another client that writes at the same time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from builder.errors import RemoteError
from builder.net import sockets

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

#: docker-registry rewrites the links of blobs and manifests in place, and answers with one of these
#: when it reads a link that another client's push is just writing.
_PASSING = ("MANIFEST_BLOB_UNKNOWN", "DIGEST_INVALID")
_TRIES = 6


def with_retries(run: Callable[[], Result]) -> Result:
    """Do something that may be done twice, again when a registry says what may be true in a moment.

    Raises:
        RemoteError: it is not, or another thing is wrong.
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
    """Wait some hundredths of a second, longer each time, and never as long as the others."""
    sockets.pause(random.uniform(0, 0.02 * 2**turn))  # noqa: S311 - no secret
