"""An image in this machine's Docker Engine, with the layers that nodes lack, as an OCI layout.

The engine writes whole images as one stream (``docker save``), an OCI layout from Docker 25 on.
Layers that every node has are read past and not stored.
"""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from builder.common.console import console, megabytes
from builder.common.diskspace import Need, check_room
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.engines import docker
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Descriptor,
    RawManifest,
    parse_json,
)
from builder.publishing.sources import StoredImage
from builder.publishing.subject import read_subject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from builder.publishing.distribute.node import Node
    from builder.publishing.sources import EngineImage

_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_INDEX = "index.json"
#: Larger blobs are layers, so they are no manifest.
_LIMIT = 4 << 20
_UNKNOWN = "application/octet-stream"


def layers_of_all(nodes: Sequence[Node], jobs: int) -> frozenset[str]:
    """Layers, by diff_id, that every node that answers has."""

    def survey(node: Node) -> frozenset[str] | None:
        try:
            return node.survey().layers
        except SparkBuildError:
            return None  # the transfer to it says why

    with ThreadPoolExecutor(jobs) as pool:
        found = [layers for layers in pool.map(survey, nodes) if layers is not None]
    return frozenset.intersection(*found) if found else frozenset()


@contextmanager
def saved(opened: EngineImage, present: Collection[str]) -> Iterator[StoredImage]:
    """The image as a layout in a temporary folder, without the layers in ``present``.

    Raises:
        EngineError: the engine fails.
        UsageError: it is too old, or the disk has no room.
    """
    size = int(opened.held.image.attrs.get("Size") or 0)
    if not present:
        check_room([Need.temporary(size, f"the layers of {opened.ref}")])
    console.say(f"  reading {opened.ref} from Docker, {megabytes(size)}")
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        layout = LayoutDirectory(Path(folder))
        image = opened.held.id
        with docker.saving(opened.ref.text):
            files = docker.saved_files(opened.held.client, image)
            manifest = store(layout, files, image, present)
        layout.put_manifest(manifest, "")
        yield StoredImage(
            ref=opened.ref, source=layout, subject=read_subject(layout, manifest.digest)
        )


def store(
    layout: LayoutDirectory,
    files: Iterable[tuple[str, int, IO[bytes]]],
    image: str,
    present: Collection[str],
) -> RawManifest:
    """Store the files of a saved image, and return the manifest of the image with this ID.

    ``files`` are names, sizes and contents; ``present`` are digests that are not stored.

    Raises:
        UsageError: the stream is not an OCI layout.
        RemoteError: it is damaged, or does not have the image.
    """
    index, blobs = b"", 0
    for name, size, content in files:
        match = _BLOB.fullmatch(name)
        digest = f"sha256:{match[1]}" if match else ""
        if digest:
            blobs += 1
        if digest and digest not in present:
            layout.put_blob(Descriptor(media_type=_UNKNOWN, digest=digest, size=size), content)
        elif name == _INDEX:
            index = content.read(_LIMIT)
    if not index or not blobs:
        raise UsageError(
            "this Docker Engine does not save images as OCI layouts: Docker 25 and later do",
            hint="build the image with --output oci:DIR, and distribute oci:DIR",
        )
    found = [m for m in _manifests(layout, _document(index, _INDEX), 2) if _is(layout, m, image)]
    if len(found) != 1:
        raise RemoteError(f"Docker saved {len(found)} images for {image}, not one")
    return found[0]


def _document(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RemoteError(f"Docker saved a malformed {what}: {error}") from None
    return value if isinstance(value, dict) else {}


def _manifests(
    layout: LayoutDirectory, document: dict[str, Any], depth: int
) -> Iterator[RawManifest]:
    """The manifests of an index that were saved; those of other platforms were not."""
    entries = document.get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        descriptor = Descriptor.parse(entry, _INDEX)
        if descriptor.size > _LIMIT or not layout.has(descriptor.digest):
            continue
        manifest = layout.manifest(descriptor.digest)
        kind = manifest.json().get("mediaType") or descriptor.media_type
        if kind in INDEX_TYPES and depth:
            yield from _manifests(layout, manifest.json(), depth - 1)
        elif kind in MANIFEST_TYPES:
            yield RawManifest(data=manifest.data, media_type=str(kind))


def _is(layout: LayoutDirectory, manifest: RawManifest, image: str) -> bool:
    """Whether a manifest is the image, and not an attestation beside it.

    An image's ID is the digest of its configuration, or of its manifest or index if containerd
    stores it.
    """
    subject = read_subject(layout, manifest.digest)
    (one,) = subject.images
    platform = one.settings.platform
    return image in (manifest.digest, one.config.digest) or (
        bool(one.settings.diff_ids) and platform.get("os") == "linux"
    )
