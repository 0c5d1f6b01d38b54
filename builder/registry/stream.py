"""Blob streams that check their digest and resume after a broken connection."""

from __future__ import annotations

import hashlib
import io
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from builder.errors import RemoteError
from builder.net.failures import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.registry.model import Descriptor

#: Largest size of one read.
_BUFFER = 256 << 10


class Part(Protocol):
    """The bytes of a blob from an offset."""

    def read(self, size: int, /) -> bytes:
        """Some bytes, ``b""`` at the end; ``RequestFailed`` when the connection broke."""

    def close(self) -> None:
        """Close the response."""


class _Verified(io.RawIOBase):
    """Reads a blob once.  The last bytes are returned only if size and digest match."""

    def __init__(
        self,
        blob: Descriptor,
        where: str,
        open_at: Callable[[int], Part],
        lost: Callable[[RequestFailed], None],
        moved: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._blob, self._where = blob, where
        self._open_at, self._lost, self._moved = open_at, lost, moved
        self._part: Part | None = None
        self._sha = hashlib.sha256()
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._blob.size - self._position
        data = self._next(min(len(buffer), left)) if left else b""
        self._sha.update(data)
        self._position += len(data)
        if self._position == self._blob.size:
            self._check()
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int) -> bytes:
        while True:
            try:
                if self._part is None:
                    self._part = self._open_at(self._position)
                data = self._part.read(size)
                if not data:
                    raise RequestFailed(
                        f"connection cut after {self._position} of {self._blob.size} bytes"
                    )
            except RequestFailed as lost:
                self._drop()
                self._lost(lost)
                continue
            self._moved(len(data))
            return data

    def _check(self) -> None:
        """At the end: check that nothing follows and that the digest matches."""
        if self._part is not None and self._more():
            raise RemoteError(f"{self._where}: {self._blob.digest} is longer than expected")
        digest = f"sha256:{self._sha.hexdigest()}"
        if digest != self._blob.digest:
            raise RemoteError(
                f"{self._where}: the data received for {self._blob.digest} is {digest}",
                hint="do not use it; it was damaged in the registry or on the way",
            )

    def _more(self) -> bool:
        try:
            return self._part is not None and bool(self._part.read(1))
        except RequestFailed:
            return False  # all of it was here before

    def _drop(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None

    def close(self) -> None:
        self._drop()
        super().close()


def verified(
    blob: Descriptor,
    where: str,
    open_at: Callable[[int], Part],
    *,
    lost: Callable[[RequestFailed], None],
    moved: Callable[[int], None],
) -> IO[bytes]:
    """A blob as a stream that raises if its content does not match.

    ``open_at`` gives the bytes from an offset; after a broken connection it is called again with
    the offset that was reached, unless ``lost`` raises.  ``moved`` is called for every read.
     Reading raises a RemoteError when size or digest are wrong.
    """
    raw = _Verified(blob, where, open_at, lost, moved)
    return cast("IO[bytes]", io.BufferedReader(raw, _BUFFER))
