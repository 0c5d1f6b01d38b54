"""Loads an image into a Docker Engine as a stream, like ``docker load``."""

from __future__ import annotations

import contextlib
import json
import tarfile
from typing import TYPE_CHECKING, Any, cast

from builder.engines import docker
from builder.errors import BuildFailed
from builder.registry.manifests import blobs
from builder.registry.model import OCI_INDEX, Descriptor
from builder.rootfs.image import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from docker import DockerClient

    from builder.registry.model import ImageSource, RawManifest

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
    from builder.registry.reference import parse_reference

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
