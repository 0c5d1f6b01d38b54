"""Applies changes to a copy of a release's sources, for its build to read."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from builder.applier.diff import parse_diff
from builder.applier.files import judge_file
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.trees import Content, DirTree
from builder.compile.changes import changed_by
from builder.compile.cmake import evaluate
from builder.compile.includes import SUFFIXES, Sources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.diff import FileDiff
    from builder.applier.opkinds import TextChange
    from builder.applier.outcomes import OpResult
    from builder.applier.trees import Changes
    from builder.compile.cmake import BuildRecipe
    from builder.compile.source import SourceTree

#: Folders below ``csrc`` that the build does not use.
_DOCUMENTS = (".md", ".rst")


@dataclass(frozen=True)
class SourceBuild:
    """A source tree, and its build recipe for an architecture list."""

    source: SourceTree
    arch_list: str
    cuda: str
    #: another tree with the same build recipe
    like: SourceBuild | None = None

    @cached_property
    def recipe(self) -> BuildRecipe:
        """What would be compiled."""
        if self.like is not None:
            return self.like.recipe
        return evaluate(self.source, self.arch_list, self.cuda)

    @cached_property
    def sources(self) -> Sources:
        """Its C++ and CUDA files, including generated ones."""
        return Sources(self.source.root, self.recipe.generated)

    @cached_property
    def closures(self) -> Mapping[str, frozenset[str]]:
        """Unit -> the files that it depends on."""
        return {path: self.sources.closure(path) for path in self.recipe.units}

    @cached_property
    def reached(self) -> frozenset[str]:
        """All files that units depend on."""
        return frozenset().union(*self.closures.values())


@dataclass(frozen=True)
class JudgedFile:
    """The result of one file of a diff on the sources with earlier changes."""

    change: FileDiff
    result: OpResult


class PatchedSource:
    """Applies changes to a copy of a release's sources, one by one."""

    def __init__(self, pristine: SourceTree, folder: Path) -> None:
        shutil.copytree(pristine.root, folder, symlinks=True)
        self.pristine = pristine
        self.source = replace(pristine, root=folder, edited=True)
        self.tree = DirTree(folder)
        self._touched: set[str] = set()

    @property
    def texts(self) -> dict[str, bytes | None]:
        """Path -> new content of changed files; None for deleted files."""
        before = DirTree(self.pristine.root)
        found = {path: self.tree.read(path) for path in sorted(self._touched)}
        return {path: text for path, text in found.items() if text != before.read(path)}

    def built(self, before: SourceBuild) -> SourceBuild:
        """The changed tree, built for the same targets as the pristine tree ``before``.

        If only the text of C++ and CUDA files changed, the build recipe is the same.
        """
        there = DirTree(self.pristine.root)
        edits = all(
            PurePosixPath(path).suffix in SUFFIXES and text is not None and there.digest(path)
            for path, text in self.texts.items()
        )
        like = before if edits else None
        return SourceBuild(self.source, before.arch_list, before.cuda, like)

    def known(self, change: TextChange) -> None:
        """Apply a built-in change; does nothing if the sources have it.

        Raises:
            SparkBuildError: the sources have neither of its texts (drift, exit 4).
        """
        texts = changed_by(Sources(self.source.root), change).texts
        self._write({path: Content.of(text) for path, text in texts.items()})

    def diff(self, text: str) -> list[JudgedFile]:
        """Apply a diff, except files where it does not match; returns the result for every file."""
        judged = []
        for change in parse_diff(text):
            if change.path.endswith(_DOCUMENTS):
                continue
            result = judge_file(change, self.tree)
            judged.append(JudgedFile(change, result))
            if result.found == PRE:
                self._write(result.changes)
        return judged

    def _write(self, changes: Changes) -> None:
        for path, content in changes.items():
            target = self.source.root / path
            self._touched.add(path)
            if content is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
            target.chmod(content.mode)


def verdict(judged: Sequence[JudgedFile]) -> tuple[str, str]:
    """The combined state of some files of a diff, and the reason if they do not apply."""
    for found in (DRIFT, AMBIGUOUS):
        for one in judged:
            if one.result.found == found:
                reason = one.result.reason
                path = one.change.path
                return found, reason if path in reason else f"{path}: {reason}"
    names = {
        found: [one.change.path for one in judged if one.result.found == found]
        for found in (PRE, POST)
    }
    if names[PRE] and names[POST]:
        there, missing = ", ".join(names[POST]), ", ".join(names[PRE])
        return DRIFT, f"{there} already patched, {missing} not"
    return (PRE if names[PRE] else POST), ""
