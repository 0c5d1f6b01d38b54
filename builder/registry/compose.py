"""Reads an image whose base layers are in another place."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from builder.registry.layout import LayoutDirectory
    from builder.registry.model import Descriptor, ImageSource, RawManifest


class FallbackSource:
    """Reads from a layout, and what the layout lacks from the base's location."""

    def __init__(self, own: LayoutDirectory, base: ImageSource) -> None:
        self.own, self.base = own, base
        self.name = base.name

    def manifest(self, reference: str) -> RawManifest:
        """The manifest of a digest.

        Raises:
            RemoteError: neither location has it.
        """
        return (self.own if self.own.has(reference) else self.base).manifest(reference)

    def open(self, blob: Descriptor) -> AbstractContextManager[IO[bytes]]:
        """A blob as a stream; see ``ImageSource.open``."""
        return self.origin(blob).open(blob)

    def gives(self, blob: Descriptor) -> bool:
        """Whether a blob can be read from its location."""
        return self.origin(blob).gives(blob)

    def origin(self, blob: Descriptor) -> ImageSource:
        """The location of a blob, so that its registry can mount it."""
        return self.own if self.own.has(blob.digest) else self.base
