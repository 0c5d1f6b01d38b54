"""Torch operators that a change rebuilds, and C++ code that registers them again.

The kernels of a release's extension have hidden symbols, so they cannot be replaced directly; an
operator can: torch's dispatcher uses the implementation that was registered last.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.errors import UsageError
from builder.util.documents import Part, Text
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.compile.cmake import Unit

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
    found: dict[str, Operator] = {}
    for unit in units:
        behind = [op for op in fitting if unit.path.endswith(op.rebuilt)]
        if not behind:
            names = ", ".join(sorted({row for op in fitting for row in op.rebuilt})) or "none"
            raise UsageError(
                f"{unit.path}: which torch operator of vllm {vllm} calls it is unknown; units "
                f"that are: {names}"
            )
        found.update({op.name: op for op in behind})
    return list(found.values())


def sibling_units(operator: Operator, units: Mapping[str, Unit]) -> list[Unit]:
    """The units between an operator and its kernels.

    Raises:
        UsageError: the release has no such unit, or several.
    """
    found = []
    for suffix in operator.units:
        fitting = [unit for path, unit in sorted(units.items()) if path.endswith(suffix)]
        if len(fitting) != 1:
            raise UsageError(
                f"{operator.name} needs one unit {suffix}, and this release compiles "
                f"{len(fitting)}: builder/data/compile.toml does not fit it"
            )
        found += fitting
    return found


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
