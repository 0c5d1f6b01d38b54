"""Puts the parts of a target together again, with all of its layers or some."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.applier.receipts import RECEIPTS, kept_true, receipts_of
from builder.applier.trees import OverlayTree
from builder.errors import UsageError
from builder.layers.catalog import Selection
from builder.layers.plan.planner import make_plan
from builder.proof.installedwheels import InstalledWheelSources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import Layer
    from builder.proof.parts import Parts
    from builder.proof.target import VerifyTarget


def put_together(
    parts: Parts, target: VerifyTarget, layers: Sequence[Layer], name: str
) -> VerifyTarget:
    """The target with only these layers, and the original target's expectations.

    Raises:
        ApplyError: an input of a layer is not pinned, or has another digest.
        UsageError: a layer shares its extension wheel with another.
        RemoteError: an input cannot be downloaded.
    """
    sources = InstalledWheelSources(parts.sources, target.tree, target.plan.layers)
    plan = make_plan(parts.base, Selection(tuple(layers), ()), sources)
    if plan.pending:
        together = plan.stages[0].change
        raise UsageError(f"{together} is compiled into the same extension wheel as another change")
    tree = OverlayTree(parts.base.tree)
    tree.update(plan.changes)
    env = {**parts.base.identity.env, **plan.env}
    asking = parts.asking(tree, env)
    return dataclasses.replace(
        target,
        name=name,
        plan=replace(plan.document, expect=target.plan.expect),
        layers=layers,
        tree=tree,
        env=env,
        ask=asking.ask,
        cannot_ask=asking.cannot_ask,
        compile=asking.compile,
        launch=asking.launch,
        brought=(),
        unrecorded=None,
        label=None,
    )


def difference(target: VerifyTarget, again: VerifyTarget) -> str | None:
    """A file that differs between a target and a new one with the same layers, or None.

    Receipts of an installed environment have more fields than those of a plan, and compiled files
    are created whenever Python runs.  Level ``static`` checks the rows of RECORD.
    """
    overlay = again.tree
    assert isinstance(overlay, OverlayTree)
    paths = {*overlay.changes, *(p for r in receipts_of(target.tree) for p in r.files)}
    paths -= kept_true(receipts_of(target.tree)) | kept_true(receipts_of(overlay))
    compared = (p for p in paths if not p.startswith(f"{RECEIPTS}/") and not p.endswith(".pyc"))
    return min((p for p in compared if target.tree.digest(p) != overlay.digest(p)), default=None)
