"""Where ``spark-build image`` puts an image: ``--tag``, ``--output`` and ``--push``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import UsageError

if TYPE_CHECKING:
    from builder.cli.image import ImageOptions
    from builder.model import BuildPlan


def default_tag(plan: BuildPlan) -> str:
    """``spark-build/<profile>:<vllm>-<plan12>``: the same plan always has the same name."""
    vllm = plan.base.packages.get("vllm", "unknown").replace("+", "-")
    return f"spark-build/{plan.name}:{vllm}-{plan.digest.removeprefix('sha256:')[:12]}"


@dataclass(frozen=True)
class Place:
    """Where an image goes: its name, a directory for a layout, or a registry."""

    tag: str
    output: Path | None
    push: bool


def place_of(plan: BuildPlan, options: ImageOptions, engine: str) -> Place:
    """What ``--tag``, ``--output`` and ``--push`` come to.

    Raises:
        UsageError: they contradict each other, or the engine does not make that.
    """
    tag = options.tag or default_tag(plan)
    if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9._/:-]*", tag):
        raise UsageError(f"--tag {tag!r} is not an image name")
    output = options.output or ("docker" if engine == "buildkit" else "")
    push = options.push or output == "registry"
    if output not in ("", "docker", "registry") and not output.startswith("oci:"):
        raise UsageError(f"--output {output!r} is not docker, oci:DIR or registry")
    if engine == "buildkit" and output.startswith("oci:") and not options.builder:
        raise UsageError(
            f"--output {output!r} is not what the buildkit engine makes",
            hint="--output docker or registry; or --engine oci --output oci:DIR",
        )
    if push and output.startswith("oci:"):
        raise UsageError("--push and --output oci:DIR are two places; one at a time")
    if push and (engine == "oci" or options.builder) and options.tag is None:
        raise UsageError("nothing says where to push", hint="--tag HOST/NAME:TAG")
    folder: Path | None = None
    if engine == "buildkit" and output.startswith("oci:"):
        folder = Path(output.removeprefix("oci:"))
    if engine == "oci" and not push and output != "docker":
        vllm = plan.base.packages.get("vllm", "unknown")
        folder = Path(output.removeprefix("oci:") or f"spark-build-{plan.name}-{vllm}")
    return Place(tag, folder, push)
