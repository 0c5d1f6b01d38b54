"""Resolves an image reference: tag to digest, index to platform, manifest, configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from builder.common.model.platform import Platform
from builder.common.model.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.registry.model import (
    DOCKER_CONFIG,
    OCI_CONFIG,
    blobs,
    check_entry,
    entries,
    is_index,
    parse_config,
    platform_name,
)
from builder.images.rootfs import limits
from builder.images.rootfs.layers import LAYER_FORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from builder.images.registry.locations import Locations
    from builder.images.registry.model import Descriptor, ImageConfig, ImageSource, RawManifest

#: The label for the base image's name (OCI image specification, annotations).
BASE_NAME = "org.opencontainers.image.base.name"
#: Limit of nested indexes.
_NESTING = 4
#: The default platform for an index with several: a DGX Spark's.
PREFERRED = "linux/arm64"


class OtherPlatform(UsageError):
    """The image does not exist for the requested platform."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """One platform's image.  ``top`` is the manifest or index that the reference names."""

    source: ImageSource
    top: RawManifest
    manifest: RawManifest
    config: ImageConfig
    #: open connections to its registry, for reuse
    locations: Locations | None = None
    close: Callable[[], None] = lambda: None

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """Layer descriptors, bottom first."""
        return blobs(self.manifest)[1:]

    @property
    def diff_ids(self) -> dict[str, str]:
        """The diff_id of each layer, by the layer's digest."""
        ids = self.config.diff_ids or ()
        return {layer.digest: said for layer, said in zip(self.layers, ids, strict=True)}


def open_image(ref: Ref, platform: str | None = None) -> Image:
    """The image that ``docker://HOST/NAME:TAG``, ``HOST/NAME:TAG`` or ``oci:DIR[:NAME]`` names.

    Raises:
        RemoteError: it does not exist, or it is malformed.
        UsageError: the reference is malformed, or has no image for the platform.
    """
    from builder.images.registry.layout import LayoutDirectory
    from builder.images.registry.locations import Locations

    locations = Locations()
    location = locations.open(ref)
    if isinstance(location.image, LayoutDirectory) and not location.image.path.is_dir():
        raise UsageError(f"{location.image.path} is not an OCI layout: there is no such folder")
    try:
        found = find_image(location.image, location.reference, platform)
    except BaseException:
        locations.__exit__(None, None, None)
        raise
    close = partial(locations.__exit__, None, None, None)
    return replace(_with_base(found, locations), locations=locations, close=close)


def _with_base(image: Image, locations: Locations) -> Image:
    """A thin layout (``image --thin``) together with the registry that has the base's layers."""
    from builder.images.registry.layout import FallbackSource, LayoutDirectory

    layout = image.source
    name = image.config.labels.get(BASE_NAME)
    if not isinstance(layout, LayoutDirectory) or not name:
        return image
    if all(layout.has(layer.digest) for layer in image.layers):
        return image
    return replace(image, source=FallbackSource(layout, locations.open(Ref(name)).image))


def find_image(source: ImageSource, identifier: str, platform: str | None) -> Image:
    """Resolve a tag or digest to the image for a platform (``linux/arm64``).

    Raises:
        RemoteError: it does not exist, or it is malformed.
        UsageError: it has no image for the platform, or several without a requested platform.
    """
    top = source.manifest(identifier)
    manifest = top
    for _ in range(_NESTING):
        if not is_index(manifest):
            config = read_config(source, manifest)
            _check_platform(source, identifier, config, platform)
            return Image(source=source, top=top, manifest=manifest, config=config)
        entry, where = (
            _choose(source, manifest, platform),
            f"{source.name}: index {manifest.digest}",
        )
        manifest = source.manifest(entry.digest)
        check_entry(entry, manifest, where)
    raise RemoteError(f"{source.name}: {identifier} is an index nested too deeply")


def subjects(index: RawManifest) -> list[Descriptor]:
    """The entries of an index that are images, without attestations."""
    return [e for e in entries(index) if "vnd.docker.reference.type" not in e.annotations]


