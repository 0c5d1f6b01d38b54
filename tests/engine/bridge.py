"""A BuildKit daemon for the remote driver: the one inside a Docker Engine, on a socket of its own.

Docker's API has BuildKit's gRPC service at ``/grpc``, behind an upgrade of the connection.  The
remote driver of buildx speaks it directly, so a relay does the upgrade and then passes bytes on.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Engine

_UPGRADE = (
    b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: 0\r\n\r\n"
)


@contextmanager
def buildkit_socket(engine: Engine, folder: Path) -> Iterator[str]:
    """The address of that engine's BuildKit, as long as the block runs."""
    path = folder / "buildkit.sock"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    with ExitStack() as stack:
        stack.callback(path.unlink)
        stack.callback(listening.close)
        stack.callback(lambda: _quietly(listening.shutdown, socket.SHUT_RDWR))
        words = (listening, engine.host.removeprefix("unix://"))
        threading.Thread(target=_serve, args=words, daemon=True).start()
        yield f"unix://{path}"


def _serve(listening: socket.socket, docker: str) -> None:
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return
        server = socket.socket(socket.AF_UNIX)
        server.connect(docker)
        server.sendall(_UPGRADE)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += server.recv(1)
        assert answer.startswith(b"HTTP/1.1 101 "), answer
        for pair in ((client, server), (server, client)):
            threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _quietly(target.shutdown, socket.SHUT_WR)


def _quietly(call: object, *words: object) -> None:
    with suppress(OSError):
        call(*words)  # type: ignore[operator]
