"""A server that stops, or goes on a byte at a time, in one phase of an exchange.

with Dripping("body") as server: ...          # the body of every answer comes in drops
server.reached.wait()                         # a client is in that phase
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal, Self

Phase = Literal[
    "accept",  # nobody takes the connection
    "answer",  # the request is read, and nothing is said
    "headers",  # the answer's first lines come in drops
    "body",
    "error",  # the body of a 404 comes in drops
    "interim",  # one "100 Continue" after another, as fast as they are taken
    "steady",  # the body comes in pieces that no minimum speed objects to
    "upload",  # nothing of a request's body is read
]
#: Seconds between two drops: shorter than any limit on one read.
DROP = 0.005
#: Bytes of a piece of a steady body, and of interim responses until the server has enough.
PIECE, ENOUGH = 128 << 10, 64 << 20
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class Dripping:
    """Plain HTTP on the loopback interface.

    ``ready`` answers whole what comes before the phase: a request line that it matches, and the
    answer.
    """

    phase: Phase
    body: bytes = b"x" * 60_000
    headers: str = ""
    ready: dict[str, bytes] = field(default_factory=dict)
    reached: threading.Event = field(default_factory=threading.Event)
    #: bytes of interim responses that were taken
    interim: int = 0
    _waiting: list[socket.socket] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        backlog = 0 if self.phase == "accept" else 64
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        if self.phase == "accept":
            self._fill()
            self.reached.set()
        else:
            threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _fill(self) -> None:
        """Take the places of a queue that nobody is taken from."""
        for _ in range(4):
            line = socket.socket()
            line.setblocking(False)
            line.connect_ex(self._listening.getsockname())
            self._waiting.append(line)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for line in (self._listening, *self._waiting):
            line.close()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            while not self._over.is_set():
                if select.select([self._listening], [], [], 0.1)[0]:
                    line, _ = self._listening.accept()
                    threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with line, contextlib.suppress(OSError), line.makefile("rb") as asked:
            while request := _head(asked):
                for pattern, answer in self.ready.items():
                    if re.match(pattern, request):
                        asked.read(_length(request))
                        line.sendall(answer)
                        break
                else:
                    self._misbehave(line, asked, request)

    def _misbehave(self, line: socket.socket, asked: object, request: str) -> None:
        self.reached.set()
        if self.phase in ("answer", "upload"):
            self._over.wait()
            return
        if self.phase == "interim":
            while self.interim < ENOUGH and not self._over.is_set():
                line.sendall(_INTERIM * 1000)
                self.interim += len(_INTERIM) * 1000
            return
        status = "404 Not Found" if self.phase == "error" else "200 OK"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(self.body)}\r\n{self.headers}\r\n"
        whole = head.encode() + (b"" if request.startswith("HEAD ") else self.body)
        at = 0 if self.phase == "headers" else len(head)
        line.sendall(whole[:at])
        size = PIECE if self.phase == "steady" else 1
        while at < len(whole) and not self._over.wait(DROP * size**0.25):
            line.sendall(whole[at : at + size])
            at += size


def _head(asked: object) -> str:
    lines: list[str] = []
    while line := asked.readline():  # type: ignore[attr-defined]
        if line == b"\r\n":
            return "".join(lines)
        lines.append(line.decode("latin-1"))
    return ""


def _length(request: str) -> int:
    found = re.search(r"(?im)^content-length: (\d+)", request)
    return int(found[1]) if found else 0
