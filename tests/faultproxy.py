"""A proxy in front of a registry that does, on command, what networks and registries do to people.

    with FaultProxy(registry.address) as proxy:
        proxy.faults = {3: Fault.CUT_AFTER}      # the fourth request
        ...
        proxy.log                                 # what was asked, and what happened to it

It speaks HTTP/1.1 with Content-Length, which is what our client sends.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from http.client import HTTPMessage, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Fault(Enum):
    """What happens to one request."""

    CUT_BEFORE = auto()
    CUT_REQUEST = auto()  # half of the request's body arrives
    CUT_AFTER = auto()  # the registry does it, and its answer is lost
    CUT_ANSWER = auto()  # half of the answer's body arrives
    STALL = auto()  # nothing happens for longer than anybody waits
    SLOW = auto()
    BUSY = auto()  # 429
    BUSY_FOR_A_SECOND = auto()  # 429 and Retry-After: 1
    BUSY_FOR_LONG = auto()  # 429 and Retry-After: 100
    ERROR_500 = auto()
    ERROR_502 = auto()
    WRONG_BYTES = auto()  # one bit of the answer's body is another
    WRONG_BYTES_SENT = auto()  # one bit of the request's body is another
    TRUNCATED = auto()  # the answer's body is shorter, and says so
    EXPIRED = auto()  # the request carries a token that has expired


_STATUS = {
    Fault.BUSY: (429, {}),
    Fault.BUSY_FOR_A_SECOND: (429, {"Retry-After": "1"}),
    Fault.BUSY_FOR_LONG: (429, {"Retry-After": "100"}),
    Fault.ERROR_500: (500, {}),
    Fault.ERROR_502: (502, {}),
}


class Always(dict[int, Fault]):
    """The same fault for every request from one on."""

    def __init__(self, fault: Fault, *, since: int = 0) -> None:
        super().__init__()
        self._fault, self._since = fault, since

    def get(self, number: int, _default: object = None) -> Fault | None:  # type: ignore[override]
        return self._fault if number >= self._since else None


@dataclass(frozen=True)
class Seen:
    """One request, and the answer's status (0: none)."""

    method: str
    path: str
    status: int
    fault: Fault | None
    #: the header ``Range``, where a part was asked for
    part: str = ""


@dataclass
class FaultProxy(LoopbackServer):
    """Listens on a port of its own; ``address`` takes the place of the registry's."""

    upstream: str
    faults: Mapping[int, Fault] = field(default_factory=dict)
    mounts: bool = True
    #: what happens to requests whose number has no fault, by method and path
    by_path: Callable[[str, str], Fault | None] = lambda _method, _path: None
    expired_token: str = "none"
    stall: float = 1.5
    slow: float = 0.3
    log: list[Seen] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.listen(_Handler)

    def reset(self, faults: Mapping[int, Fault] | None = None) -> None:
        """Count requests from 0 again, with these faults and an empty log."""
        with self._lock:
            self.faults = {} if faults is None else faults
            self._count, self.log = 0, []

    def next_fault(self, method: str, path: str) -> Fault | None:
        """The fault of the request that has just come."""
        with self._lock:
            number = self._count
            self._count += 1
            fault = self.faults.get(number)
        return fault or self.by_path(method, path)


class _Handler(LoopbackHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy
    _fault: Fault | None = None

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client has gone
            self.close_connection = True

    def _any(self) -> None:
        self._fault = self.owner.next_fault(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._do(self._fault, body)

    def _note(self, status: int) -> None:
        """Before the client can know, so that a test that has its answer finds it in the log."""
        with self.owner._lock:
            part = self.headers.get("Range", "")
            self.owner.log.append(Seen(self.command, self.path, status, self._fault, part))

    def do_GET(self) -> None:
        self._any()

    def do_HEAD(self) -> None:
        self._any()

    def do_POST(self) -> None:
        self._any()

    def do_PUT(self) -> None:
        self._any()

    def do_PATCH(self) -> None:
        self._any()

    def do_DELETE(self) -> None:
        self._any()

    def _do(self, fault: Fault | None, body: bytes) -> None:
        if fault in (Fault.CUT_BEFORE, Fault.STALL):
            self._note(0)
            if fault is Fault.STALL:
                time.sleep(self.owner.stall)
            self._shut()
            return
        if fault in _STATUS:
            status, headers = _STATUS[fault]
            self._answer(status, headers, b"")
            return
        if fault is Fault.SLOW:
            time.sleep(self.owner.slow)
        if fault is Fault.WRONG_BYTES_SENT:
            body = _wrong(body)
        if fault is Fault.EXPIRED:
            self.headers.replace_header("Authorization", f"Bearer {self.owner.expired_token}")
        with socket.create_connection(self._upstream(), timeout=30) as upstream:
            half = fault is Fault.CUT_REQUEST
            upstream.sendall(self._head(len(body)) + (body[: len(body) // 2] if half else body))
            if half:
                time.sleep(0.02)  # let the registry read it before it notices the cut
                self._cut()
                return
            answer = HTTPResponse(upstream, method=self.command)
            answer.begin()
            self._pass_on(fault, answer)

    def _pass_on(self, fault: Fault | None, answer: HTTPResponse) -> None:
        data = answer.read()
        if fault is Fault.CUT_AFTER:
            self._cut()
            return
        if fault is Fault.WRONG_BYTES:
            data = _wrong(data)
        if fault is Fault.TRUNCATED:
            data = data[: len(data) // 2]
        headers = _end_to_end(answer.headers)
        if self.command == "HEAD" or answer.status == 204:
            self._answer(answer.status, headers, b"", length=None)
            return
        headers.pop("Content-Length", None)
        half = data[: len(data) // 2] if fault is Fault.CUT_ANSWER else data
        self._answer(answer.status, headers, half, length=len(data))
        if fault is Fault.CUT_ANSWER:
            self._shut()

    def _upstream(self) -> tuple[str, int]:
        host, _, port = self.owner.upstream.partition(":")
        return host, int(port)

    def _head(self, length: int) -> bytes:
        path = self.path if self.owner.mounts else _without_mount(self.path)
        lines = [f"{self.command} {path} HTTP/1.1"]
        lines += [
            f"{name}: {value}"
            for name, value in self.headers.items()
            if name.lower() not in ("connection", "content-length")
        ]
        lines += [f"Content-Length: {length}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def _answer(
        self, status: int, headers: Mapping[str, str], body: bytes, length: int | None = 0
    ) -> None:
        self._note(status)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _cut(self) -> None:
        self._note(0)
        self._shut()

    def _shut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _end_to_end(headers: HTTPMessage) -> dict[str, str]:
    hop = ("connection", "transfer-encoding", "keep-alive")
    return {name: value for name, value in headers.items() if name.lower() not in hop}


def _wrong(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def _without_mount(path: str) -> str:
    """As a registry does that knows nothing of mounts: it starts an upload."""
    parts = urlsplit(path)
    query = [(k, v) for k, v in parse_qsl(parts.query) if k not in ("mount", "from")]
    return urlunsplit(parts._replace(query=urlencode(query)))
