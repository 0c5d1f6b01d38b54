"""A new OCI layout during writing: added layers, configurations and manifests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.engines.contents import content_bytes
from builder.engines.layercache import (
    CachedLayer,
    LayerInputs,
    cache_layer,
    layer_key,
    take_cached_layer,
)
from builder.engines.layertar import Owners, tar_layer
from builder.registry.model import OCI_INDEX, OCI_LAYER_GZIP, RawManifest, sha256_digest
from builder.util.console import console, megabytes
from builder.util.locks import locked

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.applier.trees import Content


@dataclass(frozen=True)
class Blob:
    """A blob in the layout; ``diff_id`` is the digest of a layer's uncompressed tar."""

    digest: str
    size: int
    media_type: str
    diff_id: str = ""
    #: whether it came from the cache
    cached: bool = False

    def descriptor(self) -> dict[str, str | int]:
        """The OCI content descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


def say_layer(name: str, files: int, blob: Blob) -> None:
    """Print one line about an added layer."""
    kept = "  (kept from an earlier build)" if blob.cached else ""
    console.say(f"  {name:<28.28}{files:>5} files {megabytes(blob.size):>10}{kept}")


class Scratch:
    """A layout being written next to its destination, or in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: (platform, patch layer) -> whether it came from the cache
        self.cached: dict[tuple[str, str], bool] = {}
        (root / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add_layer(
        self,
        files: Mapping[str, Content | None],
        epoch: int,
        made_of: LayerInputs,
        owners: Owners | None = None,
    ) -> Blob:
        """Add a layer from absolute paths, or reuse the cached layer with the same inputs."""
        partial = self.root / "blobs" / "partial"
        owners = owners or Owners()
        key = layer_key(made_of, files, epoch, owners)
        with locked(f"layer {key}"):
            kept = take_cached_layer(key, partial)
            cached = kept is not None
            if kept is None:
                title, total = f"writing {'+'.join(made_of.names)}", content_bytes(files)
                with console.progress(title, total, said=False) as bar, partial.open("wb") as out:
                    digest, diff_id, size = tar_layer(out, files, epoch, owners, bar.advance)
                kept = CachedLayer(digest, diff_id, size)
                cache_layer(key, kept, partial)
        partial.replace(self._path(kept.digest))
        self.cached |= {(made_of.platform, name): cached for name in made_of.names}
        return Blob(kept.digest, kept.size, OCI_LAYER_GZIP, kept.diff_id, cached)

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

    def finish(self, manifest: RawManifest, platform: Mapping[str, str], name: str) -> None:
        """Write ``index.json`` and ``oci-layout``; ``platform`` is empty for an index."""
        entry = {
            **manifest.descriptor.as_json(),
            **({"platform": dict(platform)} if platform else {}),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        (self.root / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
