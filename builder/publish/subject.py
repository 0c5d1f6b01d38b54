"""The image or index to publish, read from any source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.engines.metadata import LABEL_PREFIX, PLAN_LABEL, is_overlay
from builder.errors import RemoteError
from builder.publish.name import Name, name_of
from builder.registry.config import ImageConfig, parse_config
from builder.registry.model import (
    DOCKER_CONFIG,
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    OCI_CONFIG,
    Descriptor,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.registry.model import ImageSource, RawManifest

#: Limit of an index's entries; real ones have far fewer.
_ENTRY_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image for one platform, from its manifest and configuration."""

    manifest: RawManifest
    platform: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    labels: Mapping[str, str]
    #: empty for an artifact, whose configuration may be anything
    settings: ImageConfig

    @property
    def created(self) -> str:
        """Creation time in RFC 3339 format, or ``""``."""
        return self.settings.created

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return self.manifest.digest

    @property
    def plan_digest(self) -> str:
        """Digest of its plan, ``""`` for a foreign image."""
        return self.labels.get(PLAN_LABEL, "")

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests that evidence may use for it: a Docker Engine may use the config's digest."""
        return (self.digest, self.config.digest)

    @property
    def overlay(self) -> bool:
        """Whether it is an overlay, which cannot run alone."""
        kind = self.manifest.json().get("artifactType")
        return is_overlay(self.labels, str(kind or ""))

    @property
    def base(self) -> tuple[str, str]:
        """Reference and digest of its base: an image, or ``pypi:`` wheels."""
        return self.labels.get(f"{LABEL_PREFIX}.base", ""), self.labels.get(
            f"{LABEL_PREFIX}.base-digest", ""
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The target of a tag: ``root`` is an image's manifest, or an index.

    ``images`` has everything that an index lists, including foreign images, and what
    BuildKit attaches to an image under the platform ``unknown/unknown``.
    """

    root: RawManifest
    images: tuple[Image, ...]

    @property
    def digest(self) -> str:
        """The digest of the published reference."""
        return self.root.digest

    @property
    def ours(self) -> tuple[Image, ...]:
        """The images built by spark-build; an index may also list others."""
        return tuple(image for image in self.images if image.plan_digest)

    @property
    def overlay(self) -> bool:
        """Whether one of its images is an overlay."""
        return any(image.overlay for image in self.ours)

    def blobs(self) -> list[Descriptor]:
        """All blobs of all images, without repetition."""
        found = {b.digest: b for image in self.images for b in (*image.layers, image.config)}
        return list(found.values())

    @property
    def name(self) -> Name:
        """The parts of its tag.

        Raises:
            UsageError: spark-build built none of its images, or their labels disagree.
        """
        return name_of([image.labels for image in self.ours], self.digest)


def read_subject(source: ImageSource, reference: str) -> Subject:
    """Read what a tag or digest names, without its layers.

    Raises:
        RemoteError: it does not exist, or is not an image.
    """
    root = source.manifest(reference)
    document = root.json()
    if _type_of(root, document) in MANIFEST_TYPES:
        return Subject(root=root, images=(_image(source, root, document, ""),))
    if _type_of(root, document) not in INDEX_TYPES:
        raise RemoteError(f"{source.name}: {root.digest} is {root.media_type}, not an image")
    entries = document.get("manifests")
    if not isinstance(entries, list) or not 0 < len(entries) <= _ENTRY_LIMIT:
        raise RemoteError(f"{source.name}: {root.digest} is an index with no images or too many")
    return Subject(root=root, images=tuple(_images(source, root, entries)))


def _images(source: ImageSource, root: RawManifest, entries: list[Any]) -> Iterable[Image]:
    for entry in entries:
        descriptor = Descriptor.parse(entry, root.digest)
        manifest = source.manifest(descriptor.digest)
        document = manifest.json()
        if _type_of(manifest, document) not in MANIFEST_TYPES:
            raise RemoteError(f"{source.name}: {root.digest} has an index inside an index")
        yield _image(source, manifest, document, platform_name(descriptor.platform))


def _type_of(manifest: RawManifest, document: Mapping[str, Any]) -> str:
    return str(document.get("mediaType") or manifest.media_type)


def platform_name(platform: Mapping[str, str]) -> str:
    """``linux/arm64`` or ``linux/arm/v7``; ``""`` for an empty platform."""
    words = (platform.get("os"), platform.get("architecture"), platform.get("variant"))
    return "/".join(word for word in words if word)


def _image(
    source: ImageSource, manifest: RawManifest, document: Mapping[str, Any], platform: str
) -> Image:
    where = f"{source.name}: {manifest.digest}"
    config = Descriptor.parse(document.get("config"), where)
    if config.media_type in (OCI_CONFIG, DOCKER_CONFIG):
        settings = parse_config(read_blob(source, config), where)
    else:  # an artifact's, which may be anything
        settings = ImageConfig()
    annotations = document.get("annotations")
    layers = document.get("layers")
    return Image(
        manifest=manifest,
        platform=platform or platform_name(settings.platform),
        config=config,
        layers=tuple(
            Descriptor.parse(item, where) for item in (layers if isinstance(layers, list) else ())
        ),
        labels={**_texts(annotations), **settings.labels},
        settings=settings,
    )


def _texts(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def read_blob(source: ImageSource, blob: Descriptor, limit: int = MANIFEST_LIMIT) -> bytes:
    """A whole blob of at most ``limit`` bytes.

    Raises:
        RemoteError: it is larger.
    """
    if blob.size > limit:
        raise RemoteError(
            f"{source.name}: {blob.digest} is {blob.size} bytes, more than the {limit} expected"
        )
    with source.open(blob) as stream:
        chunks = []
        while chunk := stream.read(1 << 16):
            chunks.append(chunk)
    return b"".join(chunks)
