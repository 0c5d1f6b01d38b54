"""The repository interface for publishing, beyond reading and writing images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from builder.registry.model import ImageTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.registry.model import Descriptor, RawManifest


class PublishTarget(ImageTarget, Protocol):
    """A repository on a registry that images are published to."""

    def digest_of(self, reference: str) -> str | None:
        """The digest that a tag points to, None where there is no such tag."""

    def settle(self) -> None:
        """Wait until whoever found a tag free, just before it was taken, has written it, too."""

    def set_tag(self, manifest: RawManifest, tag: str, was: str | None) -> None:
        """Give a tag that names ``was`` (None: nothing) to a manifest; TagTaken if it does not."""

    def tags(self) -> Sequence[str]:
        """Every tag, in no order; none where the repository does not exist yet."""

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        """What was attached to a manifest, by the registry's list or by the fallback tag."""

    def attach(self, manifest: RawManifest) -> None:
        """Push a manifest that has a subject, so that ``referrers`` finds it there."""

    def remove(self, reference: str) -> bool:
        """Delete a manifest with every tag on it, or a tag; False from a registry that refuses."""
