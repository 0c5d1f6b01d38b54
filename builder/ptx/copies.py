"""Asynchronous copies of a block, and the groups that lanes put them into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from builder.ptx.constants import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from builder.ptx.races import Copy, VectorClocks


@dataclass
class Operation:
    """A copy that was issued and has not happened."""

    kind: str
    act: Callable[[], None]
    #: the PTX line that issued it
    line: int = 0
    done: bool = False
    #: somebody waits for it
    awaited: bool = False
    copy: Copy | None = None
    clocks: VectorClocks | None = None


#: Of a copy that its lane has not put into a group yet.
_OPEN = -1


@dataclass
class Issued:
    """An operation: the lanes that issued it, and which of its groups each has it in."""

    operation: Operation
    lanes: NDArray[np.bool_]
    group: NDArray[np.int32] = field(default_factory=lambda: np.full(LANES, _OPEN, np.int32))

    def before(self, last: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The lanes that have it in a group before the one that stands here for each."""
        found: NDArray[np.bool_] = self.lanes & (self.group != _OPEN) & (self.group < last)
        return found


@dataclass
class LaneGroups:
    """A warp's operations of one kind that were not waited for, in groups of each lane."""

    committed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(LANES, np.int32))
    issued: list[Issued] = field(default_factory=list)

    def add(self, operation: Operation, lanes: object) -> None:
        """An operation that these lanes issued."""
        chosen = np.zeros(LANES, np.bool_)
        chosen[lanes] = True  # type: ignore[call-overload]
        self.issued.append(Issued(operation, chosen))

    def commit(self, mask: NDArray[np.bool_] | bool) -> None:
        """What these lanes issued since their last group is one, be it nothing."""
        for one in self.issued:
            mine = one.lanes & (one.group == _OPEN) & mask
            one.group[mine] = self.committed[mine]
        self.committed += mask

    def due(self, mask: NDArray[np.bool_] | bool, latest: int) -> list[Operation]:
        """Those of all groups of these lanes but the latest ones."""
        last = self.committed - latest
        return [one.operation for one in self.issued if (one.before(last) & mask).any()]

    def waited(self, mask: NDArray[np.bool_] | bool, latest: int) -> None:
        """These lanes have waited for what was due."""
        last = self.committed - latest
        for one in self.issued:
            one.lanes &= ~(one.before(last) & mask)
        self.issued = [one for one in self.issued if one.lanes.any()]
