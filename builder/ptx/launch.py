"""What every block of a running launch is given, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from builder.ptx.memory import GlobalMemory
    from builder.ptx.places import Places


@dataclass(frozen=True)
class Launch:
    """What a host hands to the driver."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    #: dynamic shared memory in bytes
    shared: int
    #: the parameter space
    parameters: bytes


@dataclass(frozen=True)
class Layout:
    """The registers and the memory that a kernel's code asks for."""

    #: how many registers of each width there are, and the constants behind them, a row each
    counts: Mapping[int, int]
    constants: Mapping[int, NDArray[Any]]
    #: the index of each special register among those of 32 bits
    special: Mapping[str, int]
    shared_bytes: int
    local_bytes: int
    #: the smallest access to shared memory, in bytes
    granule: int


@dataclass
class LaunchState:
    """A launch that runs."""

    launch: Launch
    layout: Layout
    memory: GlobalMemory
    #: the lines of the source that made the PTX
    places: Places
    #: copies happen when they are issued
    eager: bool
    #: races are looked for
    watch: bool
    #: counts whatever may let a warp go on
    events: int = 0
