"""Messages for URLs without a response: host, reason and proxy."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from builder.errors import RemoteError


def host_of(url: str) -> str:
    """Host and port of a URL, without parts that may be secret; "" if it is not a URL."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return ""


def shown(url: str) -> str:
    """A URL without user, password and query; if it is not a URL, the beginning of its text."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return repr(url.rpartition("@")[2][:80])
    return parts._replace(netloc=host_of(url), query="", fragment="").geturl()


def resolved(url: str, location: str, subject: str) -> str:
    """The URL in a response from ``url``, relative or absolute.

    Raises:
        RemoteError: it is not a valid URL.
    """
    try:
        target = urljoin(url, location)
        _ = urlsplit(target).port
    except ValueError as error:
        raise RemoteError(
            f"{subject} names {location!r:.120}, which is not a valid address: {error}"
        ) from None
    return target


def through(url: str) -> str:
    """`` (proxy: HOST)`` if the environment sets a proxy for a URL, else ``""``."""
    from requests.utils import get_environ_proxies, select_proxy

    proxy = select_proxy(url, get_environ_proxies(url, no_proxy=None))
    return f" (proxy: {host_of(proxy) or proxy})" if proxy else ""


def no_answer(error: BaseException, url: str) -> str:
    """The error for a URL without a usable response."""
    from builder.common.net.failures import reason_of

    if isinstance(error, RemoteError):  # the tries are used up, and it names the host
        return str(error)

    host = host_of(url)
    return f"{host}: {reason_of(error, host)}{through(url)}"
