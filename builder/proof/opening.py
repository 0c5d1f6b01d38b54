"""Opens a target by its reference: an image, an overlay, released wheels, a directory."""

from __future__ import annotations

import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import RemoteError, UsageError
from builder.images.bases.identify import asks_engine, identify
from builder.images.engines import metadata
from builder.images.engines.docker import without_engine
from builder.images.engines.overlay import labels_of_layout, layout_digest, read_layout
from builder.images.registry.locations import layout_place
from builder.images.registry.reference import refuse_wrong_kind
from builder.layers.plan.planner import make_plan
from builder.proof.container import open_engine_image
from builder.proof.insandbox import in_sandbox
from builder.proof.interpreters import beside_its_python
from builder.proof.layered import open_layered
from builder.proof.ongpu import run_beside
from builder.proof.parts import Parts, of_backup, without_layers
from builder.proof.targets import open_overlay, own_python, target_of_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.documents.plan import PlanDocument
    from builder.common.model.reference import Ref
    from builder.images.rootfs.base import Base
    from builder.proof.checks import VerifierDocument
    from builder.proof.ongpu import GpuOptions
    from builder.proof.target import VerifyTarget
    from builder.proof.targets import Opening


def open_target(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open a target by its reference.

    Raises:
        UsageError: the reference is malformed, or the expected layers are unknown.
    """
    refuse_wrong_kind(ref)
    if ref.in_layout and _is_overlay(ref):
        return open_layout(ref, opening)
    if ref.has_name and asks_engine(ref, "auto"):
        return open_engine_image(ref.place, opening)
    if ref.kind.is_image:
        try:
            return open_layered(ref, opening)
        except RemoteError as error:
            if ref.has_scheme:
                raise
            raise without_engine(ref.text, error) from None
    base = identify(opening.request(ref))
    try:
        if opening.selection is None:
            raise UsageError(
                f"{ref} does not name its layers",
                hint=f"spark-build verify {shlex.quote(ref.text)} --layers b12x-full",
            )
        plan = make_plan(base, opening.selection, opening.sources)
        trust = opening.trusting(base.identity)
        opened = target_of_plan(plan, base, ref.text, patched=False, trust=trust)
        return dataclasses.replace(
            opened,
            parts=partial(_parts_of_base, base, opening),
            on_gpu=_beside(base, opened.plan, opening.gpu),
        )
    except BaseException:
        base.close()
        raise


def _parts_of_base(base: Base, opening: Opening) -> Parts:
    """The parts of wheels, or of a directory with the backup of ``spark-build apply``."""
    python = own_python(base)
    trust = opening.trusting(base.identity)
    asking = in_sandbox(base, trust) if python is None else beside_its_python(base, python)
    if base.identity.is_installed:
        base = without_layers(base, of_backup(Path(base.identity.site_packages)))
    return Parts(base=base, sources=opening.sources, asking=asking)


def _beside(
    base: Base, plan: PlanDocument, options: GpuOptions
) -> Callable[[str], VerifierDocument] | None:
    python = own_python(base)
    return None if python is None else lambda level: run_beside(python, plan, level, options)


def _is_overlay(ref: Ref) -> bool:
    """Whether this may be an overlay: an image in a layout without a base image."""
    layout, name = layout_place(ref)
    if not layout.is_dir():
        return False
    return metadata.is_overlay(labels_of_layout(layout, name))


def open_layout(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open an overlay layout on top of the released wheels in its plan.

    Raises:
        UsageError: it is not a layout of spark-build, is damaged, or is for other wheels.
    """
    layout, name = layout_place(ref)
    plan, files, env = read_layout(layout, name)
    label = labels_of_layout(layout, name).get(metadata.PLAN_LABEL, "")
    opened = open_overlay(ref.text, plan, files, env, opening, label)
    return dataclasses.replace(opened, digests=(layout_digest(layout, name),))
