"""Prebuilt kernels of releases, and how to recognise real code."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.util.paths import package_file

if TYPE_CHECKING:
    from builder.machinecode.modules import KernelCode


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A prebuilt kernel, from ``builder/data/binaries.toml``, which documents the fields."""

    name: str
    behind: str
    modules: tuple[str, ...]
    symbol: str
    cure: str
    #: the instruction that shows real code: its prefix, then required parts
    holds: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The expectation as text."""
        real = f"each holds {' of '.join(self.holds)}" if self.holds else "none is only a trap"
        return f"SM121 runs every one of them; {real}"

    def tells(self, instruction: str, how: str) -> bool:
        """Whether an instruction shows that it is real."""
        first, *rest = (self.ptx if how == "jit" else self.holds) or ("?",)
        return instruction.startswith(first) and set(rest) <= set(instruction.split("."))

    def is_real(self, reading: KernelCode) -> bool:
        """Whether one of its instances is the real kernel and not a stub."""
        if not self.holds:
            return not any(map(is_trap, reading.counts))
        return any(self.tells(name, reading.how) for name in reading.counts)


def is_trap(instruction: str) -> bool:
    """Whether an instruction of SASS or PTX ends the kernel."""
    return instruction.startswith(("BPT.TRAP", "trap"))


def load_kernels() -> list[Kernel]:
    """All kernels in the table."""
    raw = tomllib.loads(package_file("data", "binaries.toml").read_text("utf-8"))
    return [
        Kernel(
            name=row["name"],
            behind=row["behind"],
            modules=tuple(row["modules"]),
            symbol=row["symbol"],
            cure=row["cure"],
            holds=tuple(row.get("holds", ())),
            ptx=tuple(row.get("ptx", ())),
        )
        for row in raw["kernel"]
    ]
