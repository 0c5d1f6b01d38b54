"""Commits layers to a real directory, and reverts them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.environment import ENV_PTH, env_pth
from builder.applier.failures import EXIT_DRIFT, ApplyError
from builder.applier.folders import drop_empty
from builder.applier.journal import Journal
from builder.applier.receipts import (
    FileEntry,
    kept_true,
    make_receipt,
    receipt_bytes,
    receipt_path,
    receipts_of,
    unexplained,
)
from builder.applier.records import present, settled_records, true_records, untouched_rows
from builder.applier.trees import (
    Changes,
    Content,
    DirTree,
    OverlayTree,
    Tree,
    stale_pyc,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome
    from builder.applier.receipts import Original, Receipt


class Store(Journal):
    """Layers in a real site-packages directory; a context manager, as `Journal` is."""

    def commit(self, layer: Layer, outcome: Outcome) -> Receipt:
        """Write a needed layer's changes and its receipt, all or nothing.

        Raises:
            ApplyError: the disk is full or a file cannot be written; the tree is unchanged.
        """
        tree = DirTree(self.root)
        receipts = receipts_of(tree)
        number = 1 + max((r.sequence for r in receipts), default=0)
        changed = settled_records(layer, outcome.changes, tree)
        receipt = make_receipt(layer, outcome, tree, number, changed)
        previous = next((r for r in receipts if r.layer == layer.name), None)
        changes: Changes = {**outcome.changes, **changed}
        ours = {entry.made for r in receipts for entry in r.files.values()}
        files = {path: self._noted(path, entry, ours) for path, entry in receipt.files.items()}
        records = {
            path: self._original(path, receipts) or self._now(path, tree.digest(path))
            for path in changed
        }
        if previous is not None:
            files = _with_originals(files, previous.files, tree, kept_true(receipts))
            records = {**(previous.records or {}), **records}
        receipt = replace(receipt, files=files, records=records)
        changes[receipt_path(layer.name)] = Content.of(receipt_bytes(receipt))
        merged: dict[str, str] = {}
        for earlier in [*(r for r in receipts if r is not previous), receipt]:
            merged.update(earlier.env)
        if merged:
            changes[ENV_PTH] = Content.of(env_pth(merged))
        self._write(changes)
        return receipt

    def _noted(self, path: str, entry: FileEntry, ours: Collection[str | None]) -> FileEntry:
        """The entry of a file, with what a revert of it needs."""
        if entry.before is None:
            return replace(entry, made=self._first_missing(path, ours))
        original = self._now(path, entry.before)
        return FileEntry(**vars(original), after=entry.after, ops=entry.ops)

    def revert(self, names: Sequence[str] | None, force: bool = False) -> list[str]:
        """Restore the exact bytes from before the given layers (None means all).

        Returns the reverted layers, last applied first.

        Raises:
            ApplyError: a file was edited since, or a remaining layer depends on a reverted one.
        """
        receipts = receipts_of(DirTree(self.root))
        going = [r for r in receipts if names is None or r.layer in names]
        staying = [r for r in receipts if r not in going]
        self._refuse_entangled(going, staying)
        self._refuse_edited(going, receipts, force)
        self._refuse_lost(going)
        for receipt in reversed(going):
            self._put_back(receipt)
        self._put_records_back(going, receipts)
        for receipt in reversed(going):
            (self.root / receipt_path(receipt.layer)).unlink()
        merged: dict[str, str] = {}
        for receipt in staying:
            merged.update(receipt.env)
        if merged:
            self._put("env.pth", env_pth(merged))
            (self.state / "env.pth").replace(self.root / ENV_PTH)
        else:
            (self.root / ENV_PTH).unlink(missing_ok=True)
        if not staying:
            self._clear()
        return [r.layer for r in reversed(going)]

    @staticmethod
    def _refuse_entangled(going: Sequence[Receipt], staying: Sequence[Receipt]) -> None:
        for gone in going:
            for kept in staying:
                pair = (gone, kept), (kept, gone)
                if any(one.compiled_with == other.layer for one, other in pair):
                    raise ApplyError(
                        f"layers {gone.layer} and {kept.layer} are compiled into one "
                        f"extension wheel, so {gone.layer} cannot be reverted alone",
                        EXIT_DRIFT,
                        f"revert {kept.layer} too",
                    )
                both = set(gone.files) & {*kept.files, *(kept.records or ())}
                if kept.sequence > gone.sequence and both:
                    raise ApplyError(
                        f"layer {kept.layer} was applied on top of {gone.layer} "
                        f"({min(both)}), so {gone.layer} cannot be reverted alone",
                        EXIT_DRIFT,
                        f"revert {kept.layer} too",
                    )

    def _refuse_edited(
        self, going: Sequence[Receipt], receipts: Sequence[Receipt], force: bool
    ) -> None:
        tree = DirTree(self.root)
        for receipt in going:
            edited = [] if force else unexplained(receipt, receipts, tree)
            # an interrupted revert has already restored some of them
            edited = [p for p in edited if tree.digest(p) != receipt.files[p].before]
            if edited:
                raise ApplyError(
                    f"{edited[0]} was changed after layer {receipt.layer} was applied; "
                    f"reverting would lose that edit",
                    EXIT_DRIFT,
                    "check the file, then use --force to restore the original anyway",
                )

    def _refuse_lost(self, going: Sequence[Receipt]) -> None:
        tree, backup = DirTree(self.root), DirTree(self.state / "backup")
        for receipt in going:
            for path, entry in receipt.files.items():
                before = entry.before
                if before is None or tree.digest(path) == before:
                    continue
                if backup.digest(before) != before:
                    raise ApplyError(
                        f"the original of {path} is missing or damaged in {backup.root}",
                        EXIT_DRIFT,
                        f"install {path.split('/')[0]} again",
                    )

    def _put_back(self, receipt: Receipt) -> None:
        for path, entry in receipt.files.items():
            target = self.root / path
            if entry.before is None:
                target.unlink(missing_ok=True)
                made = self.root / (entry.made or path)
                drop_empty(target.parent, made.parent)
                continue
            tree = DirTree(self.root)
            same_bytes = tree.digest(path) == entry.before
            if not same_bytes or entry.mode not in (None, tree.mode(path)):
                self._restore(path, entry)
        replaced = [path for path, entry in receipt.files.items() if entry.before is not None]
        for stale in stale_pyc(DirTree(self.root), replaced):
            if stale not in receipt.files:
                (self.root / stale).unlink(missing_ok=True)

    # -- RECORD

    def _original(self, path: str, receipts: Sequence[Receipt]) -> Original | None:
        """The original of a RECORD before these layers, if they wrote it and the backup has it."""
        known = [r.records[path] for r in receipts if r.records and path in r.records]
        now = DirTree(self.root).read(path)
        if not known or known[-1].before is None or now is None:
            return None
        kept = DirTree(self.state / "backup").read(known[-1].before)
        if kept is None and sha256_hex(now) != known[-1].before:
            return None
        touched = {file for receipt in receipts for file in receipt.files}
        same = untouched_rows(kept or now, touched) == untouched_rows(now, touched)
        return known[-1] if same else None

    def _put_records_back(self, going: Sequence[Receipt], receipts: Sequence[Receipt]) -> None:
        """Restore the RECORD files of reverted layers.

        If another program has changed one since, only its rows are updated.
        """
        staying = [r for r in receipts if r not in going]
        for path in sorted(kept_true(going)):
            data = DirTree(self.root).read(path)
            if data is None:
                continue
            original = self._original(path, receipts)
            others = [r for r in (staying if original else going) if path in (r.records or ())]
            if original is not None:
                data = DirTree(self.state / "backup").read(str(original.before)) or data
            for receipt in others:
                tree = OverlayTree(DirTree(self.root))
                tree.update({path: Content.of(data)})
                now = present(self.root, receipt.files)
                content = true_records(tree, now, receipt.package).get(path)
                data = content.read() if content is not None else data
            if original is not None and sha256_hex(data) == original.before:
                self._restore(path, original)
            elif data != DirTree(self.root).read(path):
                self._put("record", data)
                (self.state / "record").chmod(DirTree(self.root).mode(path))
                (self.state / "record").replace(self.root / path)


def _with_originals(
    files: Mapping[str, FileEntry],
    older: Mapping[str, FileEntry],
    tree: Tree,
    records: Collection[str],
) -> dict[str, FileEntry]:
    """Files with the originals of those that an older version of the layer changed.

    Files that another program (such as a package manager) has replaced since keep their own;
    RECORD files among them were updated by other layers.
    """
    found = dict(files)
    for path, entry in older.items():
        now, digest = files.get(path), tree.digest(path)
        if digest != entry.after and (path not in records or digest is None):
            continue
        found[path] = entry if now is None else replace(entry, after=now.after, ops=now.ops)
    return dict(sorted(found.items()))
