"""Descriptors, manifests, and the interfaces that registries and layouts share.

Names and limits are those of the OCI image and distribution specifications.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Protocol

from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"

INDEX_TYPES = (OCI_INDEX, DOCKER_INDEX)
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
#: Limit of a manifest's size; the distribution specification suggests the same 4 MiB.
MANIFEST_LIMIT = 4 * 1024 * 1024

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def sha256_digest(data: bytes) -> str:
    """``sha256:...`` of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse_json(data: bytes | str) -> Any:
    """Parse untrusted JSON; raises ValueError for all errors, excessive nesting included."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """An OCI content descriptor.  ``size`` is in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str = ""
    #: where the content of a nondistributable layer is
    urls: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether the layer is nondistributable, so that registries need not have it."""
        return ".foreign." in self.media_type or ".nondistributable." in self.media_type

    @classmethod
    def parse(cls, value: object, where: str) -> Descriptor:
        """From untrusted JSON.

        Raises:
            RemoteError: it is not a descriptor with a sha256 digest and a size.
        """
        if not isinstance(value, dict):
            raise RemoteError(f"{where}: a descriptor is {type(value).__name__}, not an object")
        digest, size = value.get("digest"), value.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise RemoteError(f"{where}: {digest!r} is not a sha256 digest")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise RemoteError(f"{where}: {digest} has no size, but {size!r}")
        return cls(
            media_type=str(value.get("mediaType") or ""),
            digest=digest,
            size=size,
            annotations=_strings(value.get("annotations")),
            platform=_strings(value.get("platform")),
            artifact_type=str(value.get("artifactType") or ""),
            urls=tuple(map(str, urls)) if isinstance(urls := value.get("urls"), list) else (),
        )

    def as_json(self) -> dict[str, Any]:
        """The descriptor as in a manifest."""
        value: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        if self.platform:
            value["platform"] = dict(self.platform)
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        if self.urls:
            value["urls"] = list(self.urls)
        return value


def _strings(value: object) -> dict[str, str]:
    """The texts in an object; what else it has is for readers that know more."""
    texts = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in texts if isinstance(text, str)}


@dataclass(frozen=True, kw_only=True)
class RawManifest:
    """The exact bytes of a manifest or index."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """``sha256:...`` of the bytes."""
        return sha256_digest(self.data)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of this manifest for an index."""
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.data))

    def json(self) -> dict[str, Any]:
        """The parsed document.

        Raises:
            RemoteError: the bytes are not a JSON object.
        """
        try:
            value = parse_json(self.data)
        except ValueError as error:
            raise RemoteError(f"manifest {self.digest} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise RemoteError(f"manifest {self.digest} is not a JSON object")
        return value


class ImageSource(Protocol):
    """One repository, or one OCI layout, to read from."""

    name: str

    def manifest(self, reference: str) -> RawManifest:
        """The manifest or index of a tag or digest; a digest is checked.

        Raises:
            RemoteError: it does not exist, is too large, or its bytes do not match its digest.
        """

    def gives(self, blob: Descriptor) -> bool:
        """Whether the blob can be read, and has its size."""

    def open(self, blob: Descriptor) -> AbstractContextManager[IO[bytes]]:
        """A blob as a stream, in constant memory.

        Size and digest are checked during reading: at the end of a blob with wrong content
        the reader gets a RemoteError, never a clean end.
        """


class ImageTarget(ImageSource, Protocol):
    """One repository, or one OCI layout, to write to."""

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Write a blob; nothing remains if its bytes do not match its digest."""

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:
        """Mount a blob from another repository of the same registry, if possible."""

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        """Push a manifest under a tag or its own digest; this is the last step of a push."""
