"""The built-in changes of compiled code (``builder/data/compile.toml``), and what each costs."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import field

from builder.applier.layers import Compile
from builder.common.document import Part, Text, read
from builder.common.paths import package_file
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.applier.layers import Layer


class KnownChange(Part, frozen=True, kw_only=True):
    """A change in ``builder/data/compile.toml``, which documents the keys."""

    name: Text
    files: tuple[Text, ...]
    old: Text
    new: Text
    guard: Text
    applied_upstream: str = field(name="applied-upstream")
    kernel: Text
    guards: dict[str, str]
    units: tuple[Text, ...]


class UnitCost(Part, frozen=True, kw_only=True):
    """The cost to compile units that match a pattern."""

    unit: Text
    seconds: float
    gigabytes: float


class _CompileData(Part, frozen=True, kw_only=True):
    change: tuple[KnownChange, ...]
    cost: tuple[UnitCost, ...]


@cache
def _data() -> _CompileData:
    text = package_file("data", "compile.toml").read_text("utf-8")
    return read(tomllib.loads(text), _CompileData)


def known_changes() -> dict[str, KnownChange]:
    """The built-in changes by name."""
    return {change.name: change for change in _data().change}


def _known(name: str) -> KnownChange:
    changes = known_changes()
    if name not in changes:
        raise UsageError(
            f"unknown source change {name!r}{did_you_mean(name, changes)} "
            f"(known: {', '.join(changes)}; --patch takes a diff)",
            hint=f"--change {next(iter(changes))}",
        )
    return changes[name]


def cost_of(unit: str) -> tuple[float, float]:
    """The cost to compile a unit, in seconds and gigabytes: measured, or estimated."""
    row = next(row for row in _data().cost if fnmatch(Path(unit).name, row.unit))
    return row.seconds, row.gigabytes


def estimate_of(name: str) -> str:
    """The estimated cost of a built-in change, without its sources."""
    known = known_changes().get(name)
    costs = [cost_of(unit) for unit in (known.units if known else ("*",))]
    minutes = max(1, round(sum(seconds for seconds, _ in costs) / 60))
    largest = max(gigabytes for _, gigabytes in costs)
    count = f"{len(costs)} unit{'s' if len(costs) != 1 else ''}"
    return (
        f"{count}, about {minutes} min if the units are compiled one after another, "
        f"{largest:.0f} GB of "
        "memory, and g++"
    )


def compile_ops(layer: Layer) -> list[Compile]:
    """The ops of a layer that compile a built-in change."""
    return [op for op in layer.ops if isinstance(op, Compile) and op.change]


def stage_name(ops: Iterable[Compile]) -> str:
    """The name of a stage that compiles several ops together."""
    return "-".join(dict.fromkeys(op.change_name for op in ops))
