"""Files that Python would import instead of a recorded or patched module of a target."""

from __future__ import annotations

import contextlib
import csv
from typing import TYPE_CHECKING

from builder.applier.receipts import receipts_of
from builder.applier.records import recorded_paths
from builder.proof.finders import (
    Finder,
    Naming,
    Shadow,
    changed_packages,
    folders_below,
    is_unchecked,
    may_run,
)

#: Packages that level ``dispatch`` imports, whether or not a layer changes them.
_RUN = ("vllm", "flashinfer", "b12x")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.applier.trees import Tree
    from builder.proof.target import VerifyTarget


def shadows_of(target: VerifyTarget) -> list[Shadow]:
    """The shadows in a target: in the packages that layers change, and earlier on ``sys.path``.

    A patched file must be what Python imports.  Of other modules, a file in a RECORD may not be
    hidden by one in no RECORD.
    """
    base = target.plan.base
    finder = Finder(target.tree, Naming.of(base.python, base.platform))
    found = list(_in_packages(target, finder))
    if target.unrecorded is not None:
        found += target.unrecorded().shadows
    return list(dict.fromkeys(found))


def _in_packages(target: VerifyTarget, finder: Finder) -> Iterator[Shadow]:
    tree = target.tree
    receipts = receipts_of(tree)
    patched = {path for r in receipts for path, entry in r.files.items() if entry.after}
    listed = patched | _recorded(tree)
    folders = {name.rpartition("/")[0] + "/" for name in listed}
    listed |= {folder[:end] for folder in folders for end in _ends(folder)}
    tops = changed_packages(tree) | {name for name in tree.children("") if name in _RUN}
    for folder in ("", *folders_below(tree, tops)):
        for first, *others in finder.contested(folder):
            if not folder and first.partition("/")[0] not in tops:
                continue
            hidden = [path for path in others if path in patched]
            if first not in listed:
                hidden += [path for path in others if path in listed]
            if first not in patched and hidden:
                yield Shadow(first, hidden[0])
    for path in sorted(patched):
        for compiled in finder.compiled(path):
            if _runs(target, compiled, path):
                yield Shadow(compiled, path)


def _runs(target: VerifyTarget, compiled: str, path: str) -> bool:
    """Whether Python may run a compiled file instead of a patched one.

    A layer removes the compiled files of what it patches.  In an environment of this machine Python
    has written new ones since then, always with a time stamp.
    """
    data = target.tree.read(compiled) or b""
    if target.kind == "dir":
        return is_unchecked(data)
    return may_run(data, target.tree.read(path))


def _ends(folder: str) -> Iterator[int]:
    return (end + 1 for end, letter in enumerate(folder) if letter == "/")


def _recorded(tree: Tree) -> set[str]:
    """The paths in every RECORD of a tree; a damaged one names none."""
    found: set[str] = set()
    for dist in tree.distributions().values():
        with contextlib.suppress(ValueError, csv.Error):
            found.update(recorded_paths(tree.read(f"{dist.info_dir}/RECORD") or b""))
    return found
