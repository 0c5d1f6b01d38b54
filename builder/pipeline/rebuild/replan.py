"""Makes the plan again from an image's metadata, without current profiles and layers.

The baked layers are complete (their inputs are pinned by sha256), and the baked plan has the
base, packages and expected lines that they were judged on.  So later changes of a profile or
layer have no effect here.

A hook is Python code.  Code in an image is not trusted, so the image only names the text by digest:
the same text must exist locally, and the user must agree to run it.
"""

from __future__ import annotations

import dataclasses
import shlex
from functools import partial
from typing import TYPE_CHECKING

from builder.common.document import plain, read
from builder.common.model.base import LAYOUT, base_kind
from builder.common.model.plan import PLAN_SCHEMA
from builder.common.model.reference import Ref
from builder.errors import UsageError
from builder.images.rootfs.base import Base
from builder.layers.catalog import Catalog, Expectation, Profile, Selection
from builder.layers.plan.planner import make_plan
from builder.pipeline.rebuild.compare import compare_documents
from builder.proof.opening import exact_ref
from builder.proof.trust import has_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.common.documents.plan import ImageInputs
    from builder.common.model.plan import BuildPlan
    from builder.layers.plan.sources import IndexSources
    from builder.pipeline.rebuild.compare import Difference
    from builder.publishing.subject import Baked


def baked_selection(baked: Baked) -> Selection:
    """The layers that ``--layers`` selected when the image was built."""
    plan = baked.plan
    expect = tuple(read({**plain(entry), "when": {}}, Expectation) for entry in plan.expect)
    profiles = tuple(
        Profile(
            name=name,
            summary="",
            layers=(),
            image="",
            pypi="",
            pins={},
            needs={},
            needs_reason="",
            expect=() if number else expect,
        )
        for number, name in enumerate(plan.profiles)
    )
    return Selection(baked.layers, profiles)


def base_reference(baked: Baked) -> Ref:
    """The base, fully pinned: every package version, or the image's digest."""
    base = baked.plan.base
    if base_kind(base.kind).is_wheels:
        return exact_ref(baked.plan)
    if base_kind(base.kind).is_image:
        if base.ref == LAYOUT:
            raise UsageError(
                f"the base {base.digest} was a local OCI layout",
                hint="name it with --base oci:DIR",
            )
        return Ref(f"docker://{base.ref.partition('@')[0]}@{base.digest}")
    raise UsageError(f"a {base.kind} base is not an image, so the plan is damaged")


@dataclasses.dataclass(frozen=True)
class BaseLookup:
    """A base to identify again.  ``python`` and ``site_packages`` are for a ``pypi:`` base."""

    reference: Ref
    selection: Selection
    platform: str
    python: str | None
    site_packages: str | None


def replan(
    baked: Baked,
    identify: Callable[[BaseLookup], Base],
    sources: IndexSources,
    reference: Ref | None = None,
) -> tuple[BuildPlan, Base]:
    """Judge the baked layers on the baked base; the caller closes the base.

    ``reference`` is the base's current location, if its own registry no longer has it.

    Raises:
        RemoteError: the base or an input no longer exists.
        UsageError: the base has changed.
    """
    base, build = baked.plan.base, _build_of(baked)
    selection = baked_selection(baked)
    of_wheels = base_kind(base.kind).is_wheels
    found = identify(
        BaseLookup(
            reference=reference or base_reference(baked),
            selection=selection,
            platform=base.platform,
            python=base.python if of_wheels else None,
            site_packages=base.site_packages if of_wheels else None,
        )
    )
    try:
        if reference is None and found.identity.digest != base.digest:
            raise UsageError(
                f"the base is {base.ref} with digest {base.digest}, but it is now "
                f"{found.identity.digest}"
            )
        identity = dataclasses.replace(found.identity, ref=base.ref, digest=base.digest)
        same = Base(identity, found.tree, found.close)
        make = partial(make_plan, epoch=build.epoch, single_layer=build.single_layer)
        again = make(same, selection, sources)
        if again.pending and sources.stages is not None:
            for stage in again.stages:
                sources.stages.run(stage, same)
            again = make(same, selection, sources)
        again = dataclasses.replace(again, name=baked.plan.name, hints=())
    except BaseException:
        found.close()
        raise
    return again, found


def _build_of(baked: Baked) -> ImageInputs:
    """The build inputs in the image's plan.

    Raises:
        UsageError: the plan has an older schema.
    """
    plan = baked.plan
    if plan.build is not None:
        return plan.build
    by = f"spark-build {baked.version}" if baked.version else "an older spark-build"
    names = plan.profiles or [layer.name for layer in plan.layers]
    raise UsageError(
        f"the image was made by {by} with a plan of schema {plan.schema}, which does not record "
        f"all inputs; this spark-build uses schema {PLAN_SCHEMA}, so it cannot rebuild the same "
        f"image",
        hint=f"spark-build image --layers {','.join(names)} --base {plan.base.ref}",
    )


def plan_differences(baked: Baked, again: BuildPlan) -> list[Difference]:
    """Differences between the new plan and the one in the image; empty if the digests are equal."""
    if again.digest == baked.plan.plan_digest:
        return []
    old = {key: value for key, value in baked.recorded.json.items() if key != "plan_digest"}
    new = {key: value for key, value in again.as_json().items() if key != "plan_digest"}
    return compare_documents(old, new, "plan")


# -------------------------------------------------------------------------------- layers with hooks


def with_own_hooks(
    baked: Baked, image: str, patches: Sequence[Path], ask: Callable[[str], None]
) -> Baked:
    """The image's metadata, with the local text of every layer that has a hook.

    Args:
        baked: the image's metadata.
        image: the name that the user gave.
        patches: the user's folders of layers; read only if a layer has a hook.
        ask: asks for confirmation; raises if the answer is no.

    Raises:
        UsageError: a layer is missing, or differs from the plan's.
    """
    if not any(map(has_hook, baked.layers)):
        return baked
    catalog = Catalog.discover(patches)
    digests = {layer.name: layer.digest for layer in baked.plan.layers}
    return dataclasses.replace(
        baked,
        layers=tuple(
            _own(layer, digests, image, catalog, ask) if has_hook(layer) else layer
            for layer in baked.layers
        ),
    )


def _own(
    layer: Layer,
    digests: Mapping[str, str],
    image: str,
    catalog: Catalog,
    ask: Callable[[str], None],
) -> Layer:
    name = layer.name
    what = f"layer {name} of {image} has a hook (Python code)"
    if name not in catalog.folders:
        raise UsageError(
            f"{what}; code from an image is never run, and there is no local layer of this name: "
            f"--patches must name a folder with your copy of {name}/layer.toml",
            hint=f"spark-build rebuild {shlex.quote(image)} --patches DIR",
        )
    folder, own = catalog.folders[name], catalog.layer(name)
    if own.digest != digests.get(name):
        raise UsageError(
            f"{what}, but {folder} differs: the image's plan says layer "
            f"{str(digests.get(name))[:16]}, the folder is {own.digest[:16]}; use the folder that "
            f"the image was made from",
            hint=f"spark-build layers show {name}",
        )
    ask(f"run the hook of {folder} as you")
    return own
