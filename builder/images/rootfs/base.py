"""An identified base and its files, and an image that is open without a Docker Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.images.registry.model import blobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.applier.trees import Tree
    from builder.common.plan import BaseIdentity
    from builder.images.rootfs.image import Image
    from builder.images.rootfs.view import Rootfs


@dataclass(frozen=True)
class InLayers:
    """An open image in a registry or a layout: its files are read from its layers."""

    image: Image
    view: Rootfs

    #: what it is as a target, and the engine that reads others like it
    kind = "layers"
    engine = "oci"

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels in its configuration."""
        return self.image.config.labels

    @property
    def env(self) -> Mapping[str, str]:
        """The environment in its configuration."""
        return self.image.config.env

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of its manifest and configuration."""
        return (self.image.manifest.digest, blobs(self.image.manifest)[0].digest)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, or None."""
        return self.view.read(path)

    def has(self, path: str) -> bool:
        """Whether a path exists; reads no layer."""
        return self.view.stat(path) is not None

    def close(self) -> None:
        """Close both."""
        self.view.close()
        self.image.close()


@dataclass(frozen=True)
class Base:
    """An identified base and its files; ``close`` releases them."""

    identity: BaseIdentity
    tree: Tree
    close: Callable[[], None] = lambda: None
    #: the image, if it is in a registry or layout
    opened: InLayers | None = None
