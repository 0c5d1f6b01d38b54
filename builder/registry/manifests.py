"""The contents of manifests and indexes, read from untrusted bytes."""

from __future__ import annotations

from typing import Any

from builder.errors import RemoteError
from builder.registry.model import (
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)

#: Limit of layers or entries: overlayfs supports 128 layers, and the largest indexes have about 20.
PART_LIMIT = 1000


def check_manifest(data: bytes, *, content_type: str, digest: str, where: str) -> RawManifest:
    """Bytes as a manifest of a known type; ``digest`` is checked unless it is ``""``.

    ``content_type`` is the response header, or ``""`` for a layout.

    Raises:
        RemoteError: they are not a valid manifest.
    """
    if len(data) > MANIFEST_LIMIT:
        raise RemoteError(f"{where} is larger than the limit of {MANIFEST_LIMIT} bytes")
    if digest and sha256_digest(data) != digest:
        raise RemoteError(
            f"{where}: the data received for {digest} is {sha256_digest(data)}",
            hint="do not use it; it was damaged in the registry or on the way",
        )
    media_type = content_type.partition(";")[0].strip().lower()
    value = RawManifest(data=data, media_type=media_type).json()
    stated = value.get("mediaType")
    if not media_type:
        media_type = stated or (OCI_INDEX if "manifests" in value else OCI_MANIFEST)
    if media_type not in (*INDEX_TYPES, *MANIFEST_TYPES):
        obsolete = ", Docker's obsolete first format" if ".v1+" in str(media_type) else ""
        raise RemoteError(f"{where} is of type {str(media_type)[:100]!r}{obsolete}")
    if stated is not None and stated != media_type:
        raise RemoteError(f"{where} was sent as {media_type} but states {str(stated)[:100]}")
    is_index = media_type in INDEX_TYPES
    if ("manifests" in value) != is_index or ("layers" in value or "config" in value) == is_index:
        raise RemoteError(f"{where} is of type {media_type} but lacks its required fields")
    return RawManifest(data=data, media_type=media_type)


def is_index(manifest: RawManifest) -> bool:
    """Whether it is an index."""
    return manifest.media_type in INDEX_TYPES


def entries(index: RawManifest) -> tuple[Descriptor, ...]:
    """The manifests and indexes that an index lists.

    Raises:
        RemoteError: it is malformed.
    """
    return _descriptors(index.json().get("manifests"), f"index {index.digest}")


def blobs(manifest: RawManifest) -> tuple[Descriptor, ...]:
    """The config descriptor, then the layers, bottom first.

    Raises:
        RemoteError: it is malformed.
    """
    where = f"manifest {manifest.digest}"
    value = manifest.json()
    config = Descriptor.parse(value.get("config"), where)
    return (config, *_descriptors(value.get("layers"), where))


def _descriptors(value: Any, where: str) -> tuple[Descriptor, ...]:
    if not isinstance(value, list):
        raise RemoteError(f"{where} has no list of parts")
    if len(value) > PART_LIMIT:
        raise RemoteError(f"{where} has {len(value)} parts; the limit is {PART_LIMIT}")
    return tuple(Descriptor.parse(item, where) for item in value)
