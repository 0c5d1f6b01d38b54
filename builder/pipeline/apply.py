"""Apply layers to an installed environment, and revert them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from msgspec.structs import asdict

from builder.applier.applying import refuse_half_undone
from builder.applier.receipts import receipts_of
from builder.applier.store import Store, unfinished
from builder.applier.trees import DirTree
from builder.common.console import console, counted, print_json, tell
from builder.common.document import Document, Text
from builder.common.plan import AppliedPlan
from builder.common.reference import Ref
from builder.images.bases.directory import find_site_packages
from builder.layers.catalog import Catalog
from builder.layers.planner import refuse_nothing, refuse_plan
from builder.pipeline.inputs import inputs_of
from builder.pipeline.show import show_plan

if TYPE_CHECKING:
    from pathlib import Path

    from builder.pipeline.options import PlanOptions


class Reverted(Document, frozen=True, kw_only=True):
    """The layers that were removed."""

    directory: Annotated[str, Meta(pattern="^/")]
    reverted: Annotated[tuple[Text, ...], Meta(description="last applied first")]
    written: Annotated[bool, Meta(description="false with --dry-run")]


def apply_layers(directory: Path, options: PlanOptions, *, dry_run: bool, json: bool) -> None:
    """Judge all layers, stop if one cannot be applied, then apply them one by one."""
    inputs = inputs_of(options)
    root = find_site_packages(directory)
    if unfinished(root) == "apply" and not dry_run:
        with Store(root):  # rolls it back
            pass
    ref = Ref(f"dir:{root}")
    planning = inputs.identify(ref)
    _base, plan = planning.base, planning.plan()
    if not json:
        show_plan(plan, elsewhere=planning.elsewhere)
    refuse_nothing(plan, inputs.selection)
    refuse_half_undone(DirTree(root), [decision.outcome for decision in plan.decisions])
    refuse_plan(plan, planning.rebuild_command(f"apply {shlex.quote(str(directory))}"))
    planning.refuse_stages(plan)
    if not dry_run:
        plan = planning.compiled(plan)
        with Store(root) as store:
            for decision in plan.needed:
                store.commit(decision.layer, decision.outcome)
    if json:
        planned = asdict(plan.document)
        print_json(AppliedPlan(**planned, directory=str(root), written=not dry_run))
        return
    word = "would be applied to" if dry_run else "applied to"
    tell(f"{counted(len(plan.needed), 'layer')} {word} {root}")
    if plan.serve_flags:
        console.say(f"start vLLM with: {' '.join(plan.serve_flags)}")


def revert_layers(directory: Path, options: PlanOptions, *, force: bool, dry_run: bool) -> Reverted:
    """Restore the original files."""
    root = find_site_packages(directory)
    applied = [r.layer for r in receipts_of(DirTree(root))]
    names = None
    if words := options.names:
        names = [word for word in words if word in applied]
        others = [word for word in words if word not in applied]
        if others:  # profiles, and layers that are not applied
            chosen = Catalog.discover(options.patches).select(others)
            names += [layer.name for layer in chosen.layers]
    going = [name for name in reversed(applied) if names is None or name in names]
    if (going or unfinished(root)) and not dry_run:
        with Store(root) as store:
            going = store.revert(names, force)
    return Reverted(directory=str(root), reverted=tuple(going), written=not dry_run)
