"""Decides from a release's sources what a stage compiles, or why it compiles nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace
from packaging.version import Version

from builder.applier.digests import sha256_hex
from builder.applier.files import judge_file
from builder.applier.sources import Unstaged
from builder.applier.states import AMBIGUOUS, DRIFT, NEEDS_REBUILD, NOT_APPLICABLE, POST
from builder.applier.trees import DirTree
from builder.compile.affected import affected_units, is_build_file
from builder.compile.changes import SourceChange, stage_name
from builder.compile.patchedsource import JudgedFile, PatchedSource, verdict
from builder.compile.wheelplan import plan_wheel
from builder.documents.compiled import FoundSources, SourceFile
from builder.errors import Exit, SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.applier.opkinds import Compile
    from builder.compile.patchedsource import SourceBuild
    from builder.compile.source import SourceTree
    from builder.compile.wheelplan import WheelPlan

#: Below these a build of the extensions reads: what else reaches a wheel, other tools compile.
_READ = ("csrc/", "cmake/", "CMakeLists.txt")
#: Names that a reason lists before it only counts.
_LISTED = 4


@dataclass(frozen=True)
class CompileWork:
    """What a stage compiles: sources, what is changed in them, and the units that this reaches."""

    source: SourceTree
    change: SourceChange
    plan: WheelPlan
    #: changed files, with the sha256 before and after; None where there is no such file
    files: tuple[SourceFile, ...]
    #: what was found of the last change in the sources
    sources: FoundSources
    #: why nothing would come of it, where no later change helps
    refusal: Unstaged | None


@dataclass(frozen=True)
class AlreadyPresent:
    """The sources have the last change already: the base's binary tells whether the base has."""

    extensions: tuple[str, ...]
    sources: FoundSources


def plan_changes(
    before: SourceBuild, ops: Sequence[Compile], folder: Path
) -> CompileWork | AlreadyPresent | Unstaged:
    """Lay the changes of ``compile`` ops over a release's sources, and see what that reaches.

    Args:
        before: the sources as released.
        ops: all for the same architectures; what is not compiled is said of the last one.
        folder: a path that is not there yet, for the changed sources.

    Raises:
        SparkBuildError: a change that is known by name does not fit (exit 4), is in the sources
            already, or cannot be done with an extension wheel (exit 10).
        UsageError: the changed build files cannot be read.
        EngineError: there is no cmake.
    """
    patched = PatchedSource(before.source, folder)
    for op in ops[:-1]:
        _lay(patched, op)
    judged = _lay(patched, ops[-1])
    after = patched.built(before)
    if ops[-1].change:
        if not patched.texts:
            raise _has_it(ops[-1], before)
        work = _work(before, after, patched, ops, _facts(ops[-1], before))
        if isinstance(work, Unstaged):
            raise SparkBuildError(work.reason, Exit.NEEDS_REBUILD, "; ".join(work.notes))
        return work
    return _PullStage(before, after, patched, ops).planned(judged)


def _lay(laid: PatchedSource, op: Compile) -> list[JudgedFile]:
    if not op.change:
        return laid.diff(op.diff)
    laid.known(op.change)
    return []


def _has_it(op: Compile, before: SourceBuild) -> SparkBuildError:
    release = before.source.version
    return SparkBuildError(
        f"the sources of vllm {release} have {op.change_name} already, but this base was not "
        "built for SM121 from them",
        Exit.NEEDS_REBUILD,
        hint=f"build yours with TORCH_CUDA_ARCH_LIST={before.arch_list}"
        + ("" if Version(release).is_devrelease else f", or --base pypi:vllm=={release}"),
    )


