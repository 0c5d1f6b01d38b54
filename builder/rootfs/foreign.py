"""Reads foreign layers from the addresses in the manifest.

Like container runtimes, only if the registry does not have the blob.  The content is checked
against the digest in the manifest.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from builder.errors import RemoteError
from builder.registry.reference import is_loopback
from builder.registry.responses import read_block
from builder.registry.stream import verified

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

    from builder.net.failures import RequestFailed
    from builder.registry.model import Descriptor, ImageSource


@contextlib.contextmanager
def open_layer(source: ImageSource, layer: Descriptor) -> Iterator[IO[bytes]]:
    """A layer as a stream, from its source or, for a missing foreign layer, from its URLs.

    Raises:
        RemoteError: it is not available anywhere.
    """
    has = getattr(source, "has", None)
    if not layer.foreign or has is None or has(layer.digest):
        with source.open(layer) as stream:
            yield stream
        return
    with contextlib.closing(_from_addresses(source, layer)) as stream:
        yield stream


def _from_addresses(source: ImageSource, layer: Descriptor) -> IO[bytes]:
    reasons = []
    for url in layer.urls:
        place = urlsplit(url).netloc
        if not _allowed(url):
            reasons.append(f"{place} is not https")
            continue
        try:
            body = _get(url)
        except OSError as error:  # what requests raises
            reasons.append(f"{place}: {error.__class__.__name__}")
            continue
        return verified(layer, place, partial(_part, body), lost=_give_up, moved=_ignore)
    told = "; ".join(reasons) or "its manifest lists no URL"
    raise RemoteError(
        f"{source.name}: layer {layer.digest[:19]} (a foreign layer) is not in the registry and "
        f"could not be fetched: {told}",
        hint="copy the blob into the registry or layout",
    )


def _allowed(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.netloc))


def _get(url: str) -> requests.Response:
    import requests

    from builder.net.session import FixedAuthorization, Session

    response = Session().get(url, auth=FixedAuthorization(None), stream=True)
    if not all(_allowed(step.url) for step in (*response.history, response)):
        response.close()
        raise requests.exceptions.InvalidURL
    response.raise_for_status()
    return response


def _part(response: requests.Response, _offset: int) -> _Part:
    return _Part(response)


class _Part:
    """The body of a response."""

    def __init__(self, response: requests.Response) -> None:
        self._response = response

    def read(self, size: int, /) -> bytes:
        return read_block(self._response, size)

    def close(self) -> None:
        self._response.close()


def _give_up(lost: RequestFailed) -> None:
    raise RemoteError(f"a foreign layer could not be read: {lost}")


def _ignore(_count: int) -> None: ...
