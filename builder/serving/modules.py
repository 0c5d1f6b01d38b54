"""Resolves names in a release's source without importing the release.

Only vLLM's own modules are followed: names from other packages are not found.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    ReadFile = Callable[[str], bytes | None]

#: The package whose names are followed.
PACKAGE = "vllm"


@dataclass(frozen=True)
class Imported:
    """A name that a module imports from another one."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """A parsed module, with the definition of each name."""

    name: str
    source: str
    names: dict[str, ast.stmt | Imported] = field(repr=False)
    #: imported for type checkers only
    types: dict[str, Imported] = field(repr=False)


@dataclass(frozen=True)
class Found:
    """Where a name is defined, and how."""

    module: Module
    node: ast.stmt

    @property
    def value(self) -> ast.expr | None:
        """The expression, if the name is a variable."""
        if isinstance(self.node, (ast.Assign, ast.AnnAssign)):
            return self.node.value
        return None


class Modules:
    """The modules of one release, each parsed once."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._parsed: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None if the release does not have it."""
        if name not in self._parsed:
            self._parsed[name] = self._load(name)
        return self._parsed[name]

    def needed(self, name: str) -> Module:
        """A module that every release has.

        Raises:
            UsageError: this release does not have it.
        """
        found = self.module(name)
        if found is None:
            raise UsageError(
                f"this vLLM has no module {name}: its arguments cannot be read",
                hint="name a released vLLM: --release 0.33.0",
            )
        return found

    def _load(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            data = self._read(file)
            if data is None:
                continue
            source = data.decode("utf-8", "replace")
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError) as error:
                raise UsageError(f"{file} of this vLLM is not Python: {error}") from None
            parent = name if package else name.rpartition(".")[0]
            names, types = dict(_names(tree.body, parent)), dict(_types(tree.body, parent))
            return Module(name, source, names, types)
        return None

    def find(self, module: Module, name: str) -> Found | None:
        """The definition of a name, as seen from a module."""
        for _ in range(10):
            node = module.names.get(name) or self._behind_a_star(module, name)
            if isinstance(node, ast.stmt):
                return Found(module, node)
            if node is None or node.module.split(".")[0] != PACKAGE:
                return None
            target = self.module(node.module)
            if target is None:
                return None
            module, name = target, node.name
        return None

    def find_type(self, module: Module, name: str) -> Found | None:
        """The same as a type checker sees it, with imports for type checkers."""
        only = module.types.get(name)
        target = self.module(only.module) if only and only.module.startswith(PACKAGE) else None
        return self.find(target, only.name) if only and target else self.find(module, name)

    def _behind_a_star(self, module: Module, name: str) -> Imported | None:
        """The module that ``from .types import *`` imports a name from."""
        for node in module.names.values():
            if isinstance(node, Imported) and node.name == "*":
                other = self.module(node.module)
                if other is not None and name in other.names:
                    return Imported(node.module, name)
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        """A class and its base classes in vLLM, the most derived first."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            if isinstance(base, ast.Name):
                lower = self.find(found.module, base.id)
                if lower is not None and isinstance(lower.node, ast.ClassDef):
                    yield from self.bases(lower)
        yield found


def _names(body: Sequence[ast.stmt], parent: str) -> Iterator[tuple[str, ast.stmt | Imported]]:
    """The names that a module's statements bind, without those for type checkers only."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from _imported(node, parent)
        elif isinstance(node, ast.Assign):
            yield from ((t.id, node) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.If):
            if not _is_checking(node):
                yield from _names(node.body, parent)
            yield from _names(node.orelse, parent)
        elif isinstance(node, ast.Try):
            yield from _names(node.body, parent)


def _types(body: Sequence[ast.stmt], parent: str) -> Iterator[tuple[str, Imported]]:
    """The names that are imported for type checkers only."""
    for node in body:
        if isinstance(node, ast.If) and _is_checking(node):
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom):
                    yield from _imported(inner, parent)


def _is_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(node.test)


def _imported(node: ast.ImportFrom, parent: str) -> Iterable[tuple[str, Imported]]:
    where = node.module or ""
    if node.level:
        above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
        where = ".".join([*above, *([where] if where else [])])
    for alias in node.names:
        key = f"* of {where}" if alias.name == "*" else alias.asname or alias.name
        yield key, Imported(where, alias.name)