def _work(
    before: SourceBuild,
    after: SourceBuild,
    laid: PatchedSource,
    ops: Sequence[Compile],
    sources: FoundSources,
) -> CompileWork | Unstaged:
    """What is compiled of all changes together; ``sources`` gets the files that reach nothing."""
    texts = laid.texts
    found = affected_units(before, after, texts)
    # of the last op alone: the others have said theirs
    mine = {path for path in ops[-1].files if path in found.unreached}
    facts = replace(sources, unreached=tuple(sorted(mine)) or None)
    if found.refusal:
        return _refused(found.refusal, facts)
    if not found.rebuilt:
        return _nothing(before, sorted(texts), facts)
    counted = {path: text for path, text in texts.items() if path not in found.unreached}
    change = SourceChange(
        name=stage_name(ops),
        texts={p: t for p, t in counted.items() if t is not None and p in after.sources.texts},
    )
    plan = plan_wheel(
        after.source,
        change,
        before.arch_list,
        before.cuda,
        rebuilt=found.rebuilt,
        recipe=after.recipe,
    )
    pristine = DirTree(before.source.root)
    files = tuple(
        SourceFile(
            path=path,
            before=pristine.digest(path),
            after=None if text is None else sha256_hex(text),
        )
        for path, text in counted.items()
    )
    traps = _refused(found.traps[0], facts, found.traps[1]) if found.traps[0] else None
    return CompileWork(after.source, change, plan, files, facts, traps)


def _facts(op: Compile, before: SourceBuild) -> FoundSources:
    return FoundSources(
        change=op.change_name,
        filename=before.source.origin,
        sha256=before.source.sha256,
        found="to-compile",
    )


def _refused(reason: str, facts: FoundSources, hint: str = "") -> Unstaged:
    updated = replace(facts, found="not-compiled")
    return Unstaged(NEEDS_REBUILD, reason, updated, notes=(hint,) if hint else ())


def _nothing(before: SourceBuild, paths: Sequence[str], facts: FoundSources) -> Unstaged:
    release, arch = before.source.version, before.arch_list
    reason = (
        f"no unit that vllm {release} builds for {arch} comes from {_some(paths)}: no effect on "
        "SM121"
    )
    updated = replace(facts, found="nothing", unreached=tuple(paths))
    return Unstaged(NOT_APPLICABLE, reason, updated)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class _PullStage:
    """The last of some ops, which is of a pull request."""

    before: SourceBuild
    after: SourceBuild
    laid: PatchedSource
    ops: Sequence[Compile]

    def planned(self, judged: Sequence[JudgedFile]) -> CompileWork | AlreadyPresent | Unstaged:
        """What becomes of it."""
        facts = _facts(self.ops[-1], self.before)
        other = [path for path in self.ops[-1].files if not path.startswith(_READ)]
        if other:
            return _refused(f"{_some(other)} are not compiled by nvcc", facts)
        counting = [one for one in judged if self._counts(one)]
        if not counting:
            return _nothing(self.before, list(self.ops[-1].files), facts)
        found, reason = verdict(counting)
        if found in (DRIFT, AMBIGUOUS):
            detail = f"{reason} (in {facts.filename})"
            return Unstaged(found, detail, replace(facts, found="conflict"))
        if found == POST and self._released(counting):
            return AlreadyPresent(self._extensions(counting), replace(facts, found="there"))
        try:
            return _work(self.before, self.after, self.laid, self.ops, facts)
        except SparkBuildError as error:
            if error.code not in (Exit.NEEDS_REBUILD, Exit.USAGE):
                raise
            return _refused(str(error), facts, error.hint)

    def _counts(self, one: JudgedFile) -> bool:
        """Whether anything is compiled of a file, before the change or after it."""
        paths = {path for path in (one.change.old, one.change.new) if path}
        reached = self.before.reached | self.after.reached
        return bool(paths & reached) or any(map(is_build_file, paths))

    def _released(self, counting: Sequence[JudgedFile]) -> bool:
        """Whether it is there as released, and not because of the changes before it."""
        tree = DirTree(self.before.source.root)
        again = [JudgedFile(one.change, judge_file(one.change, tree)) for one in counting]
        return verdict(again)[0] == POST

    def _extensions(self, counting: Sequence[JudgedFile]) -> tuple[str, ...]:
        """The extensions that the release built of its files; of build files alone: all."""
        paths = {one.change.path for one in counting}
        units = self.before.recipe.units
        hit = {units[unit].extension for unit, all_ in self.before.closures.items() if all_ & paths}
        return tuple(sorted(hit or {unit.extension for unit in units.values()}))
