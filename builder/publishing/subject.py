"""The image or index to publish: its manifests, its metadata, and the name of its tag."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builder.applier.values import canonical_json, sha256_hex
from builder.errors import RemoteError, UsageError
from builder.images.engines.baked import (
    LABEL_PREFIX,
    PLAN_LABEL,
    SHARE,
    is_overlay,
    read_layers,
    read_plan,
)
from builder.images.registry.model import (
    DOCKER_CONFIG,
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    OCI_CONFIG,
    Descriptor,
    ImageConfig,
    attests,
    check_entry_platform,
    parse_config,
)
from builder.images.registry.model import platform_name as usual_platform
from builder.images.rootfs.tar import FILE, LayerTar, Unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.common.plan import BakedPlan, RecordedPlan
    from builder.images.registry.model import ImageSource, RawManifest

# -------------------------------------------------------------------------------- the immutable tag


_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_.-]+")
_TAG_LIMIT = 128
#: Hexadecimal digits of the plan digest, as in the names of built images.
_SHORT = 12
UNVERIFIED = "-unverified"


@dataclass(frozen=True, kw_only=True)
class Name:
    """The parts of an immutable tag.

    ``plan_digest`` is the plan's; for images of several plans the sha256 of their sorted digests as
    canonical JSON.
    """

    version: str
    profile: str
    plan_digest: str

    def tag(self, *, verified: bool) -> str:
        """``<vllm>-<profile>-<plan12>``, with a mark for unverified images.

        Raises:
            UsageError: the name is too long for a tag.
        """
        short = self.plan_digest.removeprefix("sha256:")[:_SHORT]
        words = f"{self.version}-{self.profile}-{short}{'' if verified else UNVERIFIED}"
        tag = _NOT_IN_A_TAG.sub("-", words).lstrip(".-")
        if len(tag) > _TAG_LIMIT:
            raise UsageError(
                f"{tag} is {len(tag)} characters long, a tag may have {_TAG_LIMIT}",
                hint="create a profile for this selection of layers",
            )
        return tag


def name_of(labels: Sequence[Mapping[str, str]], subject: str) -> Name:
    """The name for images with these labels under one tag.

    Raises:
        UsageError: a label is missing, or the images disagree.
    """
    plans = sorted({one[PLAN_LABEL] for one in labels})
    if not plans:
        raise UsageError(
            f"{subject} was not made by spark-build; it lacks the label {PLAN_LABEL}",
            hint="spark-build image --layers b12x-full",
        )

    def agreed(label: str, default: str) -> str:
        values = {one.get(label) or default for one in labels}
        if len(values) > 1:
            raise UsageError(
                f"the images of {subject} disagree on {label}: {', '.join(sorted(values))}",
                hint="publish them one by one",
            )
        return values.pop()

    profiles = agreed(f"{LABEL_PREFIX}.profiles", "").replace(",", "-")
    title = agreed("org.opencontainers.image.title", "custom").removeprefix("spark-build ")
    return Name(
        version=agreed("org.opencontainers.image.version", "unknown"),
        profile=profiles or title,
        plan_digest=plans[0] if len(plans) == 1 else f"sha256:{sha256_hex(canonical_json(plans))}",
    )


# ---------------------------------------------------------------------------------------- the image


#: The layers of an attestation: in-toto statements.
_STATEMENT = "application/vnd.in-toto"
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
    #: whether it is an attestation of BuildKit for another image, which no runtime chooses
    attests: bool = False

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

    def is_for(self, platform: str, *, exactly: bool = False) -> bool:
        """Whether it is for ``linux/arm64``; ``exactly`` excludes later variants."""
        names = ("os", "architecture", "variant")
        has = usual_platform(dict(zip(names, self.platform.split("/"), strict=False)))
        return has == platform or (not exactly and has.startswith(f"{platform}/"))

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
class ImageSet:
    """What a tag leads to: ``root`` is an image's manifest, or an index.

    ``images`` has everything that an index lists, including foreign images, and what
    BuildKit attaches to an image under the platform ``unknown/unknown`` (``attests``).
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
        return tuple(image for image in self.images if image.plan_digest and not image.attests)

    @property
    def foreign(self) -> tuple[Image, ...]:
        """The images without a plan that a runtime may choose, so that nothing proves them."""
        return tuple(i for i in self.images if not (i.plan_digest or i.attests))

    @property
    def overlay(self) -> bool:
        """Whether one of its images is an overlay."""
        return any(image.overlay for image in self.ours)

    def blobs(self) -> list[Descriptor]:
        """All blobs of all images, without repetition."""
        blobs = {b.digest: b for image in self.images for b in (*image.layers, image.config)}
        return list(blobs.values())

    @property
    def name(self) -> Name:
        """The parts of its tag.

        Raises:
            UsageError: spark-build built none of its images, or their labels disagree.
        """
        return name_of([image.labels for image in self.ours], self.digest)


