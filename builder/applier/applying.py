"""Applying layers to a real directory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_DRIFT, EXIT_REBUILD, EXIT_USAGE, ApplyError
from builder.applier.receipts import STATE_DIR, env_of
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
    """Judge all layers, refuse if one cannot be applied, then commit the needed ones.

    A read-only directory is not locked, and is accepted if nothing is needed.

    Raises:
        ApplyError: a layer drifted, is ambiguous or needs a rebuild, or one is needed and the
            directory cannot be written to; nothing was written.
    """

    writable = os.access(root, os.W_OK) or (root / STATE_DIR / "journal.json").exists()
    with Store(root) if writable else nullcontext() as store:
        tree = DirTree(root)
        steps = list(judge_in_order(layers, tree, sources, target, {**os.environ, **env_of(tree)}))
        for step in steps:
            report(step.outcome)
        for step in steps:
            refuse(step.outcome)
        needed = [step for step in steps if step.outcome.state == NEEDED]
        if store is None:
            _refuse_needed(root, [step.outcome.layer for step in needed])
        else:
            for step in needed:
                store.commit(step.layer, step.outcome)
    return [step.outcome for step in steps]


def _refuse_needed(root: Path, needed: Sequence[str]) -> None:
    """Refuse needed layers for a read-only directory.

    Raises:
        ApplyError: there is one.
    """
    if not needed:
        return
    owner, user = root.stat().st_uid, os.geteuid()
    why = "it is read-only" if user in (0, owner) else f"it is uid {owner}'s, and this is {user}"
    who = "" if user in (0, owner) else f"run this as that user (docker exec --user {owner}), or "
    raise ApplyError(
        f"{root}: cannot write ({why}), and it lacks {', '.join(needed)}",
        EXIT_USAGE,
        f"{who}use an image that has the layers: spark-build image",
    )


def refuse(outcome: Outcome) -> None:
    """Raise for states that stop a build, with their exit codes.

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
