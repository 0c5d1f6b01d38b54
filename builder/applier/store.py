"""Committing layers to a real directory, and taking them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.applier.environment import ENV_PTH, env_pth
from builder.applier.failures import EXIT_DRIFT, ApplyError
from builder.applier.folders import drop_empty
from builder.applier.journal import Journal
from builder.applier.receipts import (
    make_receipt,
    receipt_bytes,
    receipt_path,
    receipts_of,
    unexplained,
)
from builder.applier.trees import Changes, Content, DirTree, Tree, stale_pyc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.applier.outcomes import Layer, Outcome


class Store(Journal):
    """Layers in a real site-packages directory; a context manager, as `Journal` is."""

    def commit(self, layer: Layer, outcome: Outcome) -> dict[str, Any]:
        """Write a needed layer's changes and its receipt, or nothing at all.

        Raises:
            ApplyError: the disk is full or a file cannot be written; the tree is as it was.
        """
        tree = DirTree(self.root)
        receipts = receipts_of(tree)
        number = 1 + max((r["sequence"] for r in receipts), default=0)
        receipt = make_receipt(layer, outcome, tree, number)
        previous = next((r for r in receipts if r["layer"] == layer["name"]), None)
        changes: Changes = dict(outcome.changes)
        ours = {entry.get("made") for r in receipts for entry in r["files"].values()}
        for path, entry in receipt["files"].items():
            if entry["before"] is None:
                entry["made"] = self._first_missing(path, ours)
            else:
                entry.update(self._facts(path))
        if previous is not None:
            _keep_originals(receipt, previous["files"], tree)
        changes[receipt_path(layer["name"])] = Content.of(receipt_bytes(receipt))
        merged: dict[str, str] = {}
        for earlier in [*(r for r in receipts if r is not previous), receipt]:
            merged.update(earlier["env"])
        if merged:
            changes[ENV_PTH] = Content.of(env_pth(merged))
        self._write(changes)
        return receipt

    def revert(self, names: Sequence[str] | None, force: bool = False) -> list[str]:
        """Put back the exact bytes from before the named layers (all, when None).

        Returns the layers reverted, last applied first.

        Raises:
            ApplyError: a file was edited since, or a layer that stays built on one that goes.
        """
        receipts = receipts_of(DirTree(self.root))
        going = [r for r in receipts if names is None or r["layer"] in names]
        staying = [r for r in receipts if r not in going]
        self._refuse_entangled(going, staying)
        self._refuse_edited(going, receipts, force)
        self._refuse_lost(going)
        for receipt in reversed(going):
            self._put_back(receipt)
        merged: dict[str, str] = {}
        for receipt in staying:
            merged.update(receipt["env"])
        if merged:
            self._put("env.pth", env_pth(merged))
            (self.state / "env.pth").replace(self.root / ENV_PTH)
        else:
            (self.root / ENV_PTH).unlink(missing_ok=True)
        if not staying:
            self._clear()
        return [r["layer"] for r in reversed(going)]

    @staticmethod
    def _refuse_entangled(going: Sequence[Any], staying: Sequence[Any]) -> None:
        for gone in going:
            for kept in staying:
                pair = (gone, kept), (kept, gone)
                if any(one.get("compiled_with") == other["layer"] for one, other in pair):
                    raise ApplyError(
                        f"layers {gone['layer']} and {kept['layer']} are compiled into one "
                        f"companion, so {gone['layer']} cannot go alone",
                        EXIT_DRIFT,
                        f"revert {kept['layer']} too",
                    )
                both = set(gone["files"]) & set(kept["files"])
                if kept["sequence"] > gone["sequence"] and both:
                    raise ApplyError(
                        f"layer {kept['layer']} was applied on top of {gone['layer']} "
                        f"({min(both)}), so {gone['layer']} cannot go alone",
                        EXIT_DRIFT,
                        f"revert {kept['layer']} too",
                    )

    def _refuse_edited(self, going: Sequence[Any], receipts: Sequence[Any], force: bool) -> None:
        tree = DirTree(self.root)
        for receipt in going:
            edited = [] if force else unexplained(receipt, receipts, tree)
            # a revert that was interrupted has put some of them back already
            edited = [p for p in edited if tree.digest(p) != receipt["files"][p]["before"]]
            if edited:
                raise ApplyError(
                    f"{edited[0]} was changed after layer {receipt['layer']} was applied; "
                    "reverting would lose that",
                    EXIT_DRIFT,
                    "look at the file, then use --force to put the original back all the same",
                )

    def _refuse_lost(self, going: Sequence[Any]) -> None:
        tree, backup = DirTree(self.root), DirTree(self.state / "backup")
        for receipt in going:
            for path, entry in receipt["files"].items():
                before = entry["before"]
                needed = before is not None and tree.digest(path) != before
                if needed and backup.digest(before) != before:
                    raise ApplyError(
                        f"the original of {path} is lost or damaged in {backup.root}",
                        EXIT_DRIFT,
                        f"install {path.split('/')[0]} again",
                    )

    def _put_back(self, receipt: Mapping[str, Any]) -> None:
        for path, entry in receipt["files"].items():
            target = self.root / path
            if entry["before"] is None:
                target.unlink(missing_ok=True)
                made = self.root / (entry.get("made") or path)
                drop_empty(target.parent, made.parent)
                continue
            tree = DirTree(self.root)
            same_bytes = tree.digest(path) == entry["before"]
            if not same_bytes or tree.mode(path) != entry.get("mode", tree.mode(path)):
                self._restore(path, entry["before"], entry)
            for stale in stale_pyc(DirTree(self.root), path):
                if stale not in receipt["files"]:
                    (self.root / stale).unlink(missing_ok=True)
        (self.root / receipt_path(receipt["layer"])).unlink()


def _keep_originals(
    receipt: dict[str, Any], older: Mapping[str, Mapping[str, Any]], tree: Tree
) -> None:
    """What an older form of the same layer changed, and is still so, is this receipt's too.

    Files that somebody else has put in place since (a package manager, say) are theirs.
    """
    files = receipt["files"]
    for path, entry in older.items():
        now = files.get(path)
        if now is None and tree.digest(path) == entry["after"]:
            files[path] = dict(entry)
        elif now is not None and now["before"] == entry["after"]:
            files[path] = {**entry, "after": now["after"], "ops": now["ops"]}
    receipt["files"] = dict(sorted(files.items()))
