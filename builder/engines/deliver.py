"""Bring a new image where it should be: an OCI layout, a registry, or a Docker Engine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.engines import BuiltImage, docker
from builder.engines.scratch import Scratch
from builder.errors import BuildFailed, UsageError
from builder.locks import locked
from builder.registry.compose import Composed
from builder.registry.layout import LayoutDirectory
from builder.registry.manifests import blobs, is_index
from builder.rootfs.layers import LayerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.registry.locations import Locations
    from builder.registry.model import ImageSource, RawManifest


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What to write, and where to.  ``write`` gives the manifest and the bytes of new layers."""

    write: Callable[[Scratch], tuple[RawManifest, int]]
    tag: str
    output: Path | None
    push: bool
    #: where the base's manifests and blobs are; None for an image that stands on nothing
    base: ImageSource | None = None
    #: connections to the base's registry, where there is one
    locations: Locations | None = None
    thin: bool = False
    platform: Mapping[str, Any] = field(default_factory=dict)


def deliver(delivery: Delivery) -> BuiltImage:
    """Write the image and bring it there; a failure leaves the place as it was.

    Raises:
        UsageError: the place is not one that may be written.
        BuildFailed: the disk or the Docker Engine does not take it.
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
    """The new image as something to copy from."""
    own = LayoutDirectory(scratch)
    return own if delivery.base is None else Composed(own, delivery.base)


def _to_registry(
    delivery: Delivery, source: ImageSource, manifest: RawManifest, added: int
) -> BuiltImage:
    """Blobs that are not there, mounted or sent, then the manifests, and the tag last."""
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
    """Index our own layers while they are here: verification will ask for them by digest."""
    own = source.own if isinstance(source, Composed) else source
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
            "an image for several platforms goes into a registry or a layout",
            hint="--push --tag HOST/NAME:TAG, or --output oci:DIR",
        )
    digest = load_image(source, manifest, delivery.tag)
    return BuiltImage(ref=delivery.tag, digest=digest, added_bytes=added, engine="oci")


def _to_layout(delivery: Delivery, output: Path) -> BuiltImage:
    target = output.absolute()
    _check_target(target, delivery.base)
    with locked(str(target), wait=False):
        manifest, added = _replace(target, delivery)
    return BuiltImage(ref=f"oci:{output}", digest=manifest.digest, added_bytes=added, engine="oci")


def _replace(target: Path, delivery: Delivery) -> tuple[RawManifest, int]:
    """Write beside the target, then rename: it is the old layout or the new one, never half."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _disk(target):
            scratch = Scratch(work / "layout")
            manifest, added = delivery.write(scratch)
            if delivery.base is not None and not delivery.thin:
                _complete(scratch.root, delivery, manifest)
            scratch.finish(manifest, delivery.platform, delivery.tag)
            _swap(work / "layout", target, work / "previous")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest, added


@contextlib.contextmanager
def new_layout(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` to write a layout to, which takes its place if all goes well.

    Raises:
        UsageError: something else is there, or another run is writing it.
        BuildFailed: the disk does not take it.
    """
    target = output.absolute()
    _check_target(target, None)
    with locked(str(target), wait=False), _disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield work / "layout"
            _swap(work / "layout", target, work / "previous")
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _complete(layout: Path, delivery: Delivery, manifest: RawManifest) -> None:
    """Bring the base's blobs in."""
    from builder.registry.copy import copy_image

    source = _source(layout, delivery)
    copy_image(source, manifest.digest, LayoutDirectory(layout), manifest.digest)


@contextlib.contextmanager
def _disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildFailed(
            f"cannot write {target}: {error.strerror}; nothing was left there",
            hint="free some space, or choose another place with --output oci:DIR",
        ) from error


def _swap(layout: Path, target: Path, previous: Path) -> None:
    try:
        if target.exists():
            target.rename(previous)
        layout.rename(target)
    except BaseException:
        if previous.exists() and not target.exists():
            previous.rename(target)
        raise


def _check_target(target: Path, source: ImageSource | None) -> None:
    ours = (target / "oci-layout").is_file() or not target.exists()
    if not ours and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"{target} exists and is not an OCI layout, so it is not replaced",
            hint="choose another place with --output oci:DIR",
        )
    if isinstance(source, LayoutDirectory) and source.path.absolute() == target:
        raise UsageError(
            f"{target} holds the base, so it is not replaced",
            hint="choose another place with --output oci:DIR",
        )
