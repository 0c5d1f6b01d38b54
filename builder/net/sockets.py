"""Connections with time limits, which are closed when the run ends.

``requests`` and urllib3 limit one read, not an exchange: a server that sends a byte a second is
read for ever.  So the sockets themselves keep the time.  An exchange must move ``STEP`` bytes in
each window of seconds, both directions and all phases counted: small ones are over within one
window, and large ones never crawl.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from builder.errors import RemoteError
from builder.util.shutdown import ended, when_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Seconds to connect, and those of a window, where the caller does not say.
CONNECT, WINDOW = 15.0, 60.0
#: Bytes that each window must move: about 1 kB/s, where curl's documentation suggests a limit, too.
STEP = 64 << 10
#: Bytes that are handed to a socket at once, so that progress is seen while sending.
_PIECE = 64 << 10
#: Seconds between two looks whether the run has been ended, while a name is looked up.
_LOOK = 0.05

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.RLock()  # a signal may come while its own thread holds it
_here = threading.local()


class TooSlow(TimeoutError):
    """An exchange moved less than ``STEP`` bytes in a window, and was not over."""


def _cut() -> None:
    """Cut every connection: the run is ended from outside."""
    with _lock:
        for opened in list(_open):
            # not SSLSocket.shutdown, which takes the TLS state from under a thread that reads
            try:
                socket.socket.shutdown(opened, socket.SHUT_RDWR)
            except OSError:  # not connected
                continue


when_ended(_cut)


def check() -> None:
    """Go on, unless the run has been ended.

    Raises:
        RemoteError: it has.
    """
    if ended.is_set():
        raise RemoteError("interrupted")


def pause(seconds: float) -> None:
    """Sleep, but not longer than the run lasts."""
    ended.wait(seconds)
    check()


class MinimumSpeed:
    """How fast an exchange has to be."""

    def __init__(self, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._until = clock() + window
        self._moved = 0

    @property
    def over(self) -> bool:
        """Whether too little has moved."""
        return self._clock() >= self._until

    def left(self) -> float:
        """Seconds until more must have moved.

        Raises:
            TooSlow: they are over.
            RemoteError: the run has been ended.
        """
        check()
        if self.over:
            raise TooSlow(f"only {self._moved} bytes in {self._window:g} s")
        return max(self._until - self._clock(), 0.001)  # 0 would mean not to wait at all

    def moved(self, count: int) -> None:
        """Bytes were sent or received."""
        self._moved += count
        if self._moved >= STEP:
            self._moved = 0
            self._until = self._clock() + self._window


@contextmanager
def exchange(window: float) -> Iterator[None]:
    """What this thread's connections do in the block is one exchange."""
    _here.pace = MinimumSpeed(window)
    try:
        yield
    finally:
        del _here.pace


def minimum_speed() -> MinimumSpeed:
    """The pace of the exchange that this thread is in."""
    found = getattr(_here, "pace", None)
    return found if isinstance(found, MinimumSpeed) else MinimumSpeed(WINDOW)


class _Paced(socket.socket):
    """A socket that takes its limit on time from the exchange that uses it."""

    #: one item, which a connection shares with the sockets that it is made of
    paces: list[MinimumSpeed]

    def recv_into(self, *words: Any, **named: Any) -> int:
        now = self.paces[0]
        self.settimeout(now.left())
        count = super().recv_into(*words, **named)
        check()
        now.moved(count)
        return count

    def recv(self, *words: Any, **named: Any) -> bytes:
        now = self.paces[0]
        self.settimeout(now.left())
        data = super().recv(*words, **named)
        check()
        now.moved(len(data))
        return data

    def sendall(self, data: Any, flags: int = 0) -> None:
        with memoryview(data) as given, given.cast("B") as left:
            at = 0
            while at < len(left):
                now = self.paces[0]
                self.settimeout(now.left())
                count = self.send(left[at : at + _PIECE], flags)
                now.moved(count)
                at += count


class PlainSocket(_Paced):
    """A TCP connection."""


class TlsSocket(_Paced, ssl.SSLSocket):
    """A TLS connection; ``SSLContext.sslsocket_class`` makes contexts use it."""

    def do_handshake(self, block: bool = False) -> None:
        """Greet; OpenSSL's part of it has one limit on its whole time."""
        close_at_exit(self)
        self.paces = [minimum_speed()]
        super().do_handshake(block)


def close_at_exit(opened: socket.socket) -> None:
    """Have a socket cut when the run ends."""
    with _lock:
        _open.add(opened)


def connect(
    host: str, port: int, timeout: float, options: Iterable[tuple[int, int, int | bytes]] = ()
) -> PlainSocket:
    """A connection to the first of a host's addresses that takes one.

    Raises:
        OSError: none does in time, or there is no such host.
        RemoteError: the run has been ended.
    """
    until = time.monotonic() + timeout
    failed: OSError = TimeoutError("timed out")
    for family, kind, protocol, where in _addresses(host.strip("[]"), port, timeout):
        opened = PlainSocket(family, kind, protocol)
        close_at_exit(opened)
        opened.paces = [minimum_speed()]
        try:
            for option in options:
                opened.setsockopt(*option)
            check()
            opened.settimeout(max(until - time.monotonic(), 0.001))
            opened.connect(where)
            check()
        except OSError as error:
            opened.close()
            check()
            failed = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failed


_Address = tuple[int, int, int, Any]


def _addresses(host: str, port: int, timeout: float) -> list[_Address]:
    """Looked up in a thread of its own: no signal and no time limit ends the system's resolver."""
    answers: queue.SimpleQueue[list[_Address] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([(*row[:3], row[4]) for row in found])
        except OSError as error:
            answers.put(error)
        except UnicodeError:  # a label that is empty or too long
            answers.put(socket.gaierror(socket.EAI_NONAME, "no such name"))

    threading.Thread(target=ask, daemon=True).start()
    until = time.monotonic() + timeout
    while True:
        check()
        try:
            answer = answers.get(timeout=_LOOK)
        except queue.Empty:
            if time.monotonic() > until:
                raise TimeoutError("the name lookup timed out") from None
            continue
        if isinstance(answer, OSError):
            raise answer
        return answer
