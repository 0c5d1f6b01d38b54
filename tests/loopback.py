"""What the HTTP servers of the tests have in common: a port on the loopback interface."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


class Server(ThreadingHTTPServer):
    """A server whose clients may hang up."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a bug of a test's, not a client that is gone: its command may share our stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LoopbackServer:
    """Listens from :meth:`listen` on, and answers for as long as a ``with`` block lasts."""

    _server: Server

    def listen(self, handler: type[LoopbackHandler]) -> None:
        """Take a port; handlers find this server as their ``owner``."""
        owned = type("Handler", (handler,), {"owner": self})
        self._server = Server(("127.0.0.1", 0), owned)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """The address, as clients of plain http take it."""
        return f"http://{self.address}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class LoopbackHandler(BaseHTTPRequestHandler):
    """A handler that writes no log: tests read that of its owner."""

    owner: Any
    #: A body that is sent after its headers would wait 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, *_words: object) -> None:
        """Say nothing."""
