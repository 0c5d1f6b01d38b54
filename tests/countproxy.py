"""A relay in front of a registry that counts the bytes of each direction, and changes none."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_BLOCK = 256 << 10


@dataclass
class CountProxy:
    """Listens on a port of its own; ``address`` takes the place of the registry's.

    ``sent`` is what clients sent, ``received`` what they got; in bytes, headers included.
    """

    upstream: str
    sent: int = 0
    received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def take(self) -> tuple[int, int]:
        """Bytes sent and received since the last time."""
        with self._lock:
            counts = self.sent, self.received
            self.sent = self.received = 0
        return counts

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # the thread ends first: its next accept could be on a socket that was given the same number
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        host, _, port = self.upstream.partition(":")
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((host, int(port)))
                for one, other, name in ((client, server, "sent"), (server, client, "received")):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    words = (one, other, name)
                    threading.Thread(target=self._relay, args=words, daemon=True).start()

    def _relay(self, one: socket.socket, other: socket.socket, name: str) -> None:
        with suppress(OSError):
            while data := one.recv(_BLOCK):
                with self._lock:
                    setattr(self, name, getattr(self, name) + len(data))
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
