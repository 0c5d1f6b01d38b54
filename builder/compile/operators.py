"""The torch operators that units implement, and C++ code that registers them again.

The kernels of a release's extension have hidden symbols, so they cannot be replaced directly; an
operator can: torch's dispatcher uses the implementation that was registered last.  A changed unit
must be used when it is loaded beside the release's extension.  So every unit that calls its
functions is included, up to the functions that are registered as operators; these are registered
again.  Units that these call are included too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.common.console import some_of
from builder.common.document import Part, Text
from builder.common.paths import package_file
from builder.compile.build import FLAGS, HOST_SUFFIXES
from builder.compile.cplusplus import (
    CodeText,
    Facts,
    Macros,
    Registered,
    head_of,
    read,
    registered,
    scan,
)
from builder.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.compile.cplusplus import Name
    from builder.compile.sources import BuildRecipe, Sources, Unit

_CLASSIC = """
TORCH_LIBRARY_IMPL({library}, {key}, m) {{
  m.impl("{operator}", &{function});
}}
"""
_STABLE = """
STABLE_TORCH_LIBRARY_IMPL({library}, {key}, m) {{
  m.impl("{operator}", TORCH_BOX(&{function}));
}}
"""
#: Kind of registration -> its header and its syntax.
_REGISTER = {
    "classic": ("torch/library.h", _CLASSIC),
    "stable": ("torch/csrc/stable/library.h", _STABLE),
}


class OperatorName(Part, frozen=True, kw_only=True):
    """A torch operator for one dispatch key."""

    name: Text
    key: Text

    @classmethod
    def of(cls, operator: Operator) -> OperatorName:
        """The name of an operator."""
        return cls(name=operator.name, key=operator.key)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A torch operator of a release; ``builder/data/compile.toml`` documents the fields.

    An operator found in the sources has no ``kernels`` and no required instruction.
    """

    name: str
    rebuilt: tuple[str, ...]
    vllm: str
    key: str
    abi: str
    module: str
    function: str
    units: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    header: str = ""
    declaration: str = ""
    kernels: str = ""
    holds: str = ""
    #: includes of the release's registration, with quotes or brackets; one declares the function
    headers: tuple[str, ...] = ()
    #: a compiled unit registers it itself
    own: bool = False


def load_operators() -> list[Operator]:
    """All operators in our table."""
    rows = tomllib.loads(package_file("data", "compile.toml").read_text("utf-8"))["operator"]
    lists = ("rebuilt", "units", "defines")
    return [Operator(**(row | {name: tuple(row[name]) for name in lists})) for row in rows]


def known_operators(vllm: str, known: Iterable[Operator] | None = None) -> list[Operator]:
    """The operators in our table for a release."""
    every = load_operators() if known is None else known
    return [op for op in every if SpecifierSet(op.vllm).contains(vllm, prereleases=True)]


def operators_behind(
    units: Sequence[Unit], vllm: str, known: Iterable[Operator] | None = None
) -> list[Operator]:
    """The operators in our table that call these units, for a release.

    Raises:
        UsageError: a unit is not in the table.
    """
    fitting = known_operators(vllm, known)
    by_name: dict[str, Operator] = {}
    for unit in units:
        behind = [op for op in fitting if unit.path.endswith(op.rebuilt)]
        if not behind:
            names = ", ".join(sorted({row for op in fitting for row in op.rebuilt})) or "none"
            raise UsageError(
                f"{unit.path}: which torch operator of vllm {vllm} calls it is unknown; units "
                f"that are: {names}"
            )
        by_name.update({op.name: op for op in behind})
    return list(by_name.values())


def sibling_units(operator: Operator, units: Mapping[str, Unit]) -> list[Unit]:
    """The units between an operator and its kernels.

    Raises:
        UsageError: the release has no such unit, or several.
    """
    siblings = []
    for suffix in operator.units:
        fitting = [unit for path, unit in sorted(units.items()) if path.endswith(suffix)]
        if len(fitting) != 1:
            raise UsageError(
                f"{operator.name} needs one unit {suffix}, and this release compiles "
                f"{len(fitting)}: builder/data/compile.toml does not fit it"
            )
        siblings += fitting
    return siblings


