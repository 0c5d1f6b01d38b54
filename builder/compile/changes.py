"""Changes to a release's sources: the changed files, and the units that they affect."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from builder.applier.diff import apply_hunks, parse_diff
from builder.applier.edits import judge_file
from builder.applier.files import read_regular
from builder.applier.layers import TextChange
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.trees import Content, DirTree
from builder.applier.values import keys_of
from builder.common.diffs import MAX_DIFF
from builder.common.document import plain
from builder.common.hints import reason as why
from builder.compile.known import KnownChange, _known
from builder.compile.sources import SUFFIXES, Sources, dead_guards, evaluate
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.diff import FileDiff
    from builder.applier.states import OpResult
    from builder.applier.trees import Changes
    from builder.compile.sources import BuildRecipe, SourceTree, Unit


@dataclass(frozen=True, kw_only=True)
class SourceChange:
    """New texts of some files of a source tree; empty if there is nothing to change."""

    name: str
    texts: Mapping[str, bytes]
    #: first release that has the change, if known
    upstream: str = ""


def rendered_change(name: str) -> dict[str, Any]:
    """A built-in change in rendered form: its text, and its kernels.

    Raises:
        UsageError: it does not exist, or has no kernel whose machine code can be judged.
    """
    from builder.common.machinecode import load_kernels

    change = _known(name)
    kernel = next(kernel for kernel in load_kernels() if kernel.name == change.kernel)
    fields = {key: value for key, value in plain(change).items() if key in keys_of(TextChange)}
    code = {
        "name": kernel.name,
        "modules": list(kernel.modules),
        "symbol": kernel.symbol,
        "guards": dict(change.guards),
    }
    return {"change": fields, "code": code}


def named_change(sources: Sources, name: str) -> SourceChange:
    """A built-in change for this tree; without texts if the tree already has it.

    Raises:
        UsageError: no built-in change has this name.
        SparkBuildError: the tree has neither the old form nor the new one (drift, exit 4).
    """
    return changed_by(sources, _known(name))


def changed_by(sources: Sources, change: TextChange | KnownChange) -> SourceChange:
    """A change for this tree; without texts if the tree already has it.

    Raises:
        SparkBuildError: the tree has neither the old form nor the new one (drift, exit 4).
    """
    name = change.name
    old, new = change.old.encode(), change.new.encode()
    files = {p: t for p, t in sources.texts.items() if p.endswith(tuple(change.files))}
    texts = {path: text.replace(old, new) for path, text in files.items() if old in text}
    if not texts and not any(new in text for text in files.values()):
        raise SparkBuildError(
            f"{name}: none of {', '.join(change.files)} in this source tree holds "
            f"{change.old!r} or {change.new!r}",
            Exit.DRIFT,
        )
    return SourceChange(name=name, texts=texts, upstream=change.applied_upstream)


def patched(sources: Sources, patch: Path) -> SourceChange:
    """A unified diff applied to this tree: exact context, unique position, no fuzz.

    Raises:
        UsageError: the file cannot be read, or changes a file that is not C++ or CUDA.
        SparkBuildError: a hunk does not match exactly once (drift or ambiguous, exit 4).
    """
    try:
        files = parse_diff(read_regular(patch, MAX_DIFF).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {patch}: {why(error)}") from None
    texts = {}
    for file in files:
        path = file.path
        if file.old != file.new or path not in sources.texts:
            raise UsageError(f"{patch}: {path} is not a source file of this tree")
        text = sources.texts[path].decode("utf-8")
        state, changed, _ = apply_hunks(text, file.hunks)
        if state in (DRIFT, AMBIGUOUS):
            raise SparkBuildError(
                f"{patch}: {path}: {state}: {changed}",
                Exit.DRIFT,
                hint="create the diff against this release's source archive",
            )
        if changed != text:
            texts[path] = changed.encode()
    return SourceChange(name=patch.name, texts=texts)


# ------------------------------------------------------------------------ the sources with a change


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
        texts = {path: self.tree.read(path) for path in sorted(self._touched)}
        return {path: text for path, text in texts.items() if text != before.read(path)}

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
            if result.form == PRE:
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
    for finding in (DRIFT, AMBIGUOUS):
        for one in judged:
            if one.result.form == finding:
                reason = one.result.reason
                path = one.change.path
                return finding, reason if path in reason else f"{path}: {reason}"
    names = {
        finding: [one.change.path for one in judged if one.result.form == finding]
        for finding in (PRE, POST)
    }
    if names[PRE] and names[POST]:
        there, missing = ", ".join(names[POST]), ", ".join(names[PRE])
        return DRIFT, f"{there} already patched, {missing} not"
    return (PRE if names[PRE] else POST), ""


# ------------------------------------------------------------------------------- the affected units


#: An operator declaration with its schema.
_DECLARED = re.compile(rb'\.def\(\s*"([\w:]+)')
_DECLARES = b"TORCH_LIBRARY"
#: A line of a build file with the version of an external project.
_FETCHED = re.compile(rb"^[^#\n]*(?:GIT_TAG|GIT_REPOSITORY|URL|_REVISION)\b.*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class AffectedUnits:
    """Units that a change affects, and changed files without effect."""

    rebuilt: tuple[Unit, ...]
    #: changed files that no unit uses, and build files that do not change the build
    unreached: tuple[str, ...]
    #: why an extension wheel cannot contain the change, or ``""``
    refusal: str
    #: why compiling it would have no effect, and what helps; a later change may fix it
    traps: tuple[str, str]


def affected_units(
    before: SourceBuild, after: SourceBuild, changed: Iterable[str]
) -> AffectedUnits:
    """Compare a changed source tree with the released one.

    Args:
        before: the tree as released.
        after: the same with changes, for the same architectures and CUDA.
        changed: paths of files that differ, including deleted ones.
    """
    paths = set(changed)
    old, new = before.recipe, after.recipe
    generated = old.generated.keys() | new.generated.keys()
    paths |= {path for path in generated if old.generated.get(path) != new.generated.get(path)}
    rebuilt = [
        unit
        for path, unit in sorted(new.units.items())
        if after.closures[path] & paths
        or before.closures.get(path, frozenset()) & paths
        or _compiled_as(old, path) != _compiled_as(new, path)
    ]
    gone = sorted(old.units.keys() - new.units.keys())
    same = not gone and all(_compiled_as(old, p) == _compiled_as(new, p) for p in new.units)
    same = same and old.generated == new.generated
    unreached = [
        path
        for path in sorted(set(changed))
        if path not in before.reached | after.reached and (same or not is_build_file(path))
    ]
    refusal = _fetched(before, after, paths) or _declaring(before, after, rebuilt, paths)
    if not refusal and gone and not rebuilt:
        names = ", ".join(gone)
        refusal = f"it removes {names} from the build, but a built library keeps its code"
    return AffectedUnits(
        rebuilt=tuple(rebuilt),
        unreached=tuple(unreached),
        refusal=refusal,
        traps=_dead(after, rebuilt),
    )


def is_build_file(path: str) -> bool:
    """Whether a file may affect how others are compiled: any file that is not a source."""
    return PurePosixPath(path).suffix not in SUFFIXES


def build_files(diff: str) -> list[str]:
    """The files of a diff that CMake or a program that it starts may run: all but C++ and CUDA.

    Raises:
        ApplyError: the diff is malformed.
    """
    changes = [one for one in parse_diff(diff) if not one.path.endswith(_DOCUMENTS)]
    paths = {path for one in changes for path in (one.old, one.new) if path}
    return sorted(filter(is_build_file, paths))


def _compiled_as(recipe: BuildRecipe, path: str) -> object:
    """The compile options of a unit; None if there is no such unit."""
    unit = recipe.units.get(path)
    if unit is None:
        return None
    return unit, recipe.extensions.get(unit.extension), recipe.flags if unit.gencodes else ()


def _fetched(before: SourceBuild, after: SourceBuild, paths: set[str]) -> str:
    """Refuse changes to external projects, whose sources are not in the archive."""
    for path in sorted(filter(is_build_file, paths)):
        texts = [_text(built, path) for built in (before, after)]
        if "external_projects/" in path and texts[0] != texts[1]:
            return f"{path} builds sources that are not in the release's archive"
        rows = [{line.strip() for line in _FETCHED.findall(text)} for text in texts]
        if rows[0] != rows[1]:
            message = min(rows[0] ^ rows[1]).decode("utf-8", "replace")
            return f"{path} fetches other sources that are not in the release's archive ({message})"
    return ""


def _declaring(
    before: SourceBuild, after: SourceBuild, rebuilt: Iterable[Unit], paths: set[str]
) -> str:
    """Units that declare operators: vLLM's extension declares them before the wheel loads."""
    for unit in rebuilt:
        text = _text(after, unit.path)
        declared = set(_DECLARED.findall(text)) if _DECLARES in text else set()
        if not declared:
            continue
        fresh = sorted(declared - set(_DECLARED.findall(_text(before, unit.path))))
        through = sorted((after.closures[unit.path] & paths) - {unit.path})
        why = f"it changes {unit.path}" if unit.path in paths else f"it reaches {unit.path}"
        why += f" through {', '.join(through)}" if through and unit.path not in paths else ""
        names = b", ".join(fresh[:6]).decode()
        message = f"{names} are new" if fresh else "their parameters may have changed"
        return (
            f"{why}, which declares the operators of {unit.extension} ({message}); an extension "
            "wheel registers kernels for operators that the base declares, and no others"
        )
    return ""


def _dead(after: SourceBuild, rebuilt: Iterable[Unit]) -> tuple[str, str]:
    """Kernels that would compile to traps, found before they are compiled."""
    for unit in rebuilt:
        for guard, where in dead_guards(after.sources, unit).items():
            targets = ", ".join(real for _, real in unit.gencodes)
            traps = f"where {guard} in {where} makes its kernels traps"
            return (
                f"{unit.path} is compiled for {targets}, {traps}",
                "the layer sm120-family admits SM121: add --layers sm120-family",
            )
    return "", ""


def _text(built: SourceBuild, path: str) -> bytes:
    generated = built.recipe.generated.get(path)
    file = built.source.root / path
    return generated if generated is not None else file.read_bytes() if file.is_file() else b""
