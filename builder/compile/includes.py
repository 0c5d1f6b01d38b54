"""Finds the translation units that include a changed file, and the guards in them.

Includes are followed textually, as if every branch were taken: it may return a unit
that is not affected, but never misses one.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.compile.cmake import BuildRecipe, Unit

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
#: Suffixes of units and headers.
SUFFIXES = frozenset({".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp", ".inl"})
#: A wrapper that enables a kernel on some architectures; on others it traps or does nothing.
_GUARD = re.compile(
    r"struct (enable_sm\w+) : Kernel \{(?:(?!struct ).)*?"
    r"#\s*if ([^\n]*__CUDA_ARCH__\s*[=<>][^\n]*)\n",
    re.DOTALL,
)
_COMPARISON = re.compile(r"__CUDA_ARCH__\s*(==|>=|<=|<|>)\s*(\d+)")


@dataclass(frozen=True)
class Sources:
    """The C++ and CUDA files of a source tree, and their includes of each other."""

    root: Path
    #: generated sources: path below the root -> content
    generated: Mapping[str, bytes] = field(default_factory=dict)
    #: new texts of files of the tree
    changed: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def texts(self) -> Mapping[str, bytes]:
        """Path below the root -> content."""
        found = {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted((self.root / "csrc").rglob("*"))
            if path.suffix in SUFFIXES and path.is_file()
        }
        return {**self.generated, **found, **self.changed}

    @cached_property
    def includes(self) -> Mapping[str, frozenset[str]]:
        """Path -> included paths in the tree."""
        return {path: frozenset(self._included(path, text)) for path, text in self.texts.items()}

    def _included(self, path: str, text: bytes) -> Iterable[str]:
        for name in _INCLUDE.findall(text):
            found = self.resolved(path, name.decode("utf-8", "replace"))
            if found:
                yield found

    def resolved(self, path: str, name: str) -> str:
        """The tree's file for an include; empty if there is none.

        First next to the file, then below ``csrc``, as in the build's include directories.
        """
        for place in (PurePosixPath(path).parent, PurePosixPath("csrc"), PurePosixPath()):
            found = _normal(place / name)
            if found in self.texts:
                return found
        return ""

    def closure(self, path: str) -> frozenset[str]:
        """A file and all its includes, transitively."""
        seen, waiting = {path}, deque([path])
        while waiting:
            fresh = self.includes.get(waiting.popleft(), frozenset()) - seen
            seen |= fresh
            waiting.extend(fresh)
        return frozenset(seen)

    @cached_property
    def guards(self) -> Mapping[str, str]:
        """Guard -> its condition on ``__CUDA_ARCH__``."""
        found: dict[str, str] = {}
        for text in self.texts.values():
            if b'asm("trap;")' in text:
                found.update(_GUARD.findall(text.decode("utf-8", "replace")))
        return found


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def touched(sources: Sources, recipe: BuildRecipe, changed: Iterable[str]) -> list[Unit]:
    """The units to compile again if these files change, sorted by path."""
    wanted = set(changed)
    return [unit for path, unit in sorted(recipe.units.items()) if sources.closure(path) & wanted]


def lets_run(condition: str, cuda_arch: int) -> bool:
    """Whether all parts of a guard's condition are true for a value of ``__CUDA_ARCH__``."""
    compare = {
        "==": cuda_arch.__eq__,
        ">=": cuda_arch.__ge__,
        "<=": cuda_arch.__le__,
        "<": cuda_arch.__lt__,
        ">": cuda_arch.__gt__,
    }
    return all(compare[sign](int(number)) for sign, number in _COMPARISON.findall(condition))


def dead_guards(sources: Sources, unit: Unit) -> dict[str, str]:
    """SM12x guards that exclude a unit's kernels for the architectures it is compiled for.

    Returns guard -> file that uses it; empty if all kernels run.  Guards of other families are
    ignored: units for SM12x share headers with others, and instantiate their own kernels.
    """
    found = {}
    for path in sorted(sources.closure(unit.path)):
        text = sources.texts[path].decode("utf-8", "replace")
        for name in re.findall(r"\b(enable_sm12\w+)<", text):
            condition = sources.guards.get(name)
            if condition and not all(lets_run(condition, arch) for arch in unit.cuda_arch):
                found[name] = path
    return found
