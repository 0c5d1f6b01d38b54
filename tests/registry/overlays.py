"""Overlays of small made-up packages, as ``spark-build image`` makes them; evidence for them."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import TYPE_CHECKING, Any

from builder.common.plan import ExpectedChoice, Platform
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.images.bases.identify import identify
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_INDEX, RawManifest
from builder.images.subject import BaseRequest
from builder.publishing.subject import read_subject
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    dist_files,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)
from tests.unit.imagefiles import (
    CONFIG,
    Item,
    put_image,
    put_index,
    python_items,
    site_items,
    tar_of,
)
from tests.unit.imagefiles import folder as image_folder

from . import images

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.plan import BuildPlan

FILES = vllm_files() | dist_files("lib", "1", {"lib/__init__.py": ""})
PASS: dict[str, Any] = {"status": "pass", "expected": "x", "seen": "x", "where": "", "reason": ""}


def make_plan(seed: str = "one", architecture: str = "arm64") -> BuildPlan:
    """A plan; another seed is another plan."""
    base = fake_base(FILES, platform=Platform(architecture=architecture))
    layer = make_layer("fix", BACKEND, copy_op("vllm/new.py", f"SEED = {seed!r}\n".encode()))
    return make_plan_of(base, layer)


def build(folder: Path, seed: str = "one", architecture: str = "arm64") -> str:
    """An overlay in a layout; gives its digest."""
    plan = make_plan(seed, architecture)
    request = BuildRequest(plan=plan, tag="spark/test:1", output=folder)
    return OciEngine().build(request).digest


def build_index(folder: Path, seed: str = "one") -> str:
    """A layout with an index of overlays for both platforms; gives its digest."""
    layout = LayoutDirectory(folder)
    entries: list[dict[str, Any]] = []
    for architecture in ("arm64", "amd64"):
        part = folder.with_name(f"{folder.name}-{architecture}")
        digest = build(part, seed, architecture)
        source = LayoutDirectory(part)
        (image,) = read_subject(source, "").images
        for blob in (*image.layers, image.config):
            with source.open(blob) as stream:
                layout.put_blob(blob, stream)
        layout.put_manifest(image.manifest, digest)
        entries.append(images.entry(image.manifest, architecture))
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    made = RawManifest(data=images.document(value), media_type=OCI_INDEX)
    layout.put_manifest(made, "v1")
    return made.digest


def report(digest: str, plan_digest: str, **changes: Any) -> dict[str, Any]:
    """What ``verify --json`` would print of an image that passed everything."""
    checks = [{**PASS, "level": level, "name": "all"} for level in ("static", "imports")]
    checks.append({**PASS, "level": "dispatch", "name": "line", "status": "not-run", "moot": True})
    value = {
        "schema": 1,
        "target": "oci:/home/somebody/out",
        "digests": [digest],
        "plan_digest": plan_digest,
        "passed": True,
        "not_run": 0,
        "checks": checks,
    }
    return {**value, **changes}


def evidence(folder: Path, file: Path | None = None, **changes: Any) -> Path:
    """A file with evidence for every image of a layout."""
    subject = read_subject(LayoutDirectory(folder), "")
    rows = [report(image.digest, image.plan_digest, **changes) for image in subject.ours]
    target = file or folder.with_suffix(".evidence.json")
    target.write_text(json.dumps(rows if len(rows) > 1 else rows[0]))
    return target


def put_base(folder: Path, where: str, size: int = 1000) -> str:
    """An index of two images with a small vLLM and a layer of ``size`` random bytes, in a registry:
    ``HOST/NAME:TAG``, which is given back."""
    layers = (  # not compressed, so that their digests are their diff_ids
        tar_of(image_folder("opt/"), *python_items()),
        tar_of(*site_items()),
        tar_of(Item("opt/filler", random.Random(where).randbytes(size))),
    )
    kind = "application/vnd.oci.image.layer.v1.tar"
    parts = {
        name: put_image(folder, *layers, architecture=name, config=CONFIG, layer_type=kind)
        for name in ("arm64", "amd64")
    }
    put_index(folder, parts, "v1")
    with Locations() as places:
        location = places.open(Ref(where))
        copy_image(LayoutDirectory(folder), "v1", location.image, location.reference)
    return where


def build_on(base: str, folder: Path, *, thin: bool = True, platform: str | None = None) -> str:
    """Patch a base in a registry into a layout; gives the digest.  One line is expected of it."""
    request = BaseRequest(
        ref=Ref(f"docker://{base}"), platform=platform, pins={}, index=PackageIndex()
    )
    found = identify(request)
    layers = (
        make_layer("fix", BACKEND),
        make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")),
    )
    try:
        plan = make_plan_of(found, *layers)
        plan = dataclasses.replace(plan, expect=(ExpectedChoice(kind="x", line="y"),))
        building = BuildRequest(plan=plan, tag="x:1", output=folder, base=found, thin=thin)
        return OciEngine().build(building).digest
    finally:
        found.close()
