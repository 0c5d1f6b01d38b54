"""The parameters of a running launch, and the state that its blocks share."""

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
    """The arguments of a launch, from the host."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    #: dynamic shared memory in bytes
    shared: int
    #: the parameter space
    parameters: bytes


@dataclass(frozen=True)
class Layout:
    """The registers and memory that a kernel's code needs."""

    #: the number of registers of each width, and the constants after them, one row each
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
    """A running launch."""

    launch: Launch
    layout: Layout
    memory: GlobalMemory
    #: the lines of the source that made the PTX
    places: Places
    #: copies happen when they are issued
    eager: bool
    #: races are looked for
    watch: bool
    #: counts events that may unblock a warp
    events: int = 0
