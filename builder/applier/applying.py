"""Applying layers to a real directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_DRIFT, EXIT_REBUILD, ApplyError
from builder.applier.receipts import env_of
from builder.applier.sequence import judge_in_order
from builder.applier.states import AMBIGUOUS, DRIFT, NEEDED, NEEDS_REBUILD
from builder.applier.store import Store
from builder.applier.trees import DirTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome, Target
    from builder.applier.sources import Sources


def apply_layers(
    root: Path,
    layers: Sequence[Layer],
    sources: Sources,
    target: Target,
    report: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Judge all layers, refuse if one cannot go on, then commit those that are needed.

    Raises:
        ApplyError: a layer drifted, is ambiguous or needs a rebuild; nothing was written.
    """
    with Store(root) as store:
        tree = DirTree(root)
        env = {**os.environ, **env_of(tree)}
        judged = list(judge_in_order(layers, tree, sources, target, env))
        for step in judged:
            report(step.outcome)
        for step in judged:
            refuse(step.outcome)
        for step in judged:
            if step.outcome.state == NEEDED:
                store.commit(step.layer, step.outcome)
    return [step.outcome for step in judged]


def refuse(outcome: Outcome) -> None:
    """Raise for the states that stop a build, with the exit code of each.

    Raises:
        ApplyError: the state is drift, ambiguous or needs-rebuild.
    """
    if outcome.state in (DRIFT, AMBIGUOUS):
        raise ApplyError(
            f"layer {outcome.layer}: {outcome.state}: {outcome.reason}",
            EXIT_DRIFT,
            f"spark-build layers show {outcome.layer}",
        )
    if outcome.state == NEEDS_REBUILD:
        hint = "spark-build image --compile, on a machine with g++" if outcome.compiled else ""
        raise ApplyError(
            f"layer {outcome.layer}: needs a rebuild: {outcome.reason}", EXIT_REBUILD, hint
        )
