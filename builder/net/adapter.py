"""The adapter that makes ``requests`` use sockets with time limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from builder.net.sockets import (
    CONNECT,
    WINDOW,
    MinimumSpeed,
    TlsSocket,
    connect,
    exchange,
    minimum_speed,
)

if TYPE_CHECKING:
    import socket

    from requests import PreparedRequest, Response

#: Connections per host: parallel transfers and a few small requests.
CONNECTIONS = 8


class _Plain(HTTPConnection):
    """A connection whose sockets use the limits of the current exchange."""

    _paces: list[MinimumSpeed]

    def _new_conn(self) -> socket.socket:
        timeout = self.timeout if isinstance(self.timeout, int | float) else CONNECT
        options = self.socket_options or ()
        try:
            opened = connect(self.host, self.port, timeout, options)
        except TimeoutError as error:
            raise ConnectTimeoutError(self, f"no connection in {timeout:g} s") from error
        except OSError as error:
            if type(error).__name__ == "gaierror":
                raise NameResolutionError(self.host, self, error) from error  # type: ignore[arg-type]
            raise NewConnectionError(self, f"no connection: {error}") from error
        self._paces = opened.paces
        return opened

    def request(self, *words: Any, **named: Any) -> None:
        if self.sock is not None:  # from an earlier exchange, or with TLS by now
            self._paces[0] = minimum_speed()
        super().request(*words, **named)


class _Tls(_Plain, HTTPSConnection):
    """The same, with TLS."""

    def connect(self) -> None:
        super().connect()
        if isinstance(self.sock, TlsSocket):
            self.sock.paces = self._paces


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _Tls


_POOLS = {"http": _PlainPool, "https": _TlsPool}


class Adapter(HTTPAdapter):
    """The connections of a session; one ``send`` is one exchange and one attempt."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        super().__init__(2, CONNECTIONS)

    def init_poolmanager(self, *words: Any, **named: Any) -> None:
        """Use our connections in every pool."""
        super().init_poolmanager(*words, **named)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **named: Any) -> Any:
        """The same for a proxy."""
        manager = super().proxy_manager_for(proxy, **named)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Send within the limits; ``timeout`` is a pair: connect timeout and window."""
        window = timeout or self._window
        limits = timeout if isinstance(timeout, tuple) else (min(CONNECT, window), window)
        with exchange(limits[1]):
            return super().send(request, stream, limits, verify, cert, proxies)
