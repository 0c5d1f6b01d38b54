"""Checks which blobs of an image exist."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.net.adapter import CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.registry.model import Descriptor, ImageSource


def missing_blobs(source: ImageSource, blobs: Iterable[Descriptor]) -> list[Descriptor]:
    """Blobs that cannot be read; several are checked in parallel.

    Nondistributable layers are not expected.

    Raises:
        RemoteError: the registry does not answer.
    """
    asked = [blob for blob in blobs if not blob.foreign]
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ask") as pool:
        there = list(pool.map(source.gives, asked))
    return [blob for blob, found in zip(asked, there, strict=True) if not found]


def refuse_missing(source: ImageSource, blobs: Iterable[Descriptor], hint: str) -> None:
    """Raise an error that names the missing blobs.

    Raises:
        RemoteError: a blob cannot be read.
    """
    if gone := missing_blobs(source, blobs):
        rows = "".join(f"\n  {blob.digest} ({blob.size} bytes)" for blob in gone)
        raise RemoteError(f"{source.name} lacks blobs that its manifest lists:{rows}", hint=hint)
