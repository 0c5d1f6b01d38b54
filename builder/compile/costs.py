"""What it costs to compile some units here, before anything is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import counted
from builder.compile.known import cost_of

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Gigabytes of disk: a fifth of one for sources, headers and objects, the rest for what nvcc writes
#: in between and for a library of the base (libtorch_cuda.so: more than one) while it is read.
DISK = 2.0


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
