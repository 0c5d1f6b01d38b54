"""Where ``spark-build image`` builds an image, and where it puts it.

The options ``--builder``, ``--cache-from``, ``--cache-to``, ``--tag``, ``--output``, ``--push``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.model.reference import Ref
from builder.errors import EngineError, RemoteError, UsageError
from builder.images.engines.buildx import cache_words, check_name
from builder.images.engines.choice import ENGINES, named
from builder.images.registry.layout import check_layout_target as check_folder
from builder.images.registry.locations import layout_place
from builder.images.registry.reference import is_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.common.model.plan import BuildPlan
    from builder.images.engines.choice import EngineKind
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
    layout = Ref(output)
    push = options.push or output == "registry"
    if output not in ("", "docker", "registry") and not layout.in_layout:
        near = f"oci:{output}" if "/" in output or Path(output).is_dir() else "oci:DIR"
        raise UsageError(
            f"--output {output!r} is not docker, oci:DIR or registry", hint=f"--output {near}"
        )
    folder: Path | None = None
    name = ""
    if layout.in_layout:
        folder, name = layout_place(layout)
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
    _refuse_contradictions(options, kind, layout, push=push)
    return Destination(tag, folder, push)


def _refuse_contradictions(
    options: ImageOptions, kind: EngineKind | None, output: Ref, *, push: bool
) -> None:
    alone = kind is None or kind.writes_manifests
    if kind is not None and not alone and output.in_layout and not options.builder:
        raise UsageError(
            f"--output {output.text!r} is not an output of the {kind.name} engine",
            hint=f"--engine oci --output {output}",
        )
    if push and output.in_layout:
        raise UsageError("--push and --output oci:DIR are two places; give only one")
    if push and options.tag is None:
        raise UsageError("no destination to push to", hint="--tag HOST/NAME:TAG")
    if options.thin and (not alone or push or output.text == "docker"):
        raise UsageError(
            "--thin applies to an OCI layout, and none is written",
            hint="--output oci:DIR",
        )
    if options.plan.single_layer and not alone:
        raise UsageError("--single-layer is for the oci engine", hint="--engine oci")


def check_base_options(options: ImageOptions, ref: Ref) -> None:
    """Refuse options that do not apply to this kind of base.

    Raises:
        UsageError: that.
    """
    if options.thin and ref.kind.is_wheels:
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


def check_builder(options: ImageOptions) -> None:
    """Check the options before anything is read.

    Raises:
        UsageError: the options contradict each other, or one is malformed.
    """
    if options.builder:
        check_name(options.builder)
    cache_words(options.cache_from, "from")
    cache_words(options.cache_to, "to")
    asked = {
        "--builder": options.builder,
        "--cache-from": options.cache_from,
        "--cache-to": options.cache_to,
    }
    given = next((name for name, value in asked.items() if value), None)
    if given is None:
        return
    kind = named(options.engine)
    if kind is not None and not kind.has_builders:
        raise UsageError(
            f"{given} is for the buildkit engine; the {kind.name} engine has its own layer cache",
            hint="--engine buildkit",
        )
    if options.thin or options.plan.single_layer:
        thing = "--thin" if options.thin else "--single-layer"
        raise UsageError(f"{thing} is for the oci engine, {given} for the buildkit engine")
    if options.is_index:
        raise UsageError(f"{given}: the buildkit engine builds for one platform")


@contextlib.contextmanager
def of_registry(ref: Ref, builder: str) -> Iterator[None]:
    """Refuse a base on this machine for a remote builder, with a clear message."""
    try:
        yield
    except RemoteError as error:
        if not builder or not _is_here(ref):
            raise
        raise RemoteError(
            f"{ref} is in the Docker Engine here, but builder {builder} takes its base from a "
            f"registry: {error}",
            hint="push it to a registry that the builder can reach, then use "
            "--base docker://HOST/NAME:TAG",
        ) from None


def _is_here(ref: Ref) -> bool:
    from builder.images.engines import docker

    try:
        client = docker.connect()
    except EngineError:
        return False
    try:
        docker.find_image(client, ref.place, None, pull=False)
    except RemoteError:
        return False
    finally:
        client.close()
    return True
