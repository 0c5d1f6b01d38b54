"""Splits a large image into parts, so that an interrupted transfer resumes.

A Docker Engine discards the layers of a failed pull.  So a node first pulls images of the
lowest layers, each with a few more than the one before: the engine keeps their layers, and
the next run reuses them.  When the whole image has arrived, their tags are removed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.registry.model import RawManifest, sha256_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from builder.publish.subject import Image

#: Missing bytes in a part: a few seconds on a slow connection.
PART_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """The lowest layers of an image, as an image."""

    manifest: RawManifest
    config: bytes

    @property
    def config_digest(self) -> str:
        """Digest of its configuration."""
        return sha256_digest(self.config)


def parts_of(image: Image, present: Collection[str], limit: int = PART_BYTES) -> Iterator[Part]:
    """Parts that each add about ``limit`` bytes that are not ``present`` (by diff_id).

    The last layers are not a part: they come with the image itself.
    """
    diff_ids = image.settings.diff_ids or ()
    waiting = 0
    for number, (layer, diff_id) in enumerate(zip(image.layers, diff_ids, strict=True), start=1):
        waiting += 0 if diff_id in present else layer.size
        if waiting >= limit and number < len(diff_ids):
            waiting = 0
            yield _part(image, diff_ids[:number])


def _part(image: Image, diff_ids: Sequence[str]) -> Part:
    platform = image.settings.platform
    small = {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": list(diff_ids)}}
    data = json.dumps(small, sort_keys=True, separators=(",", ":")).encode()
    layers = image.manifest.json()["layers"][: len(diff_ids)]
    document = {
        "schemaVersion": 2,
        "mediaType": image.manifest.media_type,
        "config": {
            "mediaType": image.config.media_type,
            "digest": sha256_digest(data),
            "size": len(data),
        },
        "layers": layers,
    }
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return Part(manifest=RawManifest(data=raw, media_type=image.manifest.media_type), config=data)
