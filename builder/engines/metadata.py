"""An image's metadata: plan, layers, the applier and the in-image verifier."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from builder.applier.failures import ApplyError
from builder.applier.layers import Layer
from builder.applier.trees import Content
from builder.documents.plan import BakedPlan
from builder.engines.commands import commands
from builder.engines.devicedata import device_data
from builder.engines.toolfiles import APPLIER, programs
from builder.errors import UsageError
from builder.model.base import kind_of
from builder.model.plan import PLAN_SCHEMA, RecordedPlan
from builder.registry.reference import parse_reference
from builder.runtime import TERMS
from builder.util.documents import moment, plain, read
from builder.util.paths import project_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.model.base import BaseIdentity
    from builder.model.plan import BuildPlan

SHARE = "/usr/share/spark-build"
#: Owners and modes that a copy into an image cannot set.
OWNERS = f"{SHARE}/folders.json"
#: Prefix of spark-build's own labels and annotations.
LABEL_PREFIX = "io.github.spark-build"
PLAN_LABEL = f"{LABEL_PREFIX}.plan"
BASE_LABEL = f"{LABEL_PREFIX}.base"
#: Artifact type of an overlay, which is not a runnable image.
OVERLAY_TYPE = "application/vnd.spark-build.overlay.v1"

_VERIFY = """#!/bin/sh
# Checks this image from inside: docker run --rm --gpus all --entrypoint spark-verify IMAGE
exec {interpreter} -B {share}/spark_verify.py "$@"
"""


def baked_files(plan: BuildPlan) -> dict[str, Content]:
    """Absolute path -> content of everything that spark-build adds outside site-packages."""
    layers = [d.layer.rendered for d in plan.decisions]
    flags = {"serve_flags": plan.serve_flags, "moe_serve_flags": plan.moe_serve_flags}
    files = {
        f"{SHARE}/plan.json": indented(_lasting(plan)),
        f"{SHARE}/device.json": indented(plain(device_data(plan.document))),
        f"{SHARE}/layers.json": indented(layers),
        f"{SHARE}/serve-flags.json": indented(flags),
        "/workspace/build-metadata.yaml": build_metadata(plan),
    }
    owned = restored(plan)
    if owned:
        files[OWNERS] = indented(owned)
    contents = {path: Content.of(data) for path, data in files.items()}
    for name, data in programs().items():
        contents[f"{SHARE}/{name}"] = Content.of(data)
    for name in TERMS:
        contents[f"{SHARE}/{name}"] = Content.of(project_file(name).read_bytes())
    interpreter = plan.base.interpreter
    script = _VERIFY.format(interpreter=interpreter, share=SHARE).encode()
    for name, data in {**commands(plan), "spark-verify": script}.items():
        contents[f"/usr/local/bin/{name}"] = Content.of(data, 0o755)
    return {placed(path, plan.base.links): contents[path] for path in sorted(contents)}


def _lasting(plan: BuildPlan) -> dict[str, Any]:
    """The plan without its messages, which can change while the image does not."""
    return replace(plan, hints=(), pulls=()).as_json()


def finish_command(interpreter: str, site: str, *more: str) -> list[str]:
    """The command that completes an image in a container, after files were copied into it."""
    return [interpreter, "-B", f"{SHARE}/{APPLIER}", "finish", "--root", site, *more]


def restored(plan: BuildPlan) -> dict[str, Sequence[int]]:
    """``[mode, uid, gid]`` of the base's folders and replaced files, if not owned by root."""
    base = plan.base
    files = {
        placed(f"{base.site_packages}/{path}", base.links): [content.mode, *base.owners[path]]
        for path, content in plan.changes.items()
        if content is not None and path in base.owners
    }
    return {**base.folders, **files}


def placed(path: str, links: Mapping[str, str]) -> str:
    """A path with folders resolved that are links in the base.

    A folder entry at that path would replace the link.
    """
    above = path
    while above not in ("", "/"):
        if above in links:
            return links[above] + path[len(above) :]
        above = above.rpartition("/")[0]
    return path


#: Limit of an image's time: the year 5138.
_EPOCH_LIMIT = 10**11


def is_overlay(labels: Mapping[str, str], artifact_type: str = "") -> bool:
    """Whether the image is an overlay; older ones have no artifact type."""
    return artifact_type == OVERLAY_TYPE or kind_of(labels.get(BASE_LABEL, "")).is_wheels


