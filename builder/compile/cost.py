"""Estimates memory, disk space and time to compile, and refuses machines that are too small."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.compile.changes import cost_of
from builder.errors import EngineError
from builder.util.console import counted
from builder.util.hints import CACHE
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Gigabytes of disk: a fifth of one for sources, headers and objects, the rest for what nvcc writes
#: in between and for a library of the base (libtorch_cuda.so: more than one) while it is read.
DISK = 2.0
#: Below this share of a unit's measured memory, memory is clearly too small.
_CLEARLY = 0.75


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost: units, parallel jobs, seconds, and gigabytes of memory and disk."""

    units: int
    jobs: int
    seconds: float
    memory: float
    #: gigabytes of memory for the largest unit
    least: float
    disk: float = DISK

    def __str__(self) -> str:
        minutes = max(1, round(self.seconds / 60))
        return (
            f"{self.units} unit{'s' if self.units != 1 else ''}, {self.jobs} at once: about "
            f"{minutes} min, up to {self.memory:.0f} GB of memory, {self.disk:.1f} GB of disk"
        )

    @property
    def brief(self) -> str:
        """A short form for a compile that starts now: without disk space."""
        return (
            f"{counted(self.units, 'unit')}, {self.jobs} at once: about "
            f"{max(1, round(self.seconds / 60))} min and up to {self.memory:.0f} GB of memory"
        )


def free_memory() -> float:
    """Gigabytes that can be used without swapping (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1e6
    return 0.0


def cost_of_units(
    paths: Sequence[str],
    memory: float | None = None,
    *,
    jobs: int | None = None,
    cores: int | None = None,
) -> Cost:
    """The cost to compile some units here.  Memory limits the parallel jobs, then cores.

    Args:
        paths: the units.
        memory: free gigabytes; default: of this machine.
        jobs: parallel jobs; default: by memory and cores.
        cores: processors; default: those of this machine.
    """
    free = free_memory() if memory is None else memory
    costs = [cost_of(path) for path in paths]
    largest = max((gigabytes for _, gigabytes in costs), default=1.0)
    processors = cores or os.cpu_count() or 1
    count = jobs or max(1, min(processors, len(costs), int(free / largest)))
    return Cost(
        units=len(costs),
        jobs=count,
        seconds=sum(seconds for seconds, _ in costs) / count,
        memory=largest * count,
        least=largest,
    )


def refuse_machine(cost: Cost, memory: float, disk: float, place: Path) -> None:
    """Refuse, before anything starts, what this machine clearly cannot compile.

    Args:
        cost: the estimated cost.
        memory: free gigabytes of memory and swap.
        disk: free gigabytes at ``place``.
        place: where the cache is.

    Raises:
        EngineError: memory or disk space is clearly too small.
    """
    if memory < cost.least * _CLEARLY:
        raise EngineError(
            f"compiling takes {cost.least:.1f} GB of memory for one unit, and {memory:.1f} GB of "
            "memory and swap are free here",
            hint="stop other programs, add swap, or use a machine with more memory",
        )
    if disk < cost.disk:
        raise EngineError(
            f"compiling takes {cost.disk:.1f} GB of disk, and {place} has {disk:.1f} GB left",
            hint=f"free some space, or {CACHE}",
        )


def free_here() -> tuple[float, float, Path]:
    """Free gigabytes of memory with swap, and of the cache's disk; and the cache's path."""
    swap = re.search(r"^SwapFree: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    place = cache_dir()
    while not place.exists():
        place = place.parent
    memory = free_memory() + (int(swap[1]) / 1e6 if swap else 0.0)
    return memory, shutil.disk_usage(place).free / 1e9, place
