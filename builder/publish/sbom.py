"""A CycloneDX 1.6 bill of materials: the files that layers add, and their origin.

It covers only what spark-build adds; the base's publisher provides the base's own.  It is written
here and not with a library, so that a plan gives the same bytes with any installed versions; the
tests validate it with CycloneDX's own schema.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from builder import __version__
from builder.engines.metadata import LABEL_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.documents.compiled import Input, ToolkitImage
    from builder.documents.plan import BakedPlan, PlannedLayer
    from builder.publish.baked import Baked
    from builder.publish.subject import Image

MEDIA_TYPE = "application/vnd.cyclonedx+json"
SPEC_VERSION = "1.6"


def bill_of_materials(image: Image, baked: Baked) -> bytes:
    """The document as canonical JSON: the source wheels, then the files."""
    plan = baked.plan
    parts = [*_wheels(plan), *_files(plan, baked.files)]
    root = f"image:{image.digest}"
    document = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        # the serial number is derived from the image: no clock, no randomness
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, image.digest)}",
        "version": 1,
        "metadata": {
            "timestamp": image.created,
            "tools": {
                "components": [
                    {"type": "application", "name": "spark-build", "version": __version__}
                ]
            },
            "component": {
                "type": "container",
                "bom-ref": root,
                "name": plan.name,
                "version": image.digest,
                "hashes": [_hash(image.digest)],
                "properties": _properties(
                    {
                        "plan": plan.plan_digest,
                        "base": plan.base.ref,
                        "base-digest": plan.base.digest,
                        "platform": plan.base.platform,
                    }
                ),
            },
        },
        "components": parts,
        "dependencies": [
            {"ref": root, "dependsOn": sorted(p["bom-ref"] for p in parts)},
            *({"ref": ref} for ref in sorted(p["bom-ref"] for p in parts)),
        ],
    }
    if not image.created:
        del document["metadata"]["timestamp"]  # type: ignore[attr-defined]
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest.removeprefix("sha256:")}


def _properties(values: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"name": f"{LABEL_PREFIX}:{k}", "value": str(v)} for k, v in values.items()]


def purl(distribution: str, version: str, filename: str = "") -> str:
    """The package URL of a release on the package index, or of sources in a repository."""
    name = f"pkg:pypi/{quote(distribution, safe='')}@{quote(version, safe='')}"
    kind = "vcs_url" if filename.startswith("git+") else "file_name"
    return f"{name}?{kind}={quote(filename, safe='')}" if filename else name


def inputs_of_layer(layer: PlannedLayer) -> list[Input]:
    """A layer's inputs: wheels, and the inputs of its compile stage."""
    stage = layer.compile.stage if layer.compile else None
    return [*layer.inputs, *(stage.inputs if stage else ())]


def toolkit_of_layer(layer: PlannedLayer) -> ToolkitImage | None:
    """The image in which a layer's change was compiled."""
    return layer.compile.stage.toolkit if layer.compile and layer.compile.stage else None


def inputs_of(plan: BakedPlan) -> Iterable[Input]:
    """Every wheel that the plan uses, once, sorted by file name."""
    seen = {
        item.filename: item
        for layer in plan.layers
        if layer.state == "needed"
        for item in inputs_of_layer(layer)
    }
    return [seen[name] for name in sorted(seen)]


def _wheels(plan: BakedPlan) -> Iterable[dict[str, Any]]:
    """Releases that provide files, with the file names if not the whole wheel."""
    taken: dict[str, set[str]] = {}
    for layer in plan.layers:
        for item in inputs_of_layer(layer):
            taken.setdefault(item.filename, set()).add(item.member or "the whole wheel")
    for item in inputs_of(plan):
        yield {
            "type": "library",
            "bom-ref": f"wheel:{item.filename}",
            "name": item.distribution,
            "version": item.version,
            "purl": purl(item.distribution, item.version, item.filename),
            "hashes": [_hash(item.sha256)],
            "properties": [
                {"name": f"{LABEL_PREFIX}:taken", "value": member}
                for member in sorted(taken[item.filename])
            ],
        }


def _files(plan: BakedPlan, baked: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    """Patched files in their final form, without removed ones, and
    the files that spark-build itself adds."""
    site = plan.base.site_packages
    last: dict[str, tuple[str, str | None]] = {
        path: ("spark-build", digest) for path, digest in baked.items()
    }
    for layer in plan.layers:
        for entry in layer.files:
            last[f"{site}/{entry.path}"] = (layer.name, entry.after)
    for path, (name, digest) in sorted(last.items()):
        if digest is not None:
            yield {
                "type": "file",
                "bom-ref": f"file:{path}",
                "name": path,
                "hashes": [_hash(digest)],
                "properties": _properties({"layer": name}),
            }
