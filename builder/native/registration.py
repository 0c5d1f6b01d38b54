"""Which torch operators a change rebuilds, and the C++ that registers them anew.

The kernels of a release's extension have hidden symbols, so they cannot be replaced one by one; an
operator can: torch's dispatcher takes the kernel that was registered last.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.errors import UsageError
from builder.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.native.cmake import Unit

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
#: Kind of registration -> the header that it takes, and how it is written.
_REGISTER = {
    "classic": ("torch/library.h", _CLASSIC),
    "stable": ("torch/csrc/stable/library.h", _STABLE),
}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A torch operator that a release registers; ``builder/data/native.toml`` says what is what."""

    name: str
    rebuilt: tuple[str, ...]
    vllm: str
    key: str
    abi: str
    module: str
    units: tuple[str, ...]
    defines: tuple[str, ...]
    header: str
    declaration: str
    function: str
    kernels: str
    holds: str


def load_operators() -> list[Operator]:
    """All operators that are known."""
    rows = tomllib.loads(package_file("data", "native.toml").read_text("utf-8"))["operator"]
    lists = ("rebuilt", "units", "defines")
    return [Operator(**(row | {name: tuple(row[name]) for name in lists})) for row in rows]


def operators_behind(
    units: Sequence[Unit], vllm: str, known: Iterable[Operator] | None = None
) -> list[Operator]:
    """The operators that call these units, in a release.

    Raises:
        UsageError: a unit stands behind no operator that is known.
    """
    every = load_operators() if known is None else list(known)
    fitting = [op for op in every if SpecifierSet(op.vllm).contains(vllm, prereleases=True)]
    found: dict[str, Operator] = {}
    for unit in units:
        behind = [op for op in fitting if unit.path.endswith(op.rebuilt)]
        if not behind:
            names = ", ".join(sorted({row for op in fitting for row in op.rebuilt})) or "none"
            raise UsageError(
                f"{unit.path}: which torch operator of vllm {vllm} calls it is not known; units "
                f"that are: {names}"
            )
        found.update({op.name: op for op in behind})
    return list(found.values())


def sibling_units(operator: Operator, units: Mapping[str, Unit]) -> list[Unit]:
    """What lies between an operator and its kernels.

    Raises:
        UsageError: the release has no such unit, or several.
    """
    found = []
    for suffix in operator.units:
        fitting = [unit for path, unit in sorted(units.items()) if path.endswith(suffix)]
        if len(fitting) != 1:
            raise UsageError(
                f"{operator.name} needs one unit {suffix}, and this release compiles "
                f"{len(fitting)}: builder/data/native.toml does not fit it"
            )
        found += fitting
    return found


def registration_source(operators: Sequence[Operator], mark: str) -> str:
    """C++ that registers operators anew when its library is loaded.

    Args:
        operators: what is registered.
        mark: names the companion; torch shows it as the place of registration.
    """
    headers = {_REGISTER[op.abi][0] for op in operators} | {op.header for op in operators}
    rows = ["// Made by spark-build: registers rebuilt kernels in place of the release's own."]
    rows += [f"#include <{header}>" for header in sorted(headers)]
    rows += ["#include <optional>", ""]
    rows += [op.declaration.strip() + "\n" for op in operators]
    for operator in operators:
        library, _, name = operator.name.partition("::")
        text = _REGISTER[operator.abi][1].format(
            library=library, key=operator.key, operator=name, function=operator.function
        )
        rows += [f'#line 1 "{mark}"', text.strip(), ""]
    return "\n".join(rows)
