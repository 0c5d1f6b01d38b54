"""Where ``spark-build image`` puts an image: ``--tag``, ``--output`` and ``--push``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.engines.kinds import ENGINES, named
from builder.errors import UsageError
from builder.model.base import kind_of
from builder.registry.layoutwriter import check_layout_target as check_folder
from builder.registry.locations import layout_place
from builder.registry.reference import is_digest

if TYPE_CHECKING:
    from builder.engines.kinds import EngineKind
    from builder.model.plan import BuildPlan
    from builder.pipeline.options import ImageOptions

_TAG = re.compile(r"[a-z0-9][a-zA-Z0-9._/:-]*")


def default_tag(plan: BuildPlan) -> str:
    """``spark-build/<profile>:<vllm>-<plan12>``: the same plan always has the same name."""
    vllm = plan.base.packages.get("vllm", "unknown").replace("+", "-")
    return f"spark-build/{plan.name}:{vllm}-{plan.digest.removeprefix('sha256:')[:12]}"


@dataclass(frozen=True)
class Destination:
    """Where an image goes: its name, a directory for a layout, or a registry."""

    tag: str
    output: Path | None
    push: bool


def check_destination(options: ImageOptions, engine: str) -> Destination:
    """Check ``--tag``, ``--output`` and ``--push`` as far as possible without a base.

    Raises:
        UsageError: they contradict each other, have no effect, or the engine does not support them.
    """
    kind = named(engine)
    output = options.output or ("docker" if kind is not None and kind.through_docker else "")
    push = options.push or output == "registry"
    if output not in ("", "docker", "registry") and not output.startswith("oci:"):
        near = f"oci:{output}" if "/" in output or Path(output).is_dir() else "oci:DIR"
        raise UsageError(
            f"--output {output!r} is not docker, oci:DIR or registry", hint=f"--output {near}"
        )
    folder: Path | None = None
    name = ""
    if output.startswith("oci:"):
        folder, name = layout_place(output)
        check_folder(folder.absolute())
    if is_digest(name):
        raise UsageError(
            f"--output {output!r}: give a name without a digest, which is known after the build"
        )
    if name and options.tag not in (None, name):
        raise UsageError(
            f"--output {output!r} and --tag {options.tag!r} are two names; give only one"
        )
    tag = options.tag or name
    if tag and not _TAG.fullmatch(tag):
        raise UsageError(f"--tag {tag!r} is not an image name")
    _refuse_contradictions(options, kind, output, push=push)
    return Destination(tag, folder, push)


def _refuse_contradictions(
    options: ImageOptions, kind: EngineKind | None, output: str, *, push: bool
) -> None:
    alone = kind is None or kind.writes_manifests
    if kind is not None and not alone and output.startswith("oci:") and not options.builder:
        raise UsageError(
            f"--output {output!r} is not an output of the {kind.name} engine",
            hint=f"--engine oci --output {output}",
        )
    if push and output.startswith("oci:"):
        raise UsageError("--push and --output oci:DIR are two places; give only one")
    if push and options.tag is None:
        raise UsageError("no destination to push to", hint="--tag HOST/NAME:TAG")
    if options.thin and (not alone or push or output == "docker"):
        raise UsageError(
            "--thin applies to an OCI layout, and none is written",
            hint="--output oci:DIR",
        )
    if options.plan.single_layer and not alone:
        raise UsageError("--single-layer is for the oci engine", hint="--engine oci")


def check_base_options(options: ImageOptions, ref: str) -> None:
    """Refuse options that do not apply to this kind of base.

    Raises:
        UsageError: that.
    """
    if options.thin and kind_of(ref).is_wheels:
        raise UsageError(
            "--thin leaves the base's blobs out, but released wheels have none",
            hint="leave --thin out",
        )


def destination_of(plan: BuildPlan, options: ImageOptions, engine: str) -> Destination:
    """The destination from ``--tag``, ``--output`` and ``--push``.

    Raises:
        UsageError: as for :func:`check_place`.
    """
    place = check_destination(options, engine)
    folder = place.output
    alone = ENGINES[engine].writes_manifests
    if folder is None and alone and not place.push and options.output != "docker":
        vllm = plan.base.packages.get("vllm", "unknown")
        folder = Path(f"spark-build-{plan.name}-{vllm}")
    return Destination(place.tag or default_tag(plan), folder, place.push)
