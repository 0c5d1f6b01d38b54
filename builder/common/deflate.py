"""Deflate (RFC 1951): ISA-L where there is a wheel of it for this machine, else zlib.

ISA-L takes half of zlib's processor time to unpack, and a quarter of it to pack at level 1.  What
it packs are other bytes than zlib's, so nothing that has a digest is packed here.
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any


def _library() -> Any:
    """The module, with the interface of ``zlib``."""
    try:
        return importlib.import_module("isal.isal_zlib")
    except ImportError:
        return zlib


class Inflater:
    """Unpacks a stream; ``wbits`` as for ``zlib``: 16 + 15 is one gzip member, -15 raw deflate."""

    def __init__(self, wbits: int) -> None:
        library = _library()
        self._inner, self._error = library.decompressobj(wbits), library.error
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """At most ``max_length`` bytes; with ``needs_input`` False there are more without data.

        Raises:
            zlib.error: the stream is damaged.
        """
        try:
            out: bytes = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        except self._error as error:
            raise zlib.error(str(error)) from None
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out

    @property
    def eof(self) -> bool:
        """Whether the end of the stream was reached."""
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        """What came after the end of the stream."""
        return bytes(self._inner.unused_data)


def pack(data: bytes) -> bytes:
    """Packed for a cache, fast."""
    return bytes(_library().compress(data, 1))


def unpack(data: bytes) -> bytes:
    """What `pack` packed, on any machine.

    Raises:
        zlib.error: the data is damaged.
    """
    library = _library()
    try:
        return bytes(library.decompress(data))
    except library.error as error:
        raise zlib.error(str(error)) from None
