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
        """The digest that a tag points to, or None."""

    def settle(self) -> None:
        """Wait until a concurrent publisher that saw the tag free has written it too."""

    def set_tag(self, manifest: RawManifest, tag: str, was: str | None) -> None:
        """Move a tag from digest ``was`` (None: a new tag) to a manifest, or raise TagTaken."""

    def tags(self) -> Sequence[str]:
        """All tags, unordered; empty if the repository does not exist yet."""

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        """A manifest's referrers, from the registry's list or the fallback tag."""

    def attach(self, manifest: RawManifest) -> None:
        """Push a manifest with a subject, so that ``referrers`` lists it."""

    def remove(self, reference: str) -> bool:
        """Delete a manifest with all its tags, or a tag; False if the registry refuses."""
