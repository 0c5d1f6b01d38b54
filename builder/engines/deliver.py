"""Deliver a new image to an OCI layout, a registry, or a Docker Engine."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.engines import docker
from builder.engines.model import BuiltImage
from builder.engines.scratch import Scratch
from builder.errors import BuildFailed, UsageError
from builder.registry.compose import FallbackSource
from builder.registry.layout import LayoutDirectory
from builder.registry.layoutwriter import LayoutWriter, add_image, check_layout_target, work_folder
from builder.registry.manifests import blobs, is_index
from builder.rootfs.layers import LayerCache
from builder.util.hints import OUTPUT, os_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.registry.locations import Locations
    from builder.registry.model import ImageSource, RawManifest


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What to write, and where.  ``write`` returns the manifest and the size of new layers."""

    write: Callable[[Scratch], tuple[RawManifest, int]]
    tag: str
    output: Path | None
    push: bool
    #: where the base's manifests and blobs are; None for an image without a base
    base: ImageSource | None = None
    #: connections to the base's registry, if there is one
    locations: Locations | None = None
    thin: bool = False
    platform: Mapping[str, str] = field(default_factory=dict)


def deliver(delivery: Delivery) -> BuiltImage:
    """Write the image and deliver it; a failure leaves the destination unchanged.

    Raises:
        UsageError: the destination is not writable.
        BuildFailed: the disk is full, or the Docker Engine rejects it.
        RemoteError: a registry failed; no tag was moved.
    """
    cached: dict[tuple[str, str], bool] = {}

    def write(scratch: Scratch) -> tuple[RawManifest, int]:
        made = delivery.write(scratch)
        cached.update(scratch.cached)
        return made

    return replace(_deliver(replace(delivery, write=write)), cached=cached)


def _deliver(delivery: Delivery) -> BuiltImage:
    if delivery.output is not None:
        return _to_layout(delivery, delivery.output)
    if not delivery.push:
        docker.connect().close()  # before anything is written, because it may not be there
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder, _disk(Path(folder)):
        scratch = Scratch(Path(folder) / "layout")
        manifest, added = delivery.write(scratch)
        source = _source(scratch.root, delivery)
        if delivery.push:
            return _to_registry(delivery, source, manifest, added)
        return _to_docker(delivery, source, manifest, added)


def _source(scratch: Path, delivery: Delivery) -> ImageSource:
    """The new image as a source for copies."""
    own = LayoutDirectory(scratch)
    return own if delivery.base is None else FallbackSource(own, delivery.base)


def _to_registry(
    delivery: Delivery, source: ImageSource, manifest: RawManifest, added: int
) -> BuiltImage:
    """Push missing blobs, then the manifests, and the tag last."""
    from builder.registry.copy import copy_image
    from builder.registry.locations import Locations

    with contextlib.ExitStack() as stack:
        locations = delivery.locations or stack.enter_context(Locations())
        place = locations.open(delivery.tag)
        copy_image(source, manifest.digest, place.image, place.reference)
    if not is_index(manifest):
        _remember(source, manifest)
    return BuiltImage(
        ref=delivery.tag,
        digest=manifest.digest,
        added_bytes=added,
        engine="oci",
        target=f"docker://{delivery.tag}@{manifest.digest}",
    )


def _remember(source: ImageSource, manifest: RawManifest) -> None:
    """Index our own layers now, because verification will look them up by digest."""
    own = source.own if isinstance(source, FallbackSource) else source
    cache = LayerCache(own)
    for layer in blobs(manifest)[1:]:
        if isinstance(own, LayoutDirectory) and own.has(layer.digest):
            cache.index(layer).close()


def _to_docker(
    delivery: Delivery, source: ImageSource, manifest: RawManifest, added: int
) -> BuiltImage:
    from builder.engines.load import load_image

    if is_index(manifest):
        raise UsageError(
            "an image for several platforms must go into a registry or a layout",
            hint="--output oci:DIR",
        )
    digest = load_image(source, manifest, delivery.tag)
    return BuiltImage(ref=delivery.tag, digest=digest, added_bytes=added, engine="oci")


def _to_layout(delivery: Delivery, output: Path) -> BuiltImage:
    from builder.registry.copy import copy_image

    target = output.absolute()
    base = delivery.base
    if isinstance(base, LayoutDirectory) and base.path.resolve() == target.resolve():
        raise UsageError(
            f"{target} contains the base image, so it cannot be the output too",
            hint="--output oci:DIR",
        )
    with new_layout(output, delivery.tag) as layout:
        scratch = Scratch(layout)
        manifest, added = delivery.write(scratch)
        if delivery.base is not None and not delivery.thin:
            source = _source(layout, delivery)
            copy_image(source, manifest.digest, LayoutWriter(layout, target), manifest.digest)
        scratch.finish(manifest, delivery.platform, delivery.tag)
    built = BuiltImage(ref=delivery.tag, digest=manifest.digest, added_bytes=added, engine="oci")
    return in_layout(built, output)


def in_layout(built: BuiltImage, output: Path) -> BuiltImage:
    """An image in a layout, which may have other images."""
    ref = f"oci:{output}"
    return replace(built, ref=ref, name=built.ref, target=f"{ref}@{built.digest}")


@contextlib.contextmanager
def new_layout(output: Path, name: str) -> Iterator[Path]:
    """A temporary layout for one image, which is added to ``output`` on success.

    Raises:
        UsageError: ``output`` is something else.
        RemoteError: ``output`` is a layout with a damaged index.
        BuildFailed: the disk is full or not writable.
    """
    target = output.absolute()
    with _disk(target):
        check_layout_target(target)
        with work_folder(target) as work:
            yield work / "layout"
            add_image(work / "layout", target, name)


@contextlib.contextmanager
def _disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildFailed(
            f"cannot write {target}: {error.strerror}; no partial output was left",
            hint=os_hint(error, OUTPUT),
        ) from error
