"""What an image carries about itself: plan, layers, the applier and the in-image verifier."""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import TYPE_CHECKING

from builder import __version__
from builder.paths import package_file
from builder.runtime.spark_apply import Content

if TYPE_CHECKING:
    from builder.model import BuildPlan

SHARE = "/usr/share/spark-build"
#: Labels and annotations of ours, below the standard org.opencontainers.image.* ones.
LABEL_PREFIX = "io.github.spark-build"

_VERIFY = """#!/bin/sh
# Checks this image from inside: docker run --rm IMAGE spark-verify
exec {interpreter} -B {share}/spark_verify.py "$@"
"""


def baked_files(plan: BuildPlan) -> dict[str, Content]:
    """Absolute path -> content of everything that we add outside site-packages."""
    layers = [d.layer for d in plan.decisions]
    flags = {"serve_flags": plan.serve_flags, "moe_serve_flags": plan.moe_serve_flags}
    files = {
        f"{SHARE}/plan.json": _json(plan.as_json()),
        f"{SHARE}/layers.json": _json(layers),
        f"{SHARE}/serve-flags.json": _json(flags),
        "/workspace/build-metadata.yaml": build_metadata(plan),
    }
    if plan.base.folders:
        files[f"{SHARE}/folders.json"] = _json(dict(plan.base.folders))
    contents = {path: Content.of(data) for path, data in files.items()}
    for name in ("spark_apply.py", "dispatch_probe.py", "spark_verify.py"):
        data = package_file("runtime", name).read_bytes()
        contents[f"{SHARE}/{name}"] = Content.of(data)
    interpreter = plan.base.interpreter
    script = _VERIFY.format(interpreter=interpreter, share=SHARE).encode()
    contents["/usr/local/bin/spark-verify"] = Content.of(script, 0o755)
    return dict(sorted(contents.items()))


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def build_metadata(plan: BuildPlan) -> bytes:
    """``build-metadata.yaml`` in the keys that sparkrun and spark-vllm-docker read.

    JSON strings are YAML scalars, so no YAML writer is needed for this flat form.
    """
    packages = plan.base.packages
    rows = {
        "vllm_version": packages.get("vllm", ""),
        "gpu_arch": "12.1a",
        "base_image": f"{plan.base.ref}@{plan.base.digest}",
    }
    args = {"cutlass_dsl_version": packages.get("nvidia-cutlass-dsl", "")}
    ours = {
        "version": __version__,
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
    """A value as ENV and LABEL take it: in double quotes, with nothing expanded.

    JSON would not do: a Dockerfile does not know its ``\\u`` escapes.
    """
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def labels(plan: BuildPlan) -> dict[str, str]:
    """OCI labels, which are also the manifest's annotations."""
    states = {d.name: d.outcome.state for d in plan.decisions}
    values = {
        "org.opencontainers.image.title": f"spark-build {plan.name}",
        "org.opencontainers.image.version": plan.base.packages.get("vllm", ""),
        "org.opencontainers.image.base.name": plan.base.ref,
        "org.opencontainers.image.base.digest": plan.base.digest,
        f"{LABEL_PREFIX}.plan": plan.digest,
        f"{LABEL_PREFIX}.profiles": ",".join(plan.profiles),
        f"{LABEL_PREFIX}.layers": ",".join(d.name for d in plan.needed),
        f"{LABEL_PREFIX}.states": json.dumps(states, sort_keys=True),
        f"{LABEL_PREFIX}.serve-flags": " ".join(plan.serve_flags),
    }
    return dict(sorted(values.items()))


def timestamp(plan: BuildPlan) -> int:
    """Seconds since the epoch for every file and for the image: never this machine's clock.

    ``SOURCE_DATE_EPOCH`` when set, else the base's own time, else the newest layer's
    ``last-update``.
    """
    named = os.environ.get("SOURCE_DATE_EPOCH")
    if named and named.isdigit():
        return int(named)
    if plan.base.created:
        moment = datetime.datetime.fromisoformat(plan.base.created[:19] + "+00:00")
        if moment.year > 1980:
            return int(moment.timestamp())
    newest = max(str(d.layer["provenance"]["last-update"]) for d in plan.decisions)
    return int(datetime.datetime.fromisoformat(f"{newest}T00:00:00+00:00").timestamp())
