"""An OCI image layout that is being written: our own layers, configurations and manifests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.engines.layertar import Owners, tar_layer
from builder.registry.model import OCI_INDEX, OCI_LAYER_GZIP, RawManifest, sha256_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.runtime.spark_apply import Content


@dataclass(frozen=True)
class Blob:
    """A blob in the layout, and for layers the digest of the uncompressed tar."""

    digest: str
    size: int
    media_type: str
    diff_id: str = ""

    def descriptor(self) -> dict[str, Any]:
        """The OCI content descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


class Scratch:
    """A layout next to its final place, or in a temporary one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add_layer(
        self, files: Mapping[str, Content | None], epoch: int, owners: Owners | None = None
    ) -> Blob:
        """Add a layer of absolute paths."""
        partial = self.root / "blobs" / "partial"
        with partial.open("wb") as out:
            digest, diff_id, size = tar_layer(out, files, epoch, owners)
        partial.replace(self._path(digest))
        return Blob(digest, size, OCI_LAYER_GZIP, diff_id)

    def add_json(self, value: object, media_type: str) -> Blob:
        """Add a JSON blob."""
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        digest = sha256_digest(data)
        self._path(digest).write_bytes(data)
        return Blob(digest, len(data), media_type)

    def add_manifest(self, value: object, media_type: str) -> RawManifest:
        """Add a manifest or an index."""
        blob = self.add_json(value, media_type)
        return RawManifest(data=self._path(blob.digest).read_bytes(), media_type=media_type)

    def finish(self, manifest: RawManifest, platform: Mapping[str, Any], name: str) -> None:
        """Write ``index.json`` and ``oci-layout``; an index has no ``platform`` of its own."""
        entry = {
            **manifest.descriptor.as_json(),
            **({"platform": dict(platform)} if platform else {}),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        (self.root / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
