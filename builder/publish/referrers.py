"""Documents that belong to an image, attached to it as OCI 1.1 referrers.

If a registry has no referrers API, they are listed in an index under the tag ``sha256-<hex>``,
which every client rewrites without a lock.  So the list is read again after each
write, and written again if another client's write dropped ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.publish.retry import pause, with_retries
from builder.registry.manifests import entries, is_index
from builder.registry.model import (
    OCI_EMPTY,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)
from builder.registry.reference import is_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.publish.protocols import PublishTarget

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
        if any(entry.digest == manifest.digest for entry in target.referrers(subject.digest)):
            return
        if turn > 1:  # another client is writing: let it see our write
            pause(turn)
        with_retries(lambda: target.attach(manifest))
    raise RemoteError(
        f"{target.name}: other clients keep changing the attachments of {subject.digest}",
        hint="run the same command again",
    )
