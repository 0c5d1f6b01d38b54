"""Asynchronous copies of a block, and the groups that lanes put them into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from builder.ptx.constants import LANES
from builder.ptx.formats import some

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from builder.ptx.races import Copy, VectorClocks


@dataclass
class Operation:
    """A copy that was issued, but not performed."""

    kind: str
    act: Callable[[], None]
    #: the PTX line that issued it
    line: int = 0
    done: bool = False
    #: whether a thread waits for it
    awaited: bool = False
    copy: Copy | None = None
    clocks: VectorClocks | None = None


#: The group of a copy that its lane has not committed yet: it comes after all others.
_OPEN = np.iinfo(np.int32).max


@dataclass
class Issued:
    """An operation: the lanes that issued it, and its group in each lane."""

    operation: Operation
    lanes: NDArray[np.bool_]
    group: NDArray[np.int32] = field(default_factory=lambda: np.full(LANES, _OPEN, np.int32))

    def before(self, last: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The lanes in which it is in an earlier group than the given one."""
        found: NDArray[np.bool_] = self.lanes & (self.group < last)
        return found


@dataclass
class LaneGroups:
    """A warp's pending operations of one kind, in groups by lane."""

    committed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(LANES, np.int32))
    issued: list[Issued] = field(default_factory=list)

    def add(self, operation: Operation, lanes: object) -> None:
        """Add an operation that these lanes issued."""
        chosen = np.zeros(LANES, np.bool_)
        chosen[lanes] = True  # type: ignore[call-overload]
        self.issued.append(Issued(operation, chosen))

    def commit(self, mask: NDArray[np.bool_] | bool) -> None:
        """Close the group of these lanes since their last one, even if it is empty."""
        for one in self.issued:
            mine = one.lanes & (one.group == _OPEN) & mask
            one.group[mine] = self.committed[mine]
        self.committed += mask

    def due(self, mask: NDArray[np.bool_] | bool, latest: int) -> list[Operation]:
        """The operations in all but the latest groups of these lanes."""
        last = self.committed - latest
        return [one.operation for one in self.issued if some(one.before(last) & mask)]

    def waited(self, mask: NDArray[np.bool_] | bool, latest: int) -> None:
        """Record that these lanes have waited for due operations."""
        last = self.committed - latest
        for one in self.issued:
            one.lanes &= ~(one.before(last) & mask)
        self.issued = [one for one in self.issued if some(one.lanes)]
