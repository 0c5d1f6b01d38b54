"""Decompresses a layer blob (gzip, zstd or none, by content), with limits."""

from __future__ import annotations

import hashlib
import sys
import zlib
from typing import Protocol

from builder.errors import RemoteError
from builder.rootfs import limits

#: Packed bytes read at a time, and unpacked bytes given at a time.
_READ, _GIVE = 64 << 10, 256 << 10
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


class Readable(Protocol):
    """What is needed of a blob's stream."""

    def read(self, size: int, /) -> bytes: ...


class _Codec(Protocol):
    """One gzip member or zstd frame; as ``bz2.BZ2Decompressor``."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


class _GzipMember:
    """``zlib``'s decompressor in the form that the others have."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _zstd_frame() -> _Codec:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: limits.ZSTD_WINDOW_LOG}
    frame: _Codec = zstd.ZstdDecompressor(options=options)
    return frame


def _is_zstd(head: bytes) -> bool:
    """A zstd frame, or a skippable one (RFC 8878, section 3.1.2)."""
    return head[:4] == _ZSTD or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F)


class Unpacked:
    """A readable stream of unpacked bytes, bounded in total and in ratio to what was read."""

    def __init__(self, source: Readable, where: str, *, hashed: bool = False) -> None:
        self._source, self._where = source, where
        self._sha = hashlib.sha256() if hashed else None
        self._packed = self._produced = 0
        self._pending = self._fill()
        self._out = memoryview(b"")
        self._codec: _Codec | None = None
        head = self._pending[:4].ljust(4, b"\0")
        self._make = _GzipMember if head[:2] == _GZIP else _zstd_frame if _is_zstd(head) else None

    def _fill(self) -> bytes:
        data = self._source.read(_READ)
        self._packed += len(data)
        return data

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes, fewer at the end only.

        Raises:
            RemoteError: the data is damaged, is cut short, or unpacks to more than is allowed.
        """
        if len(self._out) >= size:
            data, self._out = bytes(self._out[:size]), self._out[size:]
            return data
        parts = [bytes(self._out)]
        missing = size - len(self._out)
        self._out = memoryview(b"")
        while missing:
            block = self._block()
            if not block:
                break
            parts.append(block[:missing])
            self._out = memoryview(block)[missing:]
            missing -= min(missing, len(block))
        return b"".join(parts)

    def skip(self, size: int) -> bool:
        """Pass over bytes; false when the stream ends before."""
        while size > 0:
            taken = min(size, len(self._out))
            self._out, size = self._out[taken:], size - taken
            if size and not self._out:
                self._out = memoryview(self._block())
                if not self._out:
                    return False
        return True

    def finish(self) -> str:
        """Unpack the rest, as runtimes do; the digest of all that was unpacked, if it is hashed.

        Raises:
            RemoteError: the rest is damaged, or the blob is not what its digest says.
        """
        self._out = memoryview(b"")
        while self._block():
            pass
        return "" if self._sha is None else f"sha256:{self._sha.hexdigest()}"

    def _block(self) -> bytes:
        """The next unpacked bytes; empty at the end."""
        if self._make is None:
            block, self._pending = self._pending or self._fill(), b""
        else:
            block = self._unpack()
        if self._sha is not None:
            self._sha.update(block)
        self._produced += len(block)
        allowed = limits.FREE_BYTES + limits.RATIO * self._packed
        if self._produced > min(allowed, limits.TAR_BYTES):
            raise RemoteError(
                f"{self._where}: {self._packed} bytes unpack to more than {self._produced}; the "
                f"layer is refused"
            )
        return block

    def _unpack(self) -> bytes:
        assert self._make is not None
        while True:
            if self._codec is None and not self._next_member():
                return b""
            codec = self._codec
            assert codec is not None
            if codec.needs_input and not self._pending:
                self._pending = self._fill()
            starved = codec.needs_input and not self._pending
            block = self._decompress(codec, self._pending)
            self._pending = b""
            if codec.eof:
                self._pending, self._codec = codec.unused_data or b"", None
            if block:
                return block
            if starved and self._codec is not None:
                raise RemoteError(f"{self._where}: the compressed data ends too early")

    def _next_member(self) -> bool:
        """Begin the next gzip member or zstd frame.  Runtimes take nothing else, zeros neither."""
        self._pending = self._pending or self._fill()
        if not self._pending:
            return False
        assert self._make is not None
        self._codec = self._make()
        return True

    def _decompress(self, codec: _Codec, data: bytes) -> bytes:
        try:
            return codec.decompress(data, _GIVE)
        except MemoryError:
            raise
        except Exception as error:  # zlib.error, or the zstd library's own
            raise RemoteError(f"{self._where}: the compressed data is damaged: {error}") from None
