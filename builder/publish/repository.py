"""The repository operations that publishing needs, and how a target names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.net import sockets
from builder.registry import listing, tagging
from builder.registry.auth import AccessDenied, scope_of
from builder.registry.client import Repository, separator
from builder.registry.reference import parse_reference
from builder.registry.responses import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.registry.model import Descriptor, RawManifest
    from builder.registry.reference import Reference

#: How registries say that they do not delete: GHCR and Docker Hub have it in their own interface.
_NO_DELETE = frozenset({403, 405, 501})


class PublishRepository(Repository):
    """One repository that images are published to (``ports.PublishTarget``)."""

    def settle(self) -> None:
        """Wait until whoever found a tag free, just before it was taken, has written it, too."""
        sockets.pause(self.transport.options.settle)

    def set_tag(self, manifest: RawManifest, tag: str, was: str | None) -> None:
        """Give a tag that names ``was`` (None: nothing) to a manifest; TagTaken if it does not."""
        tagging.set_tag(self, manifest, tag, was)

    def tags(self) -> Sequence[str]:
        """Every tag; none where the repository does not exist yet."""
        return listing.tags(self)

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        """What was attached to a manifest."""
        return listing.referrers(self, digest)

    def attach(self, manifest: RawManifest) -> None:
        """Push a manifest that has a subject."""
        listing.attach(self, manifest)

    def remove(self, reference: str) -> bool:
        """Delete a manifest with every tag on it, or a tag; False from a registry that refuses.

        Raises:
            RemoteError: the registry does not answer.
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
    """``HOST/REPO``, which is all that a target says: publishing makes the tags.

    Raises:
        UsageError: it is not that, or names a tag or digest.
    """
    reference = parse_reference(text)
    rest = text.removeprefix("docker://")
    if "@" in rest or ":" in rest.rsplit("/", 1)[-1]:
        raise UsageError(
            f"{text}: give only the repository; the tag is derived from the image",
            hint=f"{reference.name}, and --move-tag {reference.tag or 'latest'} for another name",
        )
    return reference
