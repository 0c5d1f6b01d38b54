"""Deliver a new image to an OCI layout, a registry, or a Docker Engine.

An engine gets it as a stream, like ``docker load``.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from builder.common.hints import OUTPUT, os_hint
from builder.common.model.reference import Ref
from builder.errors import BuildFailed, UsageError
from builder.images.engines import docker
from builder.images.engines.layers import Scratch
from builder.images.engines.model import BuiltImage
from builder.images.registry.layout import (
    FallbackSource,
    LayoutDirectory,
    LayoutWriter,
    add_image,
    check_layout_target,
    work_folder,
)
from builder.images.registry.model import OCI_INDEX, Descriptor, blobs, is_index
from builder.images.rootfs.image import read_config
from builder.images.rootfs.layers import LayerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from docker import DockerClient

    from builder.images.registry.locations import Locations
    from builder.images.registry.model import ImageSource, RawManifest


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
    from builder.images.registry.copy import copy_image
    from builder.images.registry.locations import Locations

    with contextlib.ExitStack() as stack:
        locations = delivery.locations or stack.enter_context(Locations())
        place = locations.open(Ref(delivery.tag))
        copy_image(source, manifest.digest, place.image, place.reference)
    if not is_index(manifest):
        _remember(source, manifest)
    return BuiltImage(
        ref=Ref(delivery.tag),
        digest=manifest.digest,
        added_bytes=added,
        engine="oci",
        target=Ref(f"docker://{delivery.tag}@{manifest.digest}"),
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

    if is_index(manifest):
        raise UsageError(
            "an image for several platforms must go into a registry or a layout",
            hint="--output oci:DIR",
        )
    digest = load_image(source, manifest, delivery.tag)
    return BuiltImage(ref=Ref(delivery.tag), digest=digest, added_bytes=added, engine="oci")


def _to_layout(delivery: Delivery, output: Path) -> BuiltImage:
    from builder.images.registry.copy import copy_image

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
    ref = Ref(delivery.tag)
    built = BuiltImage(ref=ref, digest=manifest.digest, added_bytes=added, engine="oci")
    return in_layout(built, output)


def in_layout(built: BuiltImage, output: Path) -> BuiltImage:
    """An image in a layout, which may have other images."""
    ref = Ref(f"oci:{output}")
    return replace(built, ref=ref, name=built.ref.text, target=Ref(f"{ref}@{built.digest}"))


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


# ----------------------------------------------------------------------------- into a Docker Engine


_BLOCK = 512
_CHUNK = 1 << 20


def load_image(source: ImageSource, manifest: RawManifest, tag: str) -> str:
    """Load an image under a tag; returns its ID in the engine.

    Layers that the engine already has are not sent.  With the containerd image
    store the ID is the manifest's digest.

    Raises:
        EngineError: no Docker Engine responds.
        BuildFailed: the engine rejects it.
        RemoteError: a blob of the base cannot be read.
    """
    import requests
    from docker.errors import DockerException

    client = docker.connect()
    try:
        diff_ids = read_config(source, manifest).diff_ids or ()
        known = _known_layers(client, diff_ids)
        if known:
            with contextlib.suppress(DockerException, requests.RequestException):
                return _load(client, archive(source, manifest, tag, skip=known), tag, diff_ids)
            # the engine needs all of them
        return _load(client, archive(source, manifest, tag), tag, diff_ids)
    except (DockerException, requests.RequestException) as error:
        words = getattr(error, "explanation", None) or error.__class__.__name__
        raise BuildFailed(f"{tag}: the Docker Engine cannot load it: {words}") from None
    finally:
        client.close()


def _load(client: DockerClient, tar: Iterator[bytes], tag: str, diff_ids: Sequence[str]) -> str:
    from docker.errors import ImageLoadError

    client.images.load(cast("Any", tar))
    image = client.images.get(tag)
    if image.attrs["RootFS"]["Layers"] != list(diff_ids):
        raise ImageLoadError(f"{tag} was loaded with different layers")
    return str(image.id)


def _known_layers(client: DockerClient, diff_ids: Sequence[str]) -> int:
    """The number of lowest layers that the engine already has in some image."""
    from docker.errors import DockerException

    best = 0
    try:
        for image in client.images.list():
            held = image.attrs.get("RootFS", {}).get("Layers") or []
            pairs = enumerate(zip(held, diff_ids, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(held), len(diff_ids)))
            best = max(best, same)
    except DockerException:
        return 0
    return best


def archive(
    source: ImageSource, manifest: RawManifest, tag: str, *, skip: int = 0
) -> Iterator[bytes]:
    """The tar for ``docker load``: an OCI layout, with Docker's older ``manifest.json``.

    The first ``skip`` layers are left out.
    """
    config, *layers = blobs(manifest)
    named = {
        "io.containerd.image.name": _full_name(tag),
        "org.opencontainers.image.ref.name": tag.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [{**manifest.descriptor.as_json(), "annotations": named}],
    }
    older = {
        "Config": _path(config),
        "RepoTags": [tag],
        "Layers": [_path(layer) for layer in layers],
    }
    yield from _file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    yield from _file("index.json", json.dumps(index).encode())
    yield from _file("manifest.json", json.dumps([older]).encode())
    yield from _file(_path(manifest.descriptor), manifest.data)
    sent = {layer.digest for layer in layers[:skip]}
    for blob in (config, *layers):
        if blob.digest not in sent:
            sent.add(blob.digest)
            yield from _blob(source, blob)
    yield bytes(2 * _BLOCK)


def _full_name(tag: str) -> str:
    from builder.images.registry.reference import parse_reference

    return str(parse_reference(tag))


def _path(blob: Descriptor) -> str:
    return f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)


def _file(name: str, data: bytes) -> Iterator[bytes]:
    yield _header(name, len(data)) + data + bytes(-len(data) % _BLOCK)


def _blob(source: ImageSource, blob: Descriptor) -> Iterator[bytes]:
    yield _header(_path(blob), blob.size)
    with source.open(blob) as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
    yield bytes(-blob.size % _BLOCK)
