"""A release or an image that serves, and what a profile sets on it: variables, flags, layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from builder.applier.trees import OverlayTree
from builder.common.plan import default_tag
from builder.common.pypi import OLDEST_VLLM
from builder.common.reference import Ref
from builder.errors import NotServed, UsageError
from builder.images.bases.identify import identify
from builder.images.registry.reference import parse_reference
from builder.layers.planner import refuse_plan, refuse_unserved
from builder.pipeline.inputs import inputs_of
from builder.pipeline.options import PlanOptions
from builder.serving.released import release_base
from builder.serving.serveflags import ServeInterface, interface_in, interface_of_base

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def refuse_old(vllm: str, subject: str, hint: str) -> None:
    """Refuse a release that no profile was tested with.

    A development version (``0.1.dev1+gabc``) may be of any age.

    Raises:
        UsageError: it is older than the oldest supported one.
    """
    version = Version(vllm)
    if not version.is_devrelease and Version(version.base_version) < OLDEST_VLLM:
        raise UsageError(
            f"recipes are for vLLM {OLDEST_VLLM} and later, and {subject} {vllm}", hint=hint
        )


def refuse_image(image: str) -> None:
    """Refuse references that a container engine cannot run.

    Raises:
        UsageError: the reference names no image of an engine or a registry.
    """
    ref = Ref(image)
    if not ref.has_name:
        raise UsageError(
            f"--image {image!r} is not a name that a container engine can run: push or load it "
            "first",
            hint="--image HOST/NAME:TAG",
        )
    parse_reference(ref.place)


#: Images of releases before this one are for CUDA 12 unless their tag says otherwise, and their
#: NVFP4 kernels do not run on a GB10 (releases of vLLM, wheels' METADATA).
CUDA_13 = Version("0.20.0")
OFFICIAL = "vllm/vllm-openai"
#: A release that serves every model, for hints.
_NEW = "0.33.0"


@dataclass(frozen=True, kw_only=True)
class ServedProfile:
    """A profile on one release."""

    name: str
    vllm: str
    interface: ServeInterface
    env: Mapping[str, str]
    flags: tuple[str, ...]
    moe_flags: tuple[str, ...]
    #: kinds of layers with which vLLM does not start, and its error
    refused: Mapping[str, str]
    #: the image that containers run
    image: str
    #: whether the user named it
    named_image: bool
    #: whether it was named, but not inspected
    unread: bool
    #: the command that builds the image; empty if it exists or needs no change
    build: str
    #: the mod with which an unpatched image serves the same; empty if none is needed
    mod: str
    #: whether the release includes Ray
    has_ray: bool
    #: the layers that change files of the release, or that a named image lacks
    changed: tuple[str, ...] = ()


def official_image(vllm: str) -> str:
    """The official image of a release that runs on a GB10."""
    suffix = "" if Version(vllm) >= CUDA_13 else "-cu130"
    return f"{OFFICIAL}:v{vllm}{suffix}"


def refuse_unpatched(image: str, profile: str, changed: Sequence[str]) -> None:
    """Refuse an image without the profile's changes: it would serve with other kernels.

    Raises:
        UsageError: a file that the profile changes is as released.
    """
    if changed:
        raise UsageError(
            f"{image} is not patched: {profile} changes files in it with {', '.join(changed)}; "
            "build the patched image, and name that with --image",
            hint=f"spark-build image --layers {profile} --base {image} --tag NAME",
        )


def interface_of(ref: str) -> ServeInterface:
    """The interface of the vLLM of a base: ``pypi:vllm==0.33.0``, an image, a layout.

    Raises:
        SparkBuildError: it is not a base with vLLM, or it cannot be read.
    """
    return interface_of_base(ref, identify)


def patched_interface(profile: str, ref: str) -> ServeInterface:
    """What the vLLM of a base understands with the changes of a profile.

    Raises:
        NotServed: the profile does not support it.
        SparkBuildError: it cannot be read or planned.
    """
    inputs = inputs_of(PlanOptions.selecting([profile], None, None, ()))
    planning = inputs.identify(Ref(ref))
    base = planning.base
    try:
        plan = planning.plan()
        refuse_unserved(plan, inputs.selection, "the release")
        refuse_plan(plan, planning.rebuild_command("image"))
        patched = OverlayTree(base.tree)
        patched.update(plan.changes)
        return interface_in(patched, plan.base.packages["vllm"])
    finally:
        base.close()


def served_profile(
    profile: str, release: str | None, image: str | None, patches: Sequence[Path] = ()
) -> ServedProfile:
    """Plan a profile on a release or an image, and read what its vLLM understands.

    Raises:
        SparkBuildError: the profile does not serve it, or it cannot be read.
    """
    if release is None and image is None:
        raise UsageError("neither --release nor --image is given", hint=f"--release {_NEW}")
    if image is not None:
        refuse_image(image)
    ref = Ref(release_base(release) if release is not None else str(image))
    subject = "the image" if release is None else "the release"
    if release is not None:
        refuse_old(release, "this is", f"--release {_NEW}")
    inputs = inputs_of(PlanOptions.selecting([profile], None, None, patches))
    if not inputs.selection.profiles:
        raise UsageError(f"{profile!r} is not a profile", hint="spark-build layers list")
    planning = inputs.identify(ref)
    base = planning.base
    try:
        if release is None and (version := base.identity.packages.get("vllm")):
            refuse_old(version, f"{image} has", f"--image {official_image(_NEW)}")
        plan = planning.plan()
        try:
            refuse_unserved(plan, inputs.selection, subject)
        except NotServed as error:
            raise NotServed(str(error), hint="--profile marlin") from None
        refuse_plan(plan, planning.rebuild_command("image"))
        vllm = plan.base.packages["vllm"]
        patched = OverlayTree(base.tree)  # a layer may add what a variable takes
        patched.update(plan.changes)
        interface = interface_in(patched, vllm)
        metadata = [d.info_dir for d in base.tree.distributions().values() if d.name == "vllm"]
        requires = (base.tree.read(f"{metadata[0]}/METADATA") or b"").decode("utf-8", "replace")
        has_ray = "ray" in base.tree.distributions() or "\nRequires-Dist: ray[" in requires
    finally:
        base.close()
    changed = [decision.name for decision in plan.needed if decision.outcome.changes]
    changes = bool(changed)
    official = official_image(vllm) if release else str(image)
    tag = default_tag(plan).rpartition("-")[0]
    build = f"spark-build image --layers {profile} --base {official} --tag {tag}"
    return ServedProfile(
        name=profile,
        vllm=vllm,
        interface=interface,
        env=plan.env,
        flags=tuple(plan.serve_flags),
        moe_flags=tuple(plan.moe_serve_flags),
        refused={e.kind: e.refused for e in plan.document.expect if e.refused},
        named_image=image is not None,
        unread=release is not None and image is not None,
        image=Ref(image or "").place or (tag if changes else official),
        build=build if changes and not image else "",
        mod=inputs.selection.profiles[0].mod if changes else "",
        has_ray=has_ray,
        changed=tuple(changed),
    )
