"""Judges layers in order, each on the result of the previous ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.agreement import Agreement
from builder.applier.judging import judge
from builder.applier.receipts import make_receipt, receipt_bytes, receipt_path, receipts_of
from builder.applier.records import settled_records
from builder.applier.sharedstage import SharedStage
from builder.applier.states import NEEDED
from builder.applier.trees import Changes, Content, OverlayTree, Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome, Target
    from builder.applier.receipts import Receipt
    from builder.applier.sources import Sources


@dataclass(frozen=True)
class Step:
    """One judged layer; ``changes`` includes its receipt."""

    layer: Layer
    outcome: Outcome
    receipt: Receipt | None
    changes: Changes


def judge_in_order(
    layers: Iterable[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
) -> Iterator[Step]:
    """Judge each layer on the tree with the previous layers applied, without writing.

    Compiled changes share a stage: the ops are counted first, and the last one's layer
    installs the result of all.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest; or
        two layers
            contradict each other.
    """
    ordered = list(layers)
    counted = SharedStage()
    steps = list(_judged_once(ordered, tree, sources, target, env, counted))
    if counted.ops:
        known = SharedStage(last=len(counted.ops), carrier=counted.ops[-1][0])
        steps = list(_judged_once(ordered, tree, sources, target, env, known))
    return iter(steps)


def _judged_once(
    ordered: Sequence[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
    together: SharedStage,
) -> Iterator[Step]:
    overlay = OverlayTree(tree)
    current = dict(env)
    agreement = Agreement()
    sequence = max((r.sequence for r in receipts_of(tree)), default=0)
    for number, layer in enumerate(ordered, 1):
        outcome = judge(layer, overlay, sources, target, current, ordered[number:], together)
        receipt: Receipt | None = None
        changes: Changes = {}
        if outcome.state == NEEDED:
            sequence += 1
        if outcome.pending:  # what is known of it already: a later layer may change it further
            overlay.update(outcome.changes)
        elif outcome.state == NEEDED:
            records = settled_records(layer, outcome.changes, overlay)
            receipt = make_receipt(layer, outcome, overlay, sequence, records)
            changes = {**outcome.changes, **records}
            changes[receipt_path(layer.name)] = Content.of(receipt_bytes(receipt))
            overlay.update(changes)
        flags = [*outcome.serve_flags, *outcome.moe_serve_flags]
        agreement.add(layer.name, outcome.env, flags)
        current.update(outcome.env)
        yield Step(layer, outcome, receipt, changes)
