"""An identified base and its files, and an image that is open without a Docker Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.applier.trees import Tree
    from builder.common.model.base import BaseIdentity
    from builder.images.rootfs.image import Image
    from builder.images.rootfs.view import Rootfs


@dataclass(frozen=True)
class OpenedImage:
    """An image and its files, without a Docker Engine."""

    image: Image
    view: Rootfs

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
    opened: OpenedImage | None = None
