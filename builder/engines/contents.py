"""The files that a plan adds to an image, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.receipts import kept_true
from builder.engines import metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.applier.trees import Content
    from builder.model.plan import BuildPlan, LayerDecision


def added_bytes(plan: BuildPlan) -> int:
    """Uncompressed size in bytes of the files that a plan adds to an image."""
    return sum(content_bytes(files) for _, files in image_layers(plan))


def content_bytes(files: Mapping[str, Content | None]) -> int:
    """Size of files in bytes; removed files count as 0."""
    return sum(file.size for file in files.values() if file is not None)


def image_layers(plan: BuildPlan) -> list[tuple[str, dict[str, Content | None]]]:
    """The image's layers as ``(name, absolute path -> content)``, bottom first.

    An overlay has no base, so it has no whiteouts (an engine cannot unpack a whiteout for a file
    that does not exist): its receipts list removed files, and ``spark_apply.pyz finish`` removes
    them. It also updates RECORD there, because the image's RECORD has more entries than the
    wheel's.  For other images the last layer has every RECORD once, in its final form.
    """
    alone = plan.base.is_wheels
    records = kept_true(d.receipt for d in plan.needed if d.receipt is not None)
    site = plan.base.site_packages
    layers: list[tuple[str, dict[str, Content | None]]] = []
    for decision in plan.needed:
        files = {
            metadata.placed(f"{site}/{path}", plan.base.links): content
            for path, content in decision.changes.items()
            if (content is not None or not alone) and path not in _records(decision)
        }
        layers.append((decision.name, files))
    last: dict[str, Content | None] = dict(metadata.baked_files(plan))
    kept = {} if alone else {path: plan.changes[path] for path in sorted(records)}
    last.update(
        {
            metadata.placed(f"{site}/{path}", plan.base.links): content
            for path, content in kept.items()
            if content is not None  # else the layer that took it away says so
        }
    )
    layers.append(("spark-build", last))
    return layers


def _records(decision: LayerDecision) -> set[str]:
    """The RECORD files that a layer's changes affect, updated."""
    return kept_true([decision.receipt] if decision.receipt is not None else [])
