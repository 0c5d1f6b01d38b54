"""Trusted certificate authorities: the system's, the environment's, and a registry's own.

As with Docker and Podman, ``certs.d/HOST/`` below ``/etc/docker`` or ``/etc/containers`` may have
``*.crt`` (authorities for that host only) and ``NAME.cert`` with ``NAME.key`` (a client
certificate). ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the system's store, as everywhere with
OpenSSL; ``REQUESTS_CA_BUNDLE`` and ``CURL_CA_BUNDLE`` add to it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from requests.utils import DEFAULT_CA_BUNDLE_PATH

from builder.errors import UsageError
from builder.net.adapter import Adapter
from builder.net.sockets import TlsSocket, connect

_ADDED = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_FILES = ("SSL_CERT_FILE", *_ADDED)
#: Timeout in seconds for a local server's TLS handshake.
_GREETING_TIMEOUT = 5.0


def certificate_folders(host: str) -> list[Path]:
    """Folders that may have certificates for ``HOST[:PORT]``."""
    roots = [Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d")]
    config = os.environ.get("DOCKER_CONFIG")
    if config:  # where a Docker without root looks
        roots.insert(0, Path(config) / "certs.d")
    return [root / host for root in roots]


def trust(host: str) -> ssl.SSLContext:
    """The TLS settings for one host.

    Raises:
        UsageError: a certificate file of that host, or one that the environment names, cannot
            be used.
    """
    named = {name: Path(os.environ[name]) for name in _FILES if os.environ.get(name)}
    for name, path in named.items():
        if not path.exists():
            raise UsageError(f"{name} names {path}, which does not exist")
    context = ssl.create_default_context()
    context.sslsocket_class = TlsSocket
    for path in {named[name] for name in _ADDED if name in named}:
        context.load_verify_locations(**{"capath" if path.is_dir() else "cafile": str(path)})
    if not context.cert_store_stats()["x509_ca"]:  # a system without a store of its own
        context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    for folder in certificate_folders(host):
        try:
            files = sorted(folder.iterdir())
        except OSError:
            continue
        for path in files:
            _add(context, path)
    return context


def _add(context: ssl.SSLContext, path: Path) -> None:
    try:
        if path.suffix == ".crt":
            context.load_verify_locations(path)
        elif path.suffix == ".cert":
            context.load_cert_chain(path, path.with_suffix(".key"))
    except (OSError, ssl.SSLError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not PEM"
        raise UsageError(f"{path} cannot be used as a certificate: {why}") from None


def speaks_tls(host: str) -> bool:
    """Whether a server on this machine supports TLS; sends only a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslsocket_class = TlsSocket
    parts = urlsplit(f"https://{host}")
    try:
        plain = connect(parts.hostname or "", parts.port or 443, _GREETING_TIMEOUT)
        with plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:  # one that wants to know first who we are says so in TLS
        return "_ALERT_" in (error.reason or "")
    except (OSError, ValueError):
        return False


class HostAdapter(Adapter):
    """Connections to one host, with its own trusted certificates."""

    def __init__(self, host: str, window: float) -> None:
        self._context = trust(host)
        super().__init__(window)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Use our TLS settings in every pool."""
        super().init_poolmanager(*args, ssl_context=self._context, **kwargs)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """The same for a proxy."""
        return super().proxy_manager_for(proxy, ssl_context=self._context, **kwargs)

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:  # noqa: ARG002
        """Does nothing: the settings already have all certificate authorities."""
        conn.cert_reqs = "CERT_REQUIRED"
        conn.ca_certs = conn.ca_cert_dir = None
