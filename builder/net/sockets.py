"""Connections with time limits, which are closed when the run ends.

``requests`` and urllib3 limit one read, not an exchange: a server that sends one byte per second
would be read forever.  So the sockets enforce a limit.  An exchange must transfer ``STEP`` bytes in
each window of seconds, counting both directions and all phases: small ones finish within one
window, and large ones keep a minimum speed.
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

#: Default seconds to connect, and of a window.
CONNECT, WINDOW = 15.0, 60.0
#: Bytes per window: about 1 kB/s, like the limit that curl's documentation suggests.
STEP = 64 << 10
#: Bytes per send, so that progress is visible while sending.
_PIECE = 64 << 10
#: Seconds between checks for the run's end during a name lookup.
_LOOK = 0.05

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.RLock()  # a signal may come while its own thread holds it
_here = threading.local()


class TooSlow(TimeoutError):
    """An exchange transferred less than ``STEP`` bytes in a window without finishing."""


def _cut() -> None:
    """Close every connection, because the run was ended."""
    with _lock:
        for opened in list(_open):
            # not SSLSocket.shutdown, which removes the TLS state while a thread reads
            try:
                socket.socket.shutdown(opened, socket.SHUT_RDWR)
            except OSError:  # not connected
                continue


when_ended(_cut)


def check() -> None:
    """Raise if the run was ended.

    Raises:
        RemoteError: it has.
    """
    if ended.is_set():
        raise RemoteError("interrupted")


def pause(seconds: float) -> None:
    """Sleep, at most until the run is ended."""
    ended.wait(seconds)
    check()


class MinimumSpeed:
    """The minimum speed of an exchange."""

    def __init__(self, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._until = clock() + window
        self._moved = 0

    @property
    def over(self) -> bool:
        """Whether too few bytes were transferred."""
        return self._clock() >= self._until

    def left(self) -> float:
        """Seconds left in the window.

        Raises:
            TooSlow: the window is over.
            RemoteError: the run was ended.
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
    """Treat everything that this thread's connections do in the block as one exchange."""
    _here.pace = MinimumSpeed(window)
    try:
        yield
    finally:
        del _here.pace


def minimum_speed() -> MinimumSpeed:
    """The minimum speed of this thread's current exchange."""
    found = getattr(_here, "pace", None)
    return found if isinstance(found, MinimumSpeed) else MinimumSpeed(WINDOW)


class _Paced(socket.socket):
    """A socket with the time limit of the current exchange."""

    #: one item, which a connection shares with its sockets
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
        """Do the TLS handshake, with one limit for its whole duration."""
        close_at_exit(self)
        self.paces = [minimum_speed()]
        super().do_handshake(block)


def close_at_exit(opened: socket.socket) -> None:
    """Close a socket when the run ends."""
    with _lock:
        _open.add(opened)


def connect(
    host: str, port: int, timeout: float, options: Iterable[tuple[int, int, int | bytes]] = ()
) -> PlainSocket:
    """Connect to the first reachable address of a host.

    Raises:
        OSError: none is reachable in time, or the host does not exist.
        RemoteError: the run was ended.
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
    """Look up addresses in a thread, because nothing interrupts the system's resolver."""
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