def read_subject(source: ImageSource, reference: str) -> ImageSet:
    """Read what a tag or digest names, without its layers.

    Raises:
        RemoteError: it does not exist, or is not an image.
    """
    root = source.manifest(reference)
    document = root.json()
    if _type_of(root, document) in MANIFEST_TYPES:
        return ImageSet(root=root, images=(_image(source, root, document, ""),))
    if _type_of(root, document) not in INDEX_TYPES:
        raise RemoteError(f"{source.name}: {root.digest} is {root.media_type}, not an image")
    entries = document.get("manifests")
    if not isinstance(entries, list) or not 0 < len(entries) <= _ENTRY_LIMIT:
        raise RemoteError(f"{source.name}: {root.digest} is an index with no images or too many")
    return ImageSet(root=root, images=tuple(_images(source, root, entries)))


def _images(source: ImageSource, root: RawManifest, entries: list[Any]) -> Iterable[Image]:
    where = f"{source.name}: index {root.digest}"
    for entry in entries:
        descriptor = Descriptor.parse(entry, root.digest)
        manifest = source.manifest(descriptor.digest)
        document = manifest.json()
        if _type_of(manifest, document) not in MANIFEST_TYPES:
            raise RemoteError(f"{source.name}: {root.digest} has an index inside an index")
        image = _image(source, manifest, document, platform_name(descriptor.platform))
        check_entry_platform(descriptor, image.settings, where)
        yield replace(image, attests=attests(descriptor) and _holds_statements(image))


def _holds_statements(image: Image) -> bool:
    """Whether an image has nothing that a runtime unpacks, but statements about another."""
    return all(layer.media_type.startswith(_STATEMENT) for layer in image.layers)


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
        RemoteError: the blob is larger.
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


# ---------------------------------------------------------------------------- metadata in the image


_PLAN, _LAYERS = (f"{SHARE}/{name}".lstrip("/") for name in ("plan.json", "layers.json"))
_METADATA = "workspace/build-metadata.yaml"
_KEPT = (_PLAN, _LAYERS, _METADATA)
#: The version of spark-build, as ``build_metadata`` writes it.
_VERSION = re.compile(rb'^spark_build:\n  version: "([^"\n]*)"$', re.MULTILINE)
#: Limit of a plan's size; a plan lists every file that it changes, about 100 kB today.
_METADATA_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Baked:
    """The plan and the rendered layers of an image, and the other files of the same image layer.

    ``files`` maps absolute paths to the sha256 of every regular file; ``version`` is that of
    the spark-build that made it.
    """

    version: str
    recorded: RecordedPlan
    layers: tuple[Layer, ...]
    files: Mapping[str, str]

    @property
    def plan(self) -> BakedPlan:
        """The plan."""
        return self.recorded.document


def read_baked(source: ImageSource, image: Image) -> Baked:
    """Read plan and layers, newest image layer first, as far as needed.

    Raises:
        UsageError: the image has no plan, or not the one that its label names.
        RemoteError: a layer cannot be read.
    """
    for blob in reversed(image.layers):
        contents, files = _look(source, blob)
        if _PLAN in contents:
            plan = read_plan(contents[_PLAN], f"{source.name}: {image.digest}")
            layers = read_layers(contents.get(_LAYERS, b""), image.digest)
            stated = plan.document.plan_digest
            if stated != image.plan_digest:
                raise UsageError(
                    f"{source.name}: {image.digest} has the label of plan {image.plan_digest} and "
                    f"carries plan {stated}: the image was modified after the build"
                )
            return Baked(
                version=version_in(contents.get(_METADATA, b"")),
                recorded=plan,
                layers=tuple(layers),
                files=files,
            )
    raise UsageError(
        f"{source.name}: {image.digest} has no plan, so it was not made by spark-build"
    )


def version_in(metadata: bytes) -> str:
    """The version of spark-build that ``build-metadata.yaml`` names."""
    match = _VERSION.search(metadata)
    return match[1].decode("utf-8", "replace") if match else ""


def _look(source: ImageSource, blob: Descriptor) -> tuple[dict[str, bytes], dict[str, str]]:
    """The wanted files of this layer, and the sha256 of every file in it."""
    contents: dict[str, bytes] = {}
    files: dict[str, str] = {}
    with source.open(blob) as stream:
        unpacked = Unpacked(stream, f"{source.name}: {blob.digest}")
        tar = LayerTar(unpacked, f"{source.name}: {blob.digest}")
        for member in tar:
            if member.kind != FILE:
                continue
            keep = member.path in _KEPT and member.size <= _METADATA_LIMIT
            pieces, digest = [], hashlib.sha256()
            for piece in tar.chunks():
                digest.update(piece)
                if keep:
                    pieces.append(piece)
            files[f"/{member.path}"] = digest.hexdigest()
            if keep:
                contents[member.path] = b"".join(pieces)
        unpacked.finish()
    return contents, files
