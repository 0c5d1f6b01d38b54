"""The parts of a target, to build it again without one of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.applier.environment import ENV_PTH
from builder.applier.receipts import RECEIPTS, STATE_DIR, kept_true, receipt_path, receipts_of
from builder.applier.receipts import originals as digests_before
from builder.applier.recording import true_records
from builder.applier.trees import Content, OverlayTree, versions
from builder.bases.identify import identify
from builder.bases.model import TRACKED, Base, BaseRequest
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Selection
from builder.model.base import LAYOUT
from builder.plan.planner import make_plan
from builder.verify.installedwheels import InstalledWheelSources
from builder.verify.trust import has_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.sources import Sources
    from builder.applier.trees import Changes, Tree
    from builder.verify.interpreters import Probes
    from builder.verify.model import VerifyTarget
    from builder.verify.trust import TrustedSources

    #: Gives the way to load what a path held, by path and sha256; None when that is lost.
    Originals = Callable[[str, str], Callable[[], bytes] | None]


class CannotTakeApart(SparkBuildError):
    """What a target was before its layers cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The base as it was before our layers, and how files laid over it are asked.

    ``asking`` takes a tree and the complete environment that goes with it.
    """

    base: Base
    sources: Sources
    asking: Callable[[Tree, Mapping[str, str]], Probes]

    def put_together(
        self, target: VerifyTarget, layers: Sequence[Layer], name: str
    ) -> VerifyTarget:
        """The target as these layers leave it, with what is expected of the target itself.

        Raises:
            ApplyError: an input of a layer is not pinned, or has another digest.
            UsageError: what a layer had compiled is in one extension wheel with another's.
            RemoteError: an input cannot be fetched.
        """
        sources = InstalledWheelSources(self.sources, target.tree, target.plan.layers)
        plan = make_plan(self.base, Selection(tuple(layers), ()), sources)
        if plan.pending:
            together = plan.stages[0].change
            raise UsageError(
                f"{together} is compiled into the same extension wheel as another change"
            )
        tree = OverlayTree(self.base.tree)
        tree.update(plan.changes)
        env = {**self.base.identity.env, **plan.env}
        asking = self.asking(tree, env)
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


def without_layers(base: Base, originals: Originals, env: Mapping[str, str] | None = None) -> Base:
    """A patched base as it was before, file by file as the receipts say.

    Args:
        base: the patched one.
        originals: where to get the former content of a file.
        env: the environment of the base as it was; else that of the patched one, without what the
            receipts set.

    Raises:
        CannotTakeApart: the former content of a file is lost.
    """
    receipts = receipts_of(base.tree)
    changes: Changes = {receipt_path(r["layer"]): None for r in receipts}
    if base.tree.read(ENV_PTH) is not None:
        changes[ENV_PTH] = None
    former: dict[str, str | None] = {}
    for receipt in receipts:
        for path, entry in receipt["files"].items():
            former.setdefault(path, entry["before"])
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
    ours = {name for receipt in receipts for name in receipt["env"]}
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
    """Originals out of the files of the base itself."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        return partial(_read, tree, path) if tree.digest(path) == digest else None

    return original


def _read(tree: Tree, path: str) -> bytes:
    return tree.read(path) or b""


def of_backup(root: Path) -> Originals:
    """Originals that ``spark-build apply`` kept beside the files that it changed."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        del path  # kept by content
        kept = root / STATE_DIR / "backup" / digest
        return kept.read_bytes if kept.is_file() else None

    return original


def difference(target: VerifyTarget, again: VerifyTarget) -> str | None:
    """A file that a target has otherwise than one put together of the same layers, or None.

    Receipts of an installed environment hold more than those of a plan, and compiled files come
    back whenever Python runs.  Rows of RECORD are what level ``static`` looks at.
    """
    overlay = again.tree
    assert isinstance(overlay, OverlayTree)
    paths = {*overlay.changes, *(p for r in receipts_of(target.tree) for p in r["files"])}
    paths -= kept_true(receipts_of(target.tree)) | kept_true(receipts_of(overlay))
    compared = (p for p in paths if not p.startswith(f"{RECEIPTS}/") and not p.endswith(".pyc"))
    return min((p for p in compared if target.tree.digest(p) != overlay.digest(p)), default=None)


def parts_of_image(
    base: Base,
    former: BaseRequest | None,
    sources: Sources,
    asking: Callable[[Tree, Mapping[str, str]], Probes],
) -> Parts:
    """An image as it was before its layers, by the files of what it was made from.

    Raises:
        CannotTakeApart: the image does not say what that was, or files of it are lost.
        RemoteError: its base is not available.
    """
    if not receipts_of(base.tree):
        return Parts(base=base, sources=sources, asking=asking)
    if former is None:
        raise CannotTakeApart(
            f"{base.identity.ref} has receipts but no plan, so its base is unknown"
        )
    if former.ref == LAYOUT:
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
    return Parts(base=kept, sources=sources, asking=asking)


def without_foreign_hooks(
    baked: Sequence[Layer], trust: TrustedSources, parts: Callable[[], Parts]
) -> Parts:
    """The parts of a target, where putting it together again runs no code out of it.

    Raises:
        CannotTakeApart: a layer that was baked in has a hook, and is none of this machine's.
    """
    foreign = [layer.name for layer in baked if has_hook(layer) and not trust.own(layer)]
    if foreign:
        raise CannotTakeApart(
            f"layer {foreign[0]} has a hook (Python code), and no local layer is "
            "the same: hooks from an image are never run",
            hint=f"--patches DIR, with the layer's source in DIR/{foreign[0]}/layer.toml",
        )
    return parts()