def read_plan(data: bytes, where: str) -> RecordedPlan:
    """Read a plan that was baked into an image.

    Raises:
        UsageError: it is not one.
    """
    try:
        plan = _document(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {SHARE}/plan.json is damaged: {error}") from None
    schema = plan.get("schema", 1) if isinstance(plan, dict) else 1
    if schema not in range(1, PLAN_SCHEMA + 1):
        raise UsageError(
            f"{where}: {SHARE}/plan.json has schema {schema!r}, but this spark-build reads 1 to "
            f"{PLAN_SCHEMA}: a newer one made it",
            hint="install a newer spark-build",
        )
    try:
        document = read(plan, BakedPlan)
        _refuse_incomplete(document)
    except ValueError as error:
        raise UsageError(f"{where}: {SHARE}/plan.json is not a plan: {error}") from None
    return RecordedPlan(document=document, json=plan)


def _refuse_incomplete(plan: BakedPlan) -> None:
    """Refuse errors that the types do not catch.

    Raises:
        ValueError: names the wrong part of the plan.
    """
    if plan.schema > 1 and (plan.build is None or plan.build.epoch >= _EPOCH_LIMIT):
        raise ValueError(f"build is {plan.build!r:.80}")
    if "vllm" not in plan.base.packages:
        raise ValueError("base.packages lacks vllm")


def read_layers(data: bytes | None, where: str) -> list[Layer]:
    """The layers that were baked in; empty if there is no such file.

    Raises:
        UsageError: it is damaged, or has other content.
    """
    try:
        layers = _document(b"[]" if data is None else data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {SHARE}/layers.json is damaged: {error}") from None
    if not isinstance(layers, list):
        raise UsageError(f"{where}: {SHARE}/layers.json is not a list of layers")
    try:
        return [Layer.read(layer) for layer in layers]
    except ApplyError as error:
        problem = f"{where}: {SHARE}/layers.json is not a list of layers: {error}"
        raise UsageError(problem, hint=error.hint) from None


def _document(data: bytes) -> Any:
    """Parse JSON that can be written again; lone surrogates are refused.

    Raises:
        ValueError, RecursionError: it is not valid.
    """
    value = json.loads(data)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def indented(value: object) -> bytes:
    """The bytes of ``json.dumps(value, indent=1, sort_keys=True)``, seven times faster.

    The standard library's encoder runs in Python if an indent is given.
    """
    try:
        compact = json.dumps(value, sort_keys=True).encode()
        return msgspec.json.format(compact, indent=1) + b"\n"
    except msgspec.DecodeError:  # half a surrogate pair, as in a file name that is no UTF-8
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def build_metadata(plan: BuildPlan) -> bytes:
    """``build-metadata.yaml`` in the keys that sparkrun and spark-vllm-docker read.

    JSON strings are YAML scalars, so no YAML writer is needed for this flat form.
    """
    packages = plan.base.packages
    rows = {
        "vllm_version": packages.get("vllm", ""),
        "gpu_arch": "12.1a",
        "base_image": f"{plan.base.name}@{plan.base.digest}",
    }
    args = {"cutlass_dsl_version": packages.get("nvidia-cutlass-dsl", "")}
    ours = {
        "version": plan.maker.version,
        "plan_digest": plan.digest,
        "profiles": ",".join(plan.profiles),
        "layers": ",".join(d.name for d in plan.needed),
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in rows.items()]
    for name, table in (("build_args", args), ("spark_build", ours)):
        lines.append(f"{name}:")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in table.items()]
    return ("\n".join(lines) + "\n").encode()


def quoted(value: str) -> str:
    """A value for ENV and LABEL: in double quotes, with no expansion.

    JSON is not enough, because Dockerfiles do not support ``\\u`` escapes.

    Raises:
        UsageError: it has a line break, after which a Dockerfile's next instruction begins.
    """
    if "\n" in value or "\0" in value:
        raise UsageError(f"a Dockerfile cannot hold a value with a line break: {value!r:.200}")
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def labels(plan: BuildPlan) -> dict[str, str]:
    """OCI labels, which are also the manifest's annotations (image specification, annotations)."""
    states = {d.name: d.outcome.state for d in plan.decisions}
    vllm = plan.base.packages.get("vllm", "")
    values = {
        "org.opencontainers.image.title": f"spark-build {plan.name}",
        "org.opencontainers.image.description": f"vLLM {vllm} for NVIDIA DGX Spark (GB10, SM121): "
        f"{', '.join(d.name for d in plan.needed)}",
        "org.opencontainers.image.version": vllm,
        "org.opencontainers.image.created": created(plan),
        **_base_image(plan.base),
        BASE_LABEL: plan.base.name,
        f"{LABEL_PREFIX}.base-digest": plan.base.digest,
        PLAN_LABEL: plan.digest,
        f"{LABEL_PREFIX}.profiles": ",".join(plan.profiles),
        f"{LABEL_PREFIX}.layers": ",".join(d.name for d in plan.needed),
        f"{LABEL_PREFIX}.states": json.dumps(states, sort_keys=True),
        f"{LABEL_PREFIX}.serve-flags": " ".join(plan.serve_flags),
        f"{LABEL_PREFIX}.moe-serve-flags": " ".join(plan.moe_serve_flags),
    }
    return dict(sorted(values.items()))


def _base_image(base: BaseIdentity) -> dict[str, str]:
    """The standard keys for the base image; empty for wheels."""
    if not base.is_image or base.name.startswith("oci:"):
        return {}
    reference = parse_reference(base.name)
    return {
        "org.opencontainers.image.base.name": str(replace(reference, digest="")),
        "org.opencontainers.image.base.digest": base.digest,
    }


def created(plan: BuildPlan) -> str:
    """The plan's time in RFC 3339 format."""
    return moment(plan.epoch)
