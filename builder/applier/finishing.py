"""``finish``: completes an image after its files were copied (removals, RECORD, checks)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.folders import drop_empty
from builder.applier.receipts import final_digests, receipts_of
from builder.applier.records import present, true_records
from builder.applier.trees import DirTree, Tree, distribution_of, stale_pyc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.receipts import Receipt


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
    for path, (mode, uid, gid) in json.loads(listing.read_bytes()).items():
        if os.path.exists(path):
            os.chown(path, uid, gid)
            os.chmod(path, mode)
