"""Takes a target apart into its base and its layers, and puts it together with some of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.applier.edits import ENV_PTH
from builder.applier.receipts import (
    RECEIPTS,
    STATE_DIR,
    kept_true,
    receipt_path,
    receipts_of,
    true_records,
)
from builder.applier.receipts import originals as digests_before
from builder.applier.trees import Content, OverlayTree, versions
from builder.common.reference import LAYOUT
from builder.errors import SparkBuildError, UsageError
from builder.images.bases.identify import identify
from builder.images.bases.model import TRACKED, BaseRequest
from builder.images.rootfs.base import Base
from builder.layers.catalog import Selection
from builder.layers.planner import make_plan
from builder.proof.installedwheels import InstalledWheelSources
from builder.proof.target import Parts
from builder.proof.trust import has_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.sources import Sources
    from builder.applier.trees import Changes, Tree
    from builder.proof.target import VerifyTarget
    from builder.proof.trust import TrustedSources

    #: Returns a loader of a path's original content, by path and sha256; None if it is lost.
    Originals = Callable[[str, str], Callable[[], bytes] | None]


class CannotTakeApart(SparkBuildError):
    """The state of a target before its layers is unknown."""


def without_layers(base: Base, originals: Originals, env: Mapping[str, str] | None = None) -> Base:
    """A patched base in its original state, according to the receipts.

    Args:
        base: the patched base.
        originals: returns the original content of a file.
        env: the original environment of the base; by default that of the patched one without what
        the
            receipts set.

    Raises:
        CannotTakeApart: the original content of a file is lost.
    """
    receipts = receipts_of(base.tree)
    changes: Changes = {receipt_path(r.layer): None for r in receipts}
    if base.tree.read(ENV_PTH) is not None:
        changes[ENV_PTH] = None
    former: dict[str, str | None] = {}
    for receipt in receipts:
        for path, entry in receipt.files.items():
            former.setdefault(path, entry.before)
    for path, digest in former.items():
        if digest == base.tree.digest(path):
            continue
        load = None if digest is None else originals(path, digest)
        if digest is not None and load is None:
            raise CannotTakeApart(f"the original of {path} is missing")
        content = None if digest is None else Content(sha256=digest, size=0, load=load, origin=path)
        changes[path] = content
    tree = OverlayTree(base.tree)
    tree.update(changes)
    if kept_true(receipts):  # sizes are not known here, and not looked at
        restored = {path: changes[path] for path in former if path in changes}
        tree.update(true_records(tree, restored, ""))
        for path, digest in digests_before(base.tree).items():
            load = originals(path, digest)
            if load is not None and tree.digest(path) is not None:
                tree.update({path: Content.of(load())})
    ours = {name for receipt in receipts for name in receipt.env}
    identity = dataclasses.replace(
        base.identity,
        packages=_tracked(tree, base),
        env={k: v for k, v in base.identity.env.items() if k not in ours} if env is None else env,
    )
    return Base(identity, tree)


def _tracked(tree: Tree, base: Base) -> dict[str, str]:
    known = {*TRACKED, *base.identity.packages}
    return {name: version for name, version in versions(tree).items() if name in known}


def of_tree(tree: Tree) -> Originals:
    """Originals from the files of the base."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        return partial(_read, tree, path) if tree.digest(path) == digest else None

    return original


def _read(tree: Tree, path: str) -> bytes:
    return tree.read(path) or b""


def of_backup(root: Path) -> Originals:
    """Originals from the backup of ``spark-build apply``."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        del path  # kept by content
        kept = root / STATE_DIR / "backup" / digest
        return kept.read_bytes if kept.is_file() else None

    return original


def parts_of_image(base: Base, former: BaseRequest | None, sources: Sources) -> Parts:
    """An image before its layers, with the files of its base.

    Raises:
        CannotTakeApart: the image does not name its base, or files of it are lost.
        RemoteError: its base is not available.
    """
    if not receipts_of(base.tree):
        return Parts(base=base, sources=sources)
    if former is None:
        raise CannotTakeApart(
            f"{base.identity.ref} has receipts but no plan, so its base is unknown"
        )
    if former.ref.text == LAYOUT:
        raise CannotTakeApart(
            f"{base.identity.ref} was made from a local layout, so its base is not available"
        )
    made_from = identify(former)
    try:
        env = made_from.identity.env if made_from.identity.is_image else None
        before = without_layers(base, of_tree(made_from.tree), env)
    except BaseException:
        made_from.close()
        raise
    kept = Base(before.identity, before.tree, made_from.close)
    return Parts(base=kept, sources=sources)


def without_foreign_hooks(
    baked: Sequence[Layer], trust: TrustedSources, parts: Callable[[], Parts]
) -> Parts:
    """The parts of a target, if rebuilding it runs no code from it.

    Raises:
        CannotTakeApart: a baked-in layer has a hook, and is not one of this machine's.
    """
    foreign = [layer.name for layer in baked if has_hook(layer) and not trust.own(layer)]
    if foreign:
        raise CannotTakeApart(
            f"layer {foreign[0]} has a hook (Python code), and no local layer is the same: hooks "
            f"from an image are never run; --patches must name a folder with your copy of "
            f"{foreign[0]}/layer.toml",
            hint="--patches DIR",
        )
    return parts()


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
    return dataclasses.replace(
        target,
        name=name,
        plan=replace(plan.document, expect=target.plan.expect),
        layers=layers,
        tree=tree,
        env=env,
        runner=target.runner.on(tree, env),
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