def image_entries(index: RawManifest) -> list[Descriptor]:
    """The same, for Linux only."""
    return [e for e in subjects(index) if (e.platform.get("os") or "linux") == "linux"]


def _check_platform(
    source: ImageSource, identifier: str, config: ImageConfig, platform: str | None
) -> None:
    """Refuse an image for another platform than requested."""
    has = platform_name({"os": "linux", **config.platform})
    if platform is not None and has != Platform.parse(platform).oci:
        raise OtherPlatform(
            f"{source.name}: {identifier} is for {has}, not for {platform}",
            hint="omit --platform to use it as it is",
        )
    system = config.platform.get("os", "linux")
    if system != "linux":
        raise RemoteError(f"{source.name}: {identifier} is for {system[:40]!r}, not for Linux")


def platform_of(entry: Descriptor) -> str:
    """``linux/arm64``, with the variant if it is not the default."""
    return platform_name({**entry.platform, "os": "linux"})


def _choose(source: ImageSource, index: RawManifest, platform: str | None) -> Descriptor:
    from builder.common.console import console

    found = image_entries(index)
    names = ", ".join(sorted({platform_of(entry) for entry in found})) or "none"
    wanted = Platform.parse(platform or PREFERRED).oci
    if platform is None and len(found) == 1 and platform_of(found[0]).count("/") == 1:
        return found[0]
    fitting = [entry for entry in found if platform_of(entry) == wanted]
    if not fitting:
        variants = [e.digest for e in found if platform_of(e).startswith(f"{wanted}/")]
        hint = "choose one with --platform" if platform is None else ""
        if variants:
            hint = f"give that image by its own digest, without --platform: {variants[0]}"
        raise OtherPlatform(f"{source.name} has no image for {wanted}; it has: {names}", hint=hint)
    if platform is None:
        console.say(f"  of {names}: {wanted} (--platform chooses another)")
    return fitting[0]


def _refuse_unknown(layers: Sequence[Descriptor], where: str) -> None:
    """Refuse layers that no runtime unpacks.

    Raises:
        RemoteError: that.
    """
    for layer in layers:
        if layer.media_type not in LAYER_FORMS:
            raise RemoteError(
                f"{where}: layer {layer.digest[:19]} is of type {layer.media_type[:80]!r}, which "
                "no runtime unpacks",
                hint="use another image, or rebuild this one",
            )


def read_config(source: ImageSource, manifest: RawManifest) -> ImageConfig:
    """The configuration of an image, whose diff_ids are checked against its layers.

    Raises:
        RemoteError: it is malformed, or not a container image.
    """
    where = f"{source.name}: manifest {manifest.digest}"
    descriptor, *layers = blobs(manifest)
    if descriptor.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
        raise RemoteError(f"{where} is not an image: its config is {descriptor.media_type[:80]!r}")
    if descriptor.size > limits.CONFIG_BYTES:
        raise RemoteError(f"{where}: a configuration of {descriptor.size} bytes")
    if len(layers) > limits.LAYERS:
        raise RemoteError(f"{where}: {len(layers)} layers")
    with source.open(descriptor) as stream:
        config = parse_config(stream.read(), where)
    _refuse_unknown(layers, where)
    ids = config.diff_ids
    if ids is None or config.document["rootfs"].get("type") != "layers":
        lack = "rootfs.type 'layers'" if ids is not None else "rootfs.diff_ids"
        raise RemoteError(f"{where}: its configuration is not that of an image: no {lack}")
    if len(ids) != len(layers):
        raise RemoteError(f"{where}: {len(layers)} layers, but {len(ids)} diff_ids")
    said: dict[str, str] = {}
    for layer, diff_id in zip(layers, ids, strict=True):
        if not layer.size:
            raise RemoteError(f"{where}: layer {layer.digest[:19]} is empty, so it is not a tar")
        if said.setdefault(layer.digest, diff_id) != diff_id:
            raise RemoteError(f"{where}: layer {layer.digest[:19]} has two diff_ids")
    return config
