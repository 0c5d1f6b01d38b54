"""Overlays: for a base of released wheels, an image of the changed and added files alone.

They lie at the paths that they have in the image they are meant for.  Removed files stand in the
receipts.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import bake
from builder.engines.contents import image_layers
from builder.engines.kept import MadeOf
from builder.engines.layertar import WHITEOUT
from builder.engines.scratch import say_layer
from builder.errors import UsageError
from builder.registry.model import OCI_CONFIG, OCI_MANIFEST, RawManifest

if TYPE_CHECKING:
    from builder.engines.scratch import Scratch
    from builder.model import BuildPlan


def write_overlay(scratch: Scratch, plan: BuildPlan) -> tuple[RawManifest, int]:
    """Write layers, configuration and manifest; gives the manifest and the layers' bytes."""
    epoch, created = bake.timestamp(plan), bake.created(plan)
    blobs, history = [], []
    for name, files in image_layers(plan):
        blob = scratch.add_layer(files, epoch, MadeOf.of(plan, [name]))
        say_layer(name, len(files), blob)
        blobs.append(blob)
        history.append({"created": created, "created_by": f"spark-build layer {name}"})
    config = scratch.add_json(
        {
            "architecture": plan.base.platform.architecture,
            "os": "linux",
            "created": created,
            "config": {
                "Env": [f"{k}={v}" for k, v in sorted(plan.env.items())],
                "Labels": bake.labels(plan),
            },
            "rootfs": {"type": "layers", "diff_ids": [b.diff_id for b in blobs]},
            "history": history,
        },
        OCI_CONFIG,
    )
    manifest = scratch.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": config.descriptor(),
            "layers": [b.descriptor() for b in blobs],
            "annotations": bake.labels(plan),
        },
        OCI_MANIFEST,
    )
    return manifest, sum(b.size for b in blobs)


def layout_digest(layout: Path) -> str:
    """The manifest digest of a single-image layout.

    Raises:
        UsageError: the directory is not such a layout.
    """
    try:
        index = json.loads((layout / "index.json").read_bytes())
        (entry,) = index["manifests"]
        digest: str = entry["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{layout} is not an OCI layout of one image: {error}") from None
    return digest


def overlay_recipe(plan: BuildPlan, overlay: str) -> str:
    """How an overlay (``oci:DIR`` or an image name) goes onto the image it is meant for.

    Plain Dockerfile lines: copied files, then one step that takes replaced files away and checks
    the others against their receipts.
    """
    base = f"vllm/vllm-openai:v{plan.base.packages.get('vllm')}"
    python, site = plan.base.interpreter, plan.base.site_packages
    script = f"{bake.SHARE}/spark_apply.py"
    finish = json.dumps([python, "-B", script, "finish", "--root", site])
    source, how = overlay, "docker buildx build -t IMAGE -"
    if overlay.startswith("oci:"):
        folder = Path(overlay.removeprefix("oci:")).absolute()
        how = f"docker buildx build --build-context overlay=oci-layout://{folder} -t IMAGE -"
        source = "overlay"
    lines = [
        f"# {how} <this file",
        f"FROM {base}",
        f"COPY --from={source} / /",
        f"RUN --network=none {finish}",
        *(f"ENV {name}={bake.quoted(value)}" for name, value in sorted(plan.env.items())),
    ]
    return "\n".join(lines) + "\n"


def _blob(layout: Path, digest: str) -> bytes:
    try:
        data = (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
    except OSError as error:
        raise UsageError(f"{layout}: blob {digest} cannot be read: {error}") from None
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise UsageError(f"{layout}: blob {digest} is damaged")
    return data


def _manifest_and_config(layout: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = json.loads(_blob(layout, layout_digest(layout)))
    return manifest, json.loads(_blob(layout, manifest["config"]["digest"]))


def labels_of_layout(layout: Path) -> dict[str, str]:
    """The labels of a layout's image.

    Raises:
        UsageError: it is not a layout of one image, or a blob is damaged.
    """
    _, config = _manifest_and_config(layout)
    return dict(config["config"].get("Labels") or {})


def read_layout(layout: Path) -> tuple[dict[str, Any], dict[str, bytes | None], dict[str, str]]:
    """An overlay layout as ``(plan, absolute path -> bytes or None for a whiteout, env)``.

    Every blob is checked against its digest.

    Raises:
        UsageError: it is not a layout of ours, or a blob is damaged.
    """
    manifest, config = _manifest_and_config(layout)
    files: dict[str, bytes | None] = {}
    for descriptor in manifest["layers"]:
        data = io.BytesIO(_blob(layout, descriptor["digest"]))
        with tarfile.open(fileobj=data, mode="r:gz") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, name = f"/{member.name}".rpartition("/")
                extracted = tar.extractfile(member)
                assert extracted is not None
                if name.startswith(WHITEOUT):
                    files[f"{folder}/{name.removeprefix(WHITEOUT)}"] = None
                else:
                    files[f"{folder}/{name}"] = extracted.read()
    plan_bytes = files.get(f"{bake.SHARE}/plan.json")
    if plan_bytes is None:
        raise UsageError(f"{layout} was not made by spark-build: it carries no plan")
    env = dict(item.split("=", 1) for item in config["config"].get("Env", []))
    return bake.read_plan(plan_bytes, str(layout)), files, env
