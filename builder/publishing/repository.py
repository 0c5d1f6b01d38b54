"""A repository to publish to: its tags, and the documents attached to its images.

Documents are attached as OCI 1.1 referrers.  If a registry has no referrers API, they are listed in
an index under the tag ``sha256-<hex>``, which every client rewrites without a lock.  So the list is
read again after each write, and written again if another client's write dropped ours.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Protocol, TypeVar

from builder.common import shutdown
from builder.errors import RemoteError, UsageError
from builder.images.registry.model import (
    INDEX_TYPES,
    OCI_EMPTY,
    OCI_MANIFEST,
    Descriptor,
    ImageTarget,
    RawManifest,
    entries,
    is_index,
    sha256_digest,
)
from builder.images.registry.reference import is_digest, parse_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.images.registry.reference import Reference


class PublishTarget(ImageTarget, Protocol):
    """A repository on a registry that images are published to."""

    def digest_of(self, reference: str) -> str | None:
        """The digest that a tag points to, or None."""

    def stored_digest(self, tag: str) -> str | None:
        """The digest of the manifest that who pulls a tag gets, or None."""

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


# --------------------------------------------------------------------- conflicts with other clients


Result = TypeVar("Result")

#: docker-registry rewrites links of blobs and manifests in place, and returns one of these
#: while another client's push writes a link.
_PASSING = ("MANIFEST_BLOB_UNKNOWN", "DIGEST_INVALID")
_ATTEMPTS = 6


def with_retries(run: Callable[[], Result]) -> Result:
    """Retry an idempotent action after errors that may be temporary.

    Raises:
        RemoteError: the retries are exhausted, or the error is permanent.
    """
    for turn in range(1, _ATTEMPTS):
        try:
            return run()
        except RemoteError as error:
            if not any(word in str(error) for word in _PASSING):
                raise
        pause(turn)
    return run()


def pause(turn: int) -> None:
    """Wait with exponential backoff and jitter."""
    shutdown.pause(random.uniform(0, 0.02 * 2**turn))  # noqa: S311 - no secret


# ---------------------------------------------------------------------------------------- referrers


_EMPTY = b"{}"
#: Prefix of the types of spark-build's documents.
OURS = "application/vnd.spark-build."
#: Media types of layers that cosign stores under a tag: signatures, statements, bills of materials.
_SIGNATURES = (
    "application/vnd.dev.cosign.",
    "application/vnd.dsse.envelope.",
    "application/vnd.cyclonedx",
    "application/spdx",
    "text/spdx",
    "spdx+json",
)
#: Attempts to list a document while other clients write the list.
_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A document attached to an image: its type and its bytes."""

    artifact_type: str
    data: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def blob(self) -> Descriptor:
        """The document's blob."""
        return Descriptor(
            media_type=self.artifact_type, digest=sha256_digest(self.data), size=len(self.data)
        )

    def manifest(self, subject: Descriptor) -> RawManifest:
        """The artifact manifest that attaches it (OCI image specification, artifact usage)."""
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": self.artifact_type,
            "config": _empty().as_json(),
            "layers": [self.blob.as_json()],
            "subject": replace(subject, annotations={}, platform={}, artifact_type="").as_json(),
        }
        if self.annotations:
            document["annotations"] = dict(sorted(self.annotations.items()))
        data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        return RawManifest(data=data, media_type=OCI_MANIFEST)

    def is_spared_by(self, repository: PublishTarget, subject: str) -> bool:  # noqa: ARG002
        """Whether another attachment of the subject makes it unnecessary: never, for most."""
        return False

    def is_attached(self, target: PublishTarget, subject: Descriptor) -> bool:
        """Whether it is attached already, or something as good is."""
        digest = self.manifest(subject).digest
        listed = any(entry.digest == digest for entry in target.referrers(subject.digest))
        if listed and target.digest_of(digest) is not None:
            return True
        return self.is_spared_by(target, subject.digest)


class NotAttached(RemoteError):
    """A manifest that a list names as attached to an image, and that is about something else."""


def own_manifest(repository: PublishTarget, digest: str, subject: str) -> RawManifest:
    """A manifest that is attached to an image: its own ``subject`` says so, not only a list.

    Raises:
        NotAttached: it is about something else.
        RemoteError: it does not exist, or cannot be read.
    """
    manifest = repository.manifest(digest)
    stated = manifest.json().get("subject")
    seen = stated.get("digest") if isinstance(stated, dict) else None
    if seen != subject:
        raise NotAttached(f"it is attached to {str(seen)[:80] if seen else 'nothing'}")
    return manifest