def registration_source(operators: Sequence[Operator], mark: str) -> str:
    """C++ code that registers operators again when its library is loaded.

    Args:
        operators: the operators to register, without those that a unit registers itself.
        mark: the extension wheel's name, which torch shows as the registration's location.
    """
    operators = [op for op in operators if not op.own]
    headers = {_REGISTER[op.abi][0] for op in operators}
    headers |= {op.header for op in operators if op.header}
    rows = ["// Made by spark-build: registers rebuilt kernels in place of the release's own."]
    rows += [f"#include <{header}>" for header in sorted(headers)]
    rows += ["#include <optional>", ""]
    rows += [f"#include {h}" for h in dict.fromkeys(h for op in operators for h in op.headers)]
    rows += [op.declaration.strip() + "\n" for op in operators if op.declaration]
    for operator in operators:
        library, _, name = operator.name.partition("::")
        text = _REGISTER[operator.abi][1].format(
            library=library, key=operator.key, operator=name, function=operator.function
        )
        rows += [f'#line 1 "{mark}"', text.strip(), ""]
    return "\n".join(rows)


#: Template arguments without any inside.
_ANGLES = re.compile(r"<[^<>]*>")


def demangled(symbols: Sequence[str]) -> set[Name]:
    """Demangle symbols with ``c++filt``; returns names without arguments.

    Raises:
        EngineError: ``c++filt`` is not installed.
    """
    tool = shutil.which("c++filt")
    if tool is None:
        raise EngineError("c++filt is not installed", hint="apt-get install binutils")
    done = subprocess.run(
        [tool], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    names = set()
    for line in done.stdout.splitlines():
        plain = line
        while (inner := _ANGLES.sub("", plain)) != plain:
            plain = inner
        words = plain.partition("(")[0].split()
        if words:
            names.add(tuple(part for part in words[-1].split("::") if part))
    return names


# ---------------------------------------------------------------------------------------- discovery


#: An extension wheel is for small changes.  Above this share of its extension's units (and above a
#: few units), the whole extension must be built.
SHARE, FEW = 1 / 3, 8
#: Build files of the release with its definitions for different targets.
_BUILD_FILES = ("CMakeLists.txt", "cmake/*.cmake", "cmake/external_projects/*.cmake")
_SET = re.compile(r"(?:\b|-D)([A-Z_][A-Z0-9_]*)\b")
#: Not defined in the host pass, in which functions are linked.
_HOST = frozenset({"__CUDA_ARCH__", "__HIP_DEVICE_COMPILE__"})


class OperatorsUnknown(UsageError):
    """The operators of a unit cannot be found, or there are too many."""


@dataclass(frozen=True, kw_only=True)
class RelatedUnits:
    """The operators and units that an extension wheel needs besides the rebuilt units."""

    operators: tuple[Operator, ...]
    #: units that call the rebuilt ones, and units that they call
    siblings: tuple[Unit, ...]


@dataclass(frozen=True)
class _Unit:
    """One unit with all its includes."""

    path: str
    defined: frozenset[Name]
    #: templates that it may instantiate for others
    templates: frozenset[Name]
    inside: frozenset[Name]
    declared: frozenset[Name]
    used: frozenset[str]
    #: a file with unbalanced brackets
    broken: str
    rows: tuple[Registered, ...]
    #: number of registration blocks, and of those that could be parsed
    blocks: tuple[int, int]

    def calls(self, other: _Unit) -> frozenset[Name]:
        """Names that it uses and another unit defines."""
        shared = other.defined - self.defined
        seen = shared & (self.declared | self.inside)
        instances = (other.templates & self.declared) - self.inside - self.defined
        return frozenset(name for name in (*seen, *instances) if name[-1] in self.used)

    @property
    def binds(self) -> bool:
        """Whether it registers functions of other units."""
        return bool(self.blocks[0]) and self.path.endswith(HOST_SUFFIXES)


class Discovery:
    """The functions of a release's units, and their registrations as operators."""

    def __init__(self, sources: Sources, recipe: BuildRecipe, release: str) -> None:
        """``sources`` are the sources to compile, with the change if there is one."""
        self._sources = sources
        self.recipe = recipe
        self.release = release
        self._texts: dict[tuple[str, str], tuple[CodeText, Facts]] = {}
        self._units: dict[str, _Unit] = {}

    # -- reading

    @cached_property
    def _build_words(self) -> frozenset[str]:
        root = self._sources.root
        files = [file for pattern in _BUILD_FILES for file in sorted(root.glob(pattern))]
        return frozenset(w for file in files for w in _SET.findall(file.read_text("utf-8")))

    def _defined(self, extension: str) -> Macros:
        flags = (flag[2:] for flag in (*FLAGS, *self.recipe.flags) if flag.startswith("-D"))
        given = [*flags, *self.recipe.extensions[extension].definitions]
        pairs = (word.partition("=") for word in given)
        values = {name: value for name, _, value in pairs}
        major, _, minor = self.recipe.cuda.partition(".")
        values["CUDA_VERSION"] = str(int(major) * 1000 + int(minor or 0) * 10)
        left_out = self._build_words - set(values)
        return Macros(values, frozenset(left_out | _HOST))

    def file(self, path: str, extension: str) -> tuple[CodeText, Facts]:
        """A file of the tree, preprocessed for an extension."""
        key = (path, extension)
        if key not in self._texts:
            raw = self._sources.texts[path].decode("utf-8", "replace")
            text = read(raw, self._defined(extension))
            self._texts[key] = text, scan(text)
        return self._texts[key]

    @cached_property
    def _includers(self) -> Mapping[tuple[str, str], int]:
        """(extension, file) -> number of units that include it."""
        count: dict[tuple[str, str], int] = {}
        for unit in self.recipe.units.values():
            for path in self._sources.closure(unit.path):
                count[unit.extension, path] = count.get((unit.extension, path), 0) + 1
        return count

    def unit(self, path: str) -> _Unit:
        """A unit with all its includes."""
        if path not in self._units:
            self._units[path] = self._read(self.recipe.units[path])
        return self._units[path]

    def _read(self, unit: Unit) -> _Unit:
        files = sorted(self._sources.closure(unit.path))
        rows = [(path, self.file(path, unit.extension)[1]) for path in files]
        # defined in a header of several units, so a macro makes it inline
        alone = [f for path, f in rows if self._includers[unit.extension, path] == 1]
        shared = [f for path, f in rows if self._includers[unit.extension, path] > 1]
        text, own = self.file(unit.path, unit.extension)
        if own not in alone:
            alone.append(own)
        heads = [head_of(block, text, unit.extension) for block in own.blocks]
        inside = [f.inside for _, f in rows] + [f.defined for f in shared if f is not own]
        return _Unit(
            path=unit.path,
            defined=_all(f.defined for f in alone),
            templates=_all(f.templates for f in alone),
            inside=_all(inside),
            declared=_all(f.declared for _, f in rows),
            used=frozenset().union(*(f.used for _, f in rows)),
            broken=next((path for path, f in rows if not f.whole), ""),
            rows=tuple(registered(own.blocks, text, unit.extension)),
            blocks=(len(own.blocks), sum(head is not None for head in heads)),
        )

    # -- definitions and calls

    @cached_property
    def _providers(self) -> Mapping[Name, tuple[str, ...]]:
        providers: dict[Name, list[str]] = {}
        for path in sorted(self.recipe.units):
            for name in self.unit(path).defined | self.unit(path).templates:
                providers.setdefault(name, []).append(path)
        return {name: tuple(paths) for name, paths in providers.items()}

    def providers(self, name: Name, extension: str) -> tuple[str, ...]:
        """Units that define a name: of the extension, else of another."""
        every = self._providers.get(name, ())
        near = tuple(p for p in every if self.recipe.units[p].extension == extension)
        return near or every

    def callers(self, path: str) -> list[str]:
        """Units of the same extension that call a unit's functions."""
        extension = self.recipe.units[path].extension
        return [
            other
            for other, about in sorted(self.recipe.units.items())
            if about.extension == extension and other != path and not self.unit(other).binds
            if self.unit(other).calls(self.unit(path))
        ]

    def callees(self, path: str) -> list[str]:
        """Units that define functions that a unit calls: of its extension, else of another."""
        extension = self.recipe.units[path].extension
        unit = self.unit(path)
        near: dict[str, frozenset[Name]] = {}
        far: dict[str, frozenset[Name]] = {}
        for other, about in sorted(self.recipe.units.items()):
            if other == path or self.unit(other).binds:
                continue
            names = unit.calls(self.unit(other))
            if names:
                (near if about.extension == extension else far)[other] = names
        here = _all(near.values())
        return [*near, *(other for other, names in far.items() if not names <= here)]

    # -- operators

    def _bound(self, extension: str) -> list[tuple[_Unit, Registered]]:
        """The registrations of an extension's units: unit and row."""
        units = (p for p, u in sorted(self.recipe.units.items()) if u.extension == extension)
        return [(unit, row) for unit in map(self.unit, units) for row in unit.rows]

    def _home(self, unit: _Unit, row: Registered) -> tuple[str, ...]:
        """The units that define a row's function; the registering unit itself if it defines it."""
        if not unit.binds:
            return (unit.path,)
        extension = self.recipe.units[unit.path].extension
        for depth in range(len(row.scope), -1, -1):
            definers = self.providers((*row.scope[:depth], *row.function), extension)
            if definers:
                return definers
        return ()

    def operators_of(self, paths: Iterable[str], extension: str) -> list[Operator]:
        """The operators that these units implement, one for each dispatch key.

        Raises:
            OperatorsUnknown: one is registered in a way that cannot be repeated.
        """
        wanted = set(paths)
        by_key: dict[tuple[str, str], Operator] = {}
        for unit, row in self._bound(extension):
            home = self._home(unit, row)
            if not wanted & set(home):
                continue
            self._must_be_plain(unit, row, home)
            if (row.name, row.key) in by_key:
                raise OperatorsUnknown(f"{row.name} is registered twice for {row.key}: {unit.path}")
            by_key[row.name, row.key] = self._operator(unit, row, home[0], extension)
        return list(by_key.values())

    @staticmethod
    def _must_be_plain(unit: _Unit, row: Registered, home: Sequence[str]) -> None:
        if len(home) > 1:
            raise OperatorsUnknown(
                f"{row.name} calls {'::'.join(row.function)}, which {len(home)} units define: "
                f"{', '.join(home)}"
            )
        if not row.function or not row.key or (row.defines and not unit.binds):
            raise OperatorsUnknown(
                f"{row.name} is registered in {unit.path} in an unsupported form"
            )

    def _operator(self, unit: _Unit, row: Registered, home: str, extension: str) -> Operator:
        headers: tuple[str, ...] = ()
        if unit.binds:
            headers = self._headers(unit, row, extension)
        return Operator(
            name=row.name,
            rebuilt=(home,),
            vllm=f"=={self.release}",
            key=row.key,
            abi=row.abi,
            module=f"vllm/{extension}",
            function="::".join(row.function),
            headers=headers,
            own=not unit.binds,
        )

    def _headers(self, unit: _Unit, row: Registered, extension: str) -> tuple[str, ...]:
        """The includes of a unit that registers a function, in order: one declares it.

        All are needed, because they may depend on each other.  Those that need CPython's headers
        are left out.
        """
        names = {(*row.scope[:depth], *row.function) for depth in range(len(row.scope) + 1)}
        headers = []
        declared = False
        for header in self.file(unit.path, extension)[0].includes:
            path = self._sources.resolved(unit.path, header[1:-1])
            files = self._sources.closure(path) if path else frozenset()
            read_as = [self.file(each, extension) for each in files]
            if any("<Python.h>" in text.includes for text, _ in read_as):
                continue
            declared = declared or any(names & facts.declared for _, facts in read_as)
            headers.append(f'"{path.removeprefix("csrc/")}"' if path else header)
        if not declared:
            raise OperatorsUnknown(
                f"{'::'.join(row.function)} of {row.name} is declared in no header that "
                f"{unit.path} includes"
            )
        return tuple(headers)

    # -- all together

    def behind(self, rebuilt: Sequence[Unit]) -> RelatedUnits:
        """The units and operators needed so that some units are used.

        Raises:
            OperatorsUnknown: the sources do not tell a step, or too many units are needed.
        """
        extensions = sorted({unit.extension for unit in rebuilt})
        if len(extensions) != 1:
            raise OperatorsUnknown(
                f"the change reaches units of {len(extensions)} extensions "
                f"({', '.join(extensions)}), but an extension wheel extends only one"
            )
        (extension,) = extensions
        first = [unit.path for unit in rebuilt]
        for path in first:
            if self.unit(path).binds:
                raise OperatorsUnknown(
                    f"{path} registers the extension's operators, and operators cannot be "
                    f"registered twice"
                )
        upward = self._closure(first, self.callers)
        every = self._closure(upward, self.callees)
        for path in every:
            if self.unit(path).broken:
                raise OperatorsUnknown(
                    f"{self.unit(path).broken}, which {path} includes, cannot be parsed: its "
                    f"brackets do not match"
                )
        self._must_be_understood(upward, extension)
        for path in first:
            self._must_lead_somewhere(path, extension)
        self.must_be_few(every, extension, first)
        operators = self.operators_of(upward, extension)
        # an included unit registers its own operators again when it is loaded
        also = [p for p in every if p not in upward and self.unit(p).rows]
        operators += self.operators_of(also, extension) if also else []
        return RelatedUnits(
            operators=tuple(operators),
            siblings=tuple(self.recipe.units[path] for path in every if path not in first),
        )

    def must_be_few(self, paths: Sequence[str], extension: str, changed: Sequence[str]) -> None:
        """Refuse an extension wheel with too many units.

        Raises:
            OperatorsUnknown: they are more than ``FEW`` and more than ``SHARE`` of the extension.
        """
        total = sum(unit.extension == extension for unit in self.recipe.units.values())
        if len(paths) > max(FEW, total * SHARE):
            raise OperatorsUnknown(
                f"{some_of(changed, 3)}: with its callers and callees, {len(paths)} of the "
                f"{total} units of {extension} would be compiled, more than one third"
            )

    def _must_lead_somewhere(self, path: str, extension: str) -> None:
        if self.operators_of(self._closure([path], self.callers), extension):
            return
        defined = sorted("::".join(name) for name in self.unit(path).defined)
        shown = ", ".join(defined[:4]) + (", ..." if len(defined) > 4 else "")
        raise OperatorsUnknown(
            f"{path}: which torch operator of vllm {self.release} calls it is unknown: "
            + (
                f"no unit of {extension} that registers an operator calls its functions ({shown})"
                if defined
                else "it defines no function that other units can call"
            )
        )

    def _must_be_understood(self, paths: Sequence[str], extension: str) -> None:
        """Check that every registration that names a function was parsed."""
        for path, about in sorted(self.recipe.units.items()):
            unit = self.unit(path)
            if about.extension != extension or not unit.blocks[0]:
                continue
            if unit.blocks[0] != unit.blocks[1] or unit.broken:
                raise OperatorsUnknown(f"{path} registers operators in an unsupported form")
            if not unit.binds:
                continue
            read_there = {row.function[-1] for row in unit.rows if row.function}
            for other in paths:
                left = {n[-1] for n in unit.calls(self.unit(other))} - read_there
                if left:
                    raise OperatorsUnknown(
                        f"{path} names {min(left)} of {other} in an unsupported form"
                    )

    @staticmethod
    def _closure(start: Iterable[str], step: Callable[[str], Iterable[str]]) -> list[str]:
        seen = list(dict.fromkeys(start))
        for path in seen:  # grows as it is read
            seen += [other for other in step(path) if other not in seen]
        return seen


def _all(sets: Iterable[frozenset[Name]]) -> frozenset[Name]:
    return frozenset().union(*sets)
