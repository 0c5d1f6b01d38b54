"""What a plan adds to an image: files, commands, metadata and the in-image verifier's data.

The metadata is the plan, its layers, the applier and the in-image verifier.  What that checks on a
GPU comes from ``builder/data/kernels.toml`` and the catalogue of log lines in
``builder/data/diagnose/``, filtered for the plan's release.
"""

from __future__ import annotations

import json
import re
from configparser import ConfigParser, Error
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from builder.applier.receipts import kept_true
from builder.applier.trees import Content
from builder.applier.values import normalize
from builder.common.document import moment, plain
from builder.common.paths import project_file
from builder.images.engines.baked import (
    BASE_LABEL,
    BIN,
    LABEL_PREFIX,
    OWNERS,
    PLAN_LABEL,
    SHARE,
    WRITTEN,
)
from builder.images.engines.devicedata import device_data
from builder.images.engines.maker import APPLIER, COMMAND, COMMAND_TEXT, programs, written
from builder.images.registry.reference import parse_reference
from builder.probes import TERMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.plan import BaseIdentity, BuildPlan, LayerDecision


# -------------------------------------------------------------- commands of installed distributions


#: ``NAME = MODULE:OBJECT [EXTRA]`` of the specification of entry points.
_COMMAND_NAME = re.compile(r"[\w.-]+")
_OBJECT = re.compile(r"(?P<module>[\w.]+)\s*:\s*(?P<object>[\w.]+)\s*(\[.*\])?")
ENTRY_POINTS = re.compile(r"(?P<name>[^/]+)-[^-/]+\.dist-info/entry_points\.txt")
_SCRIPT = """#!{interpreter}
import sys

from {module} import {first}

sys.exit({object}())
"""


def commands(plan: BuildPlan) -> dict[str, bytes]:
    """Command -> script, of distributions that the base does not have; it keeps those it has."""
    commands: dict[str, bytes] = {}
    for path, content in plan.changes.items():
        match = ENTRY_POINTS.fullmatch(path)
        if match and content is not None and normalize(match["name"]) not in plan.base.packages:
            text = content.read().decode("utf-8", "replace")
            commands |= scripts(text, plan.base.interpreter)
    return commands


def scripts(text: str, interpreter: str) -> dict[str, bytes]:
    """Command -> script, of the text of an ``entry_points.txt``."""
    parser = ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except Error:  # no command is lost on anybody who could have used it
        return {}
    rows = parser.items("console_scripts") if parser.has_section("console_scripts") else []
    scripts = {}
    for name, value in rows:
        target = _OBJECT.fullmatch(value.strip())
        if target and _COMMAND_NAME.fullmatch(name):
            first = target["object"].partition(".")[0]
            words = {"module": target["module"], "object": target["object"], "first": first}
            scripts[name] = _SCRIPT.format(interpreter=interpreter, **words).encode()
    return scripts


# ---------------------------------------------------------------------------- files, layer by layer


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
            placed(f"{site}/{path}", plan.base.links): content
            for path, content in decision.changes.items()
            if (content is not None or not alone) and path not in _records(decision)
        }
        layers.append((decision.name, files))
    last: dict[str, Content | None] = dict(baked_files(plan))
    unlisted = {} if alone else {path: plan.changes[path] for path in sorted(records)}
    last.update(
        {
            placed(f"{site}/{path}", plan.base.links): content
            for path, content in unlisted.items()
            if content is not None  # else the layer that took it away says so
        }
    )
    layers.append(("spark-build", last))
    return layers


def _records(decision: LayerDecision) -> set[str]:
    """The RECORD files that a layer's changes affect, updated."""
    return kept_true([decision.receipt] if decision.receipt is not None else [])


# ----------------------------------------------------------------------------------------- metadata


def baked_files(plan: BuildPlan) -> dict[str, Content]:
    """Absolute path -> content of everything that spark-build adds outside site-packages."""
    layers = [d.layer.rendered for d in plan.decisions]
    flags = {"serve_flags": plan.serve_flags, "moe_serve_flags": plan.moe_serve_flags}
    files = {
        f"{SHARE}/plan.json": indented(_lasting(plan)),
        f"{SHARE}/device.json": indented(plain(device_data(plan.document))),
        f"{SHARE}/layers.json": indented(layers),
        f"{SHARE}/serve-flags.json": indented(flags),
        WRITTEN: indented(dict(written())),
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
    script = command_text(plan.base.interpreter)
    for name, data in {**commands(plan), COMMAND: script}.items():
        contents[f"{BIN}/{name}"] = Content.of(data, 0o755)
    return {placed(path, plan.base.links): contents[path] for path in sorted(contents)}


def command_text(interpreter: str) -> bytes:
    """The command ``spark-verify`` of an image with this interpreter."""
    return COMMAND_TEXT.format(interpreter=interpreter, share=SHARE).encode()


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
    if not base.is_image or base.in_layout:
        return {}
    reference = parse_reference(base.name)
    return {
        "org.opencontainers.image.base.name": str(replace(reference, digest="")),
        "org.opencontainers.image.base.digest": base.digest,
    }


def created(plan: BuildPlan) -> str:
    """The plan's time in RFC 3339 format."""
    return moment(plan.epoch)
