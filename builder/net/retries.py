"""Retries of small reads, done by urllib3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from urllib3.util.retry import Retry

from builder.errors import RemoteError
from builder.net import sockets

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse

#: Seconds that a server may ask to wait, as for registries.
_LONGEST = 120.0


class Retries(Retry):
    """GET and HEAD, tried again with longer and longer pauses, which end when the run does."""

    def increment(
        self, method: str | None = None, url: str | None = None, *words: Any, **named: Any
    ) -> Self:
        """The tries that are left: none when the exchange had its time."""
        left = self.new(total=0) if sockets.minimum_speed().over else self
        return super(Retries, left).increment(method, url, *words, **named)

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        """Wait before the next try.

        Raises:
            RemoteError: the server asks for a wait that is too long, or the run has been ended.
        """
        asked = self.get_retry_after(response) if response is not None else None
        if asked is not None and asked > _LONGEST:
            raise RemoteError(
                f"the server answered {response.status if response else ''} and asks to wait "
                f"{asked:.0f} s",
                hint="run the same command again after that time",
            )
        sockets.pause(self.get_backoff_time() if asked is None else asked)


def reads() -> Retries:
    """What is worth another try."""
    return Retries(
        total=4,
        backoff_factor=0.5,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=("GET", "HEAD"),
        raise_on_status=False,
    )