def _empty() -> Descriptor:
    """The empty configuration of an artifact."""
    return Descriptor(media_type=OCI_EMPTY, digest=sha256_digest(_EMPTY), size=len(_EMPTY))


def is_fallback_tag(tag: str) -> bool:
    """Whether a tag is for attachments: ours, or signatures of cosign (``.sig``, ``.att``)."""
    return is_digest(subject_of_tag(tag))


def lists_referrers(manifest: RawManifest) -> bool:
    """Whether a manifest is a list of attachments, not an index of images."""
    return is_index(manifest) and all(entry.artifact_type for entry in entries(manifest))


def holds_signatures(manifest: RawManifest) -> bool:
    """Whether a manifest is a signature of cosign, not an image."""
    layers = manifest.json().get("layers")
    types = [
        str(layer.get("mediaType")) if isinstance(layer, dict) else ""
        for layer in (layers if isinstance(layers, list) else ())
    ]
    return bool(types) and all(one.startswith(_SIGNATURES) for one in types)


def subject_of_tag(tag: str) -> str:
    """The digest of the image that such a tag is for."""
    return tag.partition(".")[0].replace("-", ":", 1)


def attach(target: PublishTarget, subject: Descriptor, attachment: Attachment) -> None:
    """Attach a document to a manifest, unless it is already attached.

    Raises:
        RemoteError: the registry refuses, or other clients keep rewriting the list.
    """
    for blob, data in ((_empty(), _EMPTY), (attachment.blob, attachment.data)):
        if not target.has(blob.digest):
            target.put_blob(blob, BytesIO(data))
    manifest = attachment.manifest(subject)
    for turn in range(_TRIES):
        listed = any(e.digest == manifest.digest for e in target.referrers(subject.digest))
        if listed and target.digest_of(manifest.digest) is not None:
            return
        if turn > 1:  # another client is writing: let it see our write
            pause(turn)
        with_retries(lambda: target.attach(manifest))
    raise RemoteError(
        f"{target.name}: other clients keep changing the attachments of {subject.digest}",
        hint="run the same command again",
    )


# -------------------------------------------------------------------------- what the tags reference


#: Parallel small requests.
_REQUESTS = 8
#: Limit of nested indexes.
_DEPTH = 8


class TaggedManifests:
    """Reads the tags of a repository; the contents of indexes are cached."""

    def __init__(self, repository: PublishTarget) -> None:
        """Sends no request."""
        self._repository = repository
        self._listed: dict[str, tuple[Descriptor, ...]] = {}

    def look(self) -> dict[str, set[str]]:
        """Each digest that a tag references now, directly or through an index, with those tags.

        Raises:
            RemoteError: the registry does not respond, or a tag's manifest cannot be read: it may
                be an index.
        """
        tags = list(self._repository.tags())
        with ThreadPoolExecutor(_REQUESTS) as pool:
            roots = list(zip(tags, pool.map(self._repository.digest_of, tags), strict=True))
            digests = sorted({digest for _, digest in roots if digest is not None})
            reached = dict(zip(digests, pool.map(self._reach, digests), strict=True))
        names: dict[str, set[str]] = {}
        for tag, root in roots:
            for digest in reached[root] if root is not None else ():
                names.setdefault(digest, set()).add(tag)
        return names

    def _reach(self, digest: str, depth: int = _DEPTH) -> set[str]:
        if depth == 0:
            raise RemoteError(
                f"{self._repository.name}: indexes are nested more than {_DEPTH} deep"
            )
        reached = {digest}
        for entry in self._entries(digest):
            reached.add(entry.digest)
            if entry.media_type in INDEX_TYPES:
                reached |= self._reach(entry.digest, depth - 1)
        return reached

    def _entries(self, digest: str) -> tuple[Descriptor, ...]:
        if digest not in self._listed:
            try:
                manifest = self._repository.manifest(digest)
            except RemoteError:
                if self._repository.digest_of(digest) is None:  # deleted, or not sent yet
                    return ()
                raise
            self._listed[digest] = entries(manifest) if is_index(manifest) else ()
        return self._listed[digest]
