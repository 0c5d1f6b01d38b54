"""Applying layers to a real directory, and completing an image after its files were copied."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from builder.applier.files import read_regular
from builder.applier.judging import judge_in_order
from builder.applier.receipts import (
    STATE_DIR,
    env_of,
    final_digests,
    half_undone,
    present,
    receipts_of,
    true_records,
)
from builder.applier.states import AMBIGUOUS, DRIFT, NEEDED, NEEDS_REBUILD
from builder.applier.store import Store, refuse_unfinished_revert
from builder.applier.trees import DirTree, Tree, distribution_of, drop_empty, stale_pyc
from builder.applier.values import EXIT_DRIFT, EXIT_REBUILD, EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.receipts import Receipt
    from builder.applier.sources import Sources
    from builder.applier.states import Outcome, Target

#: Bytes of a list of the modes and owners of files.
_OWNERS_BYTES = 64 << 20


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
        refuse_unfinished_revert(root)
        tree = DirTree(root)
        steps = list(judge_in_order(layers, tree, sources, target, {**os.environ, **env_of(tree)}))
        for step in steps:
            report(step.outcome)
        refuse_half_undone(tree, [step.outcome for step in steps])
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


def refuse_half_undone(tree: Tree, outcomes: Sequence[Outcome]) -> None:
    """Name what made a layer drift where files of an applied layer are as before it.

    Raises:
        ApplyError: a layer drifted there.
    """
    stopped = [one for one in outcomes if one.state in (DRIFT, AMBIGUOUS)]
    half = half_undone(tree) if stopped else []
    if half:
        raise ApplyError(
            f"layer {stopped[0].layer}: {stopped[0].state}: some files of {', '.join(half)} are as "
            "before it was applied: a revert was interrupted, or a package was installed again",
            EXIT_DRIFT,
            "run revert again, then apply",
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


# ----------------------------------------------------------------- an image whose files were copied


def leftovers(tree: Tree, final: Mapping[str, str | None]) -> list[str]:
    """Files to remove after a copy: removed files, and compiled files of changed ones."""
    gone = [path for path, digest in final.items() if digest is None]
    for path in list(gone):
        folder, _, name = path.rpartition("/")
        if name == "METADATA" and distribution_of(folder):  # what an installer added goes too
            gone.extend(f"{folder}/{left}" for left in tree.children(folder))
    return sorted({*gone, *stale_pyc(tree, final)})


def finish(root: Path, owners: Path | None = None) -> list[str]:
    """Complete an image into which files were copied; returns the removed paths.

    A copy cannot delete: this removes files that receipts list as removed and compiled files of
    changed modules, updates RECORD, and then checks every other file of every receipt.

    Raises:
        ApplyError: a file does not match its receipt, so the copy failed.
    """
    tree = DirTree(root)
    receipts = receipts_of(tree)
    if not receipts:
        raise ApplyError(f"{root} has no receipts, so no layer was copied here", EXIT_USAGE)
    final = final_digests(receipts)
    removed = []
    for path in leftovers(tree, final):
        target = root / path
        if target.is_file():
            target.unlink()
            removed.append(path)
            drop_empty(target.parent, root)
    _true_records(root, receipts, [path for path in removed if path.endswith(".pyc")])
    wrong = [path for path, digest in final.items() if tree.digest(path) != digest]
    if wrong:
        raise ApplyError(f"{len(wrong)} files do not match their receipts: {wrong[0]}")
    if owners is not None:
        _restore_owners(owners)
    return removed


def _true_records(root: Path, receipts: Sequence[Receipt], compiled: Sequence[str]) -> None:
    """Update RECORD after files were copied over a base that was not read.

    ``compiled`` are files of changed modules that were removed; their rows go too.
    """
    tree = DirTree(root)
    for receipt in receipts:
        if receipt.records is None:  # of a spark-build that left RECORD as it was
            continue
        now = {**present(root, receipt.files), **dict.fromkeys(compiled)}
        for path, content in true_records(tree, now, receipt.package).items():
            if content is not None:
                (root / path).write_bytes(content.read())


def _restore_owners(listing: Path) -> None:
    """Restore mode and owner of folders and files that a copy changed to root's."""
    for path, (mode, uid, gid) in json.loads(read_regular(listing, _OWNERS_BYTES)).items():
        if os.path.exists(path):
            os.chown(path, uid, gid)
            os.chmod(path, mode)
