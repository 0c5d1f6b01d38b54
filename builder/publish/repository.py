"""The repository operations for publishing, and the parser of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.registry import listing, tagging
from builder.registry.auth import AccessDenied, scope_of
from builder.registry.client import Repository, separator
from builder.registry.reference import parse_reference
from builder.registry.responses import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.registry.model import Descriptor, RawManifest
    from builder.registry.reference import Reference

#: Statuses of registries without deletion: GHCR and Docker Hub only delete through their own APIs.
_NO_DELETE = frozenset({403, 405, 501})


class PublishRepository(Repository):
    """A repository for publishing (implements ``PublishTarget``)."""

    def settle(self) -> None:
        """Wait until a concurrent publisher that saw the tag free has written it too."""
        options = self.transport.options
        options.pause(options.settle)

    def set_tag(self, manifest: RawManifest, tag: str, was: str | None) -> None:
        """Move a tag from digest ``was`` (None: a new tag) to a manifest, or raise TagTaken."""
        tagging.set_tag(self, manifest, tag, was)

    def tags(self) -> Sequence[str]:
        """All tags; empty if the repository does not exist yet."""
        return listing.tags(self)

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        """The referrers of a manifest."""
        return listing.referrers(self, digest)

    def attach(self, manifest: RawManifest) -> None:
        """Push a manifest with a subject."""
        listing.attach(self, manifest)

    def remove(self, reference: str) -> bool:
        """Delete a manifest with all its tags, or a tag; False if the registry refuses.

        Raises:
            RemoteError: the registry does not respond.
        """
        try:
            response = self.transport.request(
                "DELETE",
                self.manifest_url(reference),
                f"removal of {self.path}{separator(reference)}{reference}",
                expect=frozenset({200, 202, 204, 404}) | _NO_DELETE,
                permit=self.authenticator.permit(scope_of(self.path, "pull", "push", "delete")),
            )
        except AccessDenied:
            return False
        drain(response)
        return response.status_code not in _NO_DELETE


def parse_target(text: str) -> Reference:
    """Parse ``HOST/REPO``; publishing adds the tags.

    Raises:
        UsageError: it is malformed, or has a tag or digest.
    """
    reference = parse_reference(text)
    rest = text.removeprefix("docker://")
    if "@" in rest or ":" in rest.rsplit("/", 1)[-1]:
        raise UsageError(
            f"{text}: give only the repository; the tag is derived from the image",
            hint=f"{reference.name}, and --move-tag {reference.tag or 'latest'} for another name",
        )
    return reference
