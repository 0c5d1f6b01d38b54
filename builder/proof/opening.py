"""Opens a target by its reference: an image, an overlay, released wheels, a directory."""

from __future__ import annotations

import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.model.base import kind_of
from builder.errors import RemoteError, UsageError
from builder.images.bases.identify import asks_engine, identify
from builder.images.bases.model import scheme_of
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
    from builder.images.rootfs.base import Base
    from builder.proof.checks import VerifierDocument
    from builder.proof.ongpu import GpuOptions
    from builder.proof.target import VerifyTarget
    from builder.proof.targets import Opening


def open_target(text: str, opening: Opening) -> VerifyTarget:
    """Open a target by its reference.

    Raises:
        UsageError: the reference is malformed, or the expected layers are unknown.
    """
    refuse_wrong_kind(text)
    scheme, rest = scheme_of(text)
    if scheme == "oci" and _is_overlay(text):
        return open_layout(text, opening)
    if scheme == "docker" and asks_engine(text, "auto"):
        return open_engine_image(rest, opening)
    if kind_of(text).is_image:
        try:
            return open_layered(text, opening)
        except RemoteError as error:
            if text.startswith(("docker://", "oci:")):
                raise
            raise without_engine(text, error) from None
    base = identify(opening.request(text))
    try:
        if opening.selection is None:
            raise UsageError(
                f"{text} does not name its layers",
                hint=f"spark-build verify {shlex.quote(text)} --layers b12x-full",
            )
        plan = make_plan(base, opening.selection, opening.sources)
        trust = opening.trusting(base.identity)
        opened = target_of_plan(plan, base, text, patched=False, trust=trust)
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


def _is_overlay(text: str) -> bool:
    """Whether this may be an overlay: an image in a layout without a base image."""
    layout, name = layout_place(text)
    if not layout.is_dir():
        return False
    return kind_of(str(labels_of_layout(layout, name).get(metadata.BASE_LABEL))).is_wheels


def open_layout(text: str, opening: Opening) -> VerifyTarget:
    """Open an overlay layout on top of the released wheels in its plan.

    Raises:
        UsageError: it is not a layout of spark-build, is damaged, or is for other wheels.
    """
    layout, name = layout_place(text)
    plan, files, env = read_layout(layout, name)
    label = labels_of_layout(layout, name).get(metadata.PLAN_LABEL, "")
    opened = open_overlay(text, plan, files, env, opening, label)
    return dataclasses.replace(opened, digests=(layout_digest(layout, name),))
