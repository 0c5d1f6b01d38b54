"""Small images, real ones, in OCI layouts; the same seed gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from typing import TYPE_CHECKING, Any

from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    RawManifest,
    sha256_digest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Sizes of the files in the layers: one that goes in one piece, one that takes several.
SIZES = (2_000, 150_000)


def layer(seed: str, size: int) -> tuple[bytes, str]:
    """A gzipped tar with one file that does not compress, and its diff ID."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(f"data/{seed}")
        info.size = size
        tar.addfile(info, io.BytesIO(random.Random(seed).randbytes(size)))
    return gzip.compress(out.getvalue(), 0, mtime=0), sha256_digest(out.getvalue())


def document(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def put(layout: LayoutDirectory, data: bytes, media_type: str) -> Descriptor:
    blob = Descriptor(media_type=media_type, digest=sha256_digest(data), size=len(data))
    layout.put_blob(blob, io.BytesIO(data))
    return blob


def add_image(
    layout: LayoutDirectory,
    seed: str,
    *,
    architecture: str = "arm64",
    docker: bool = False,
    sizes: Sequence[int] = SIZES,
) -> RawManifest:
    """One image for one platform; its manifest is stored but has no name yet."""
    layers = [layer(f"{seed}-{number}", size) for number, size in enumerate(sizes)]
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": {"seed": seed}},
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
    }
    layer_type, config_type = (
        (DOCKER_LAYER_GZIP, DOCKER_CONFIG) if docker else (OCI_LAYER_GZIP, OCI_CONFIG)
    )
    media_type = DOCKER_MANIFEST if docker else OCI_MANIFEST
    data = document(
        {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": put(layout, document(config), config_type).as_json(),
            "layers": [put(layout, blob, layer_type).as_json() for blob, _ in layers],
        }
    )
    manifest = RawManifest(data=data, media_type=media_type)
    layout.put_manifest(manifest, manifest.digest)
    return manifest


def entry(manifest: RawManifest, architecture: str) -> dict[str, Any]:
    """How an index lists it."""
    platform = {"os": "linux", "architecture": architecture}
    return {**manifest.descriptor.as_json(), "platform": platform}


def image(path: Path, seed: str = "one", name: str = "v1", **how: Any) -> RawManifest:
    """A layout with one image."""
    layout = LayoutDirectory(path)
    manifest = add_image(layout, seed, **how)
    layout.put_manifest(manifest, name)
    return manifest


def index(path: Path, seed: str = "many", name: str = "v1", *, docker: bool = False) -> RawManifest:
    """A layout with an index of two platforms, and what BuildKit adds: an attestation for one."""
    layout = LayoutDirectory(path)
    entries, first = [], ""
    for architecture in ("arm64", "amd64"):
        manifest = add_image(layout, f"{seed}-{architecture}", architecture=architecture,
                             docker=docker)  # fmt: skip
        entries.append(entry(manifest, architecture))
        first = first or manifest.digest
    if not docker:
        statement = add_image(layout, f"{seed}-attestation", architecture="unknown", sizes=(100,))
        entries.append(
            {
                **statement.descriptor.as_json(),
                "platform": {"os": "unknown", "architecture": "unknown"},
                "annotations": {"vnd.docker.reference.digest": first},
            }
        )
    media_type = DOCKER_INDEX if docker else OCI_INDEX
    value = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
    made = RawManifest(data=document(value), media_type=media_type)
    layout.put_manifest(made, name)
    return made


def check(path: Path, name: str = "v1") -> str:
    """Read every blob of an image of a layout from its file, by our own hash; gives its digest."""
    listed = json.loads((path / "index.json").read_bytes())["manifests"]
    found = [e for e in listed if name in e.get("annotations", {}).values()]
    assert len(found) == 1, listed
    pending, blobs = [found[0]], path / "blobs" / "sha256"
    while pending:
        descriptor = pending.pop()
        data = (blobs / descriptor["digest"].removeprefix("sha256:")).read_bytes()
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == descriptor["digest"]
        assert len(data) == descriptor["size"]
        if "manifest" in descriptor["mediaType"] or "index" in descriptor["mediaType"]:
            value = json.loads(data)
            pending += value.get("manifests", [])
            pending += [value["config"], *value["layers"]] if "config" in value else []
    return str(found[0]["digest"])
