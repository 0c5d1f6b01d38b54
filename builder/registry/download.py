"""Downloads blobs from a registry, from any offset."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.net.failures import RequestFailed
from builder.registry.responses import drain, number, read_block

if TYPE_CHECKING:
    from requests import Response

    from builder.net.retry import Retries
    from builder.registry.access import RepositoryAccess
    from builder.registry.model import Descriptor
    from builder.registry.transport import Transport

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]+/([0-9]+|\*)")


class Body:
    """The body of a response, with its bytes counted."""

    def __init__(self, response: Response, transport: Transport, retries: Retries) -> None:
        self._response, self._transport, self._retries = response, transport, retries

    def read(self, size: int) -> bytes:
        """Some bytes, ``b""`` at the end; ``RequestFailed`` when the connection broke."""
        self._retries.time_left()  # a server that drips must not hold us for ever
        data = read_block(self._response, size)
        self._transport.traffic.add(received=len(data))
        return data

    def skip(self, count: int) -> None:
        """Read and discard."""
        while count:
            data = self.read(min(count, 1 << 20))
            if not data:
                raise RequestFailed("connection cut")
            count -= len(data)

    def close(self) -> None:
        """Close the response."""
        self._response.close()


def body_from(
    repository: RepositoryAccess, blob: Descriptor, offset: int, retries: Retries
) -> Body:
    """A blob from an offset; if the registry ignores ranges, the first bytes are skipped.

    Raises:
        RequestFailed: the connection broke.
        RemoteError: the registry does not have it, or has it with another size.
    """
    response = _get(repository, blob, offset, retries)
    if response.status_code == 416:
        drain(response)
        response = _get(repository, blob, 0, retries)
    body = Body(response, repository.transport, retries)
    try:
        whole = response.status_code == 200
        _check(response, repository.name, blob, 0 if whole else offset)
        if whole:
            body.skip(offset)
    except BaseException:
        body.close()
        raise
    return body


def gives(repository: RepositoryAccess, blob: Descriptor) -> bool:
    """Request the last byte; if the registry ignores ranges, read one byte of the whole."""
    last = max(blob.size - 1, 0)
    retries = repository.transport.retries(f"blob {blob.digest}", small=True)
    while True:
        response = repository.transport.request(
            "GET",
            repository.url(f"blobs/{blob.digest}"),
            f"blob {blob.digest}",
            expect=frozenset({200, 206, 404, 416}),
            headers={"Range": f"bytes={last}-{last}"},
            permit=repository.reading,
            retries=retries,
        )
        try:
            if response.status_code == 416:
                return not blob.size
            if response.status_code == 404:
                return False
            _check(response, repository.name, blob, last if response.status_code == 206 else 0)
            return not blob.size or len(read_block(response, 1)) == 1
        except RequestFailed as error:
            retries.lost(error)
        except RemoteError:  # other bytes, or another size
            return False
        finally:
            response.close()


def _get(repository: RepositoryAccess, blob: Descriptor, offset: int, retries: Retries) -> Response:
    """Request a range with both ends, because some registries reject open ranges."""
    return repository.transport.request(
        "GET",
        repository.url(f"blobs/{blob.digest}"),
        f"blob {blob.digest}",
        expect=frozenset({200, 206, 416} if offset else {200}),
        headers={"Range": f"bytes={offset}-{blob.size - 1}"} if offset else None,
        permit=repository.reading,
        retries=retries,
    )


def _check(response: Response, name: str, blob: Descriptor, offset: int) -> None:
    start, total = 0, response.headers.get("Content-Length", "")
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, total = (int(match[1]), match[2]) if match else (-1, "")
    if start != offset:
        raise RemoteError(f"{name}: asked for {blob.digest} from byte {offset} on, got other bytes")
    if (size := number(total)) not in (None, blob.size):
        raise RemoteError(f"{name}: {blob.digest} should have {blob.size} bytes and has {size}")
