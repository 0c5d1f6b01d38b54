"""Finds the units that a change to a release's sources affects, for one architecture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from builder.compile.includes import SUFFIXES, dead_guards

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.patchedsource import SourceBuild

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
    made = old.generated.keys() | new.generated.keys()
    paths |= {path for path in made if old.generated.get(path) != new.generated.get(path)}
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
