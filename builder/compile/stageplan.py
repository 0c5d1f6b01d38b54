"""Decides from a release's sources what a stage compiles, or why nothing."""

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

#: Folders that the build of extensions reads.
_READ = ("csrc/", "cmake/", "CMakeLists.txt")
#: Names that a reason lists at most.
_LISTED = 4


@dataclass(frozen=True)
class CompileWork:
    """A stage's work: sources, changes, and affected units."""

    source: SourceTree
    change: SourceChange
    plan: WheelPlan
    #: changed files, with the sha256 before and after; None for a missing file
    files: tuple[SourceFile, ...]
    #: the state of the last change in the sources
    sources: FoundSources
    #: why it has no effect, if no later change fixes it
    refusal: Unstaged | None


@dataclass(frozen=True)
class AlreadyPresent:
    """The sources already have the last change; the base's binary shows whether the base has it."""

    extensions: tuple[str, ...]
    sources: FoundSources


def plan_changes(
    before: SourceBuild, ops: Sequence[Compile], folder: Path
) -> CompileWork | AlreadyPresent | Unstaged:
    """Apply the changes of ``compile`` ops to a release's sources, and find affected units.

    Args:
        before: the sources as released.
        ops: for the same architectures; reasons are about the last one.
        folder: a new path for the changed sources.

    Raises:
        SparkBuildError: a built-in change does not match (exit 4), is already in the
            sources, or is not possible with an extension wheel (exit 10).
        UsageError: the changed build files cannot be evaluated.
        EngineError: cmake is missing.
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


def _lay(patched: PatchedSource, op: Compile) -> list[JudgedFile]:
    if not op.change:
        return patched.diff(op.diff)
    patched.known(op.change)
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
    patched: PatchedSource,
    ops: Sequence[Compile],
    sources: FoundSources,
) -> CompileWork | Unstaged:
    """The work for all changes together."""
    texts = patched.texts
    found = affected_units(before, after, texts)
    # only for the last op: earlier ones have reported already
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
    """The decision for a pull request's op, the last of some ops."""

    before: SourceBuild
    after: SourceBuild
    patched: PatchedSource
    ops: Sequence[Compile]

    def planned(self, judged: Sequence[JudgedFile]) -> CompileWork | AlreadyPresent | Unstaged:
        """The decision."""
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
            return _work(self.before, self.after, self.patched, self.ops, facts)
        except SparkBuildError as error:
            if error.code not in (Exit.NEEDS_REBUILD, Exit.USAGE):
                raise
            return _refused(str(error), facts, error.hint)

    def _counts(self, one: JudgedFile) -> bool:
        """Whether a file is compiled, before or after the change."""
        paths = {path for path in (one.change.old, one.change.new) if path}
        reached = self.before.reached | self.after.reached
        return bool(paths & reached) or any(map(is_build_file, paths))

    def _released(self, counting: Sequence[JudgedFile]) -> bool:
        """Whether the release has it, without earlier changes."""
        tree = DirTree(self.before.source.root)
        again = [JudgedFile(one.change, judge_file(one.change, tree)) for one in counting]
        return verdict(again)[0] == POST

    def _extensions(self, counting: Sequence[JudgedFile]) -> tuple[str, ...]:
        """The extensions that use its files; all for build files."""
        paths = {one.change.path for one in counting}
        units = self.before.recipe.units
        hit = {units[unit].extension for unit, all_ in self.before.closures.items() if all_ & paths}
        return tuple(sorted(hit or {unit.extension for unit in units.values()}))
