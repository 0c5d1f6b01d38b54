"""A thread block: its shared memory, barriers, mbarriers and pending copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from builder.ptx.decoder import LANES
from builder.ptx.errors import Fault
from builder.ptx.memory import SHARED_BASE, SharedMemory
from builder.ptx.races import Races, Sync
from builder.ptx.warp import Warp

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from builder.ptx.grid import Grid
    from builder.ptx.races import Copy, VectorClocks
    from builder.ptx.tensormap import TensorMap

#: Bits that a transaction count has ("mbarrier object": -(2**20 - 1) to 2**20 - 1).
TRANSACTION_LIMIT = 2**20 - 1


@dataclass
class Mbarrier:
    """PTX ISA, "mbarrier": counts of the phase that runs, and which phase that is."""

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    sync: Sync = field(default_factory=Sync)


@dataclass
class NamedBarrier:
    """A named barrier: warps that have arrived, and those of them that wait."""

    arrived: list[int] = field(default_factory=list)
    waiting: list[Warp] = field(default_factory=list)
    threads: int = 0


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


class Block:
    """One block of a grid."""

    def __init__(self, grid: Grid, place: tuple[int, int, int]) -> None:
        self.grid, self.place = grid, place
        self.shape = grid.launch.block
        self.threads: int = self.shape[0] * self.shape[1] * self.shape[2]
        decoder = grid.program.decoder
        self.shared = SharedMemory(decoder.shared_bytes + grid.launch.shared)
        self.warps = [Warp(grid.program, self, n) for n in range(-(-self.threads // LANES))]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named_barriers: dict[int, NamedBarrier] = {}
        self._groups: dict[tuple[str, int], LaneGroups] = {}
        self.queue: list[Operation] = []
        self.maps: dict[int, TensorMap] = {}
        self.races: Races | None = None
        if grid.watch:
            granule = min(decoder.shared_sizes)
            self.races = Races(self.shared.size, len(self.warps), granule, self.name)
            self.shared.races = self.races

    @property
    def name(self) -> str:
        """``block 0,0,3``."""
        return f"block {','.join(map(str, self.place))}"

    # ------------------------------------------------------------------------------- named barriers

    def meet(self, warp: Warp, number: int, threads: int | None, *, wait: bool) -> None:
        """``bar.sync`` and ``bar.arrive`` of a whole warp."""
        wanted = self.threads if threads is None else threads
        if wanted % LANES and threads is not None:
            raise Fault(f"barrier {number} wants {wanted} threads, not a multiple of {LANES}")
        named = self.named_barriers.setdefault(number, NamedBarrier())
        named.arrived.append(warp.number)
        named.threads = -(-wanted // LANES)
        if wait:
            named.waiting.append(warp)
            warp.blocked, warp.yielded = f"waits at barrier {number}", True
        if len(named.arrived) > named.threads:
            raise Fault(f"barrier {number}: more than {wanted} threads arrived")
        if len(named.arrived) == named.threads:
            if self.races:
                self.races.barrier(named.arrived)
            for one in named.waiting:
                one.blocked = ""
            del self.named_barriers[number]
            self.grid.events += 1

    # ------------------------------------------------------------------------------------ mbarriers

    def initialise(self, address: int, count: int) -> None:
        """``mbarrier.init``."""
        if address % 8:
            raise Fault(f"an mbarrier at {address - SHARED_BASE}, not a multiple of 8")
        if not 0 < count < 2**20:
            raise Fault(f"an mbarrier with an expected count of {count}")
        self.mbarriers[address] = Mbarrier(count, count)
        self.grid.events += 1

    def mbarrier(self, address: int) -> Mbarrier:
        """The mbarrier at an address of shared memory."""
        if address not in self.mbarriers:
            raise Fault(f"no mbarrier was initialised at offset {address - SHARED_BASE}")
        return self.mbarriers[address]

    def expect(self, address: int, count: int) -> None:
        """``expect-tx``: the phase waits for so many bytes more."""
        barrier = self.mbarrier(address)
        barrier.transactions += count
        if abs(barrier.transactions) > TRANSACTION_LIMIT:
            raise Fault(f"an mbarrier that expects {barrier.transactions} bytes")

    def arrive(self, address: int, count: int, clocks: VectorClocks | None) -> None:
        """``arrive-on``, after which the phase may be complete."""
        barrier = self.mbarrier(address)
        if not 0 < count < 2**20:
            raise Fault(f"{count} arrivals at once at an mbarrier")
        if self.races and clocks:
            self.races.arrive(clocks, barrier.sync)
        barrier.pending -= count
        if barrier.pending < 0:
            raise Fault(
                f"{-barrier.pending} excess arrivals at the mbarrier at offset "
                f"{address - SHARED_BASE}"
            )
        self.grid.events += 1
        self._complete(barrier)

    def transferred(self, address: int, count: int, clocks: VectorClocks | None) -> None:
        """``complete-tx``: bytes of a copy are there."""
        barrier = self.mbarrier(address)
        if self.races and clocks:
            self.races.arrive(clocks, barrier.sync)
        barrier.transactions -= count
        self._complete(barrier)

    @staticmethod
    def _complete(barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.transactions == 0:
            barrier.phase ^= 1
            barrier.pending = barrier.expected
            barrier.sync.complete()

    def passed(self, warp: Warp, address: int, parity: int) -> bool:
        """``try_wait.parity``: whether the phase of that parity is complete."""
        barrier = self.mbarrier(address)
        if parity not in (0, 1):
            raise Fault(f"a wait for parity {parity}; 0 and 1 are valid")
        if barrier.phase == parity:
            return False
        if self.races:
            self.races.acquire(warp.number, barrier.sync.completed)
        return True

    # -------------------------------------------------------------------------- asynchronous copies

    def groups(self, kind: str, warp: int) -> LaneGroups:
        """The groups of a warp's operations of one kind."""
        return self._groups.setdefault((kind, warp), LaneGroups())

    def issue(self, operation: Operation) -> Operation:
        """Start a copy: the schedule says when it happens."""
        self.queue.append(operation)
        self.grid.issued(self, operation)
        return operation

    def perform(self, operation: Operation) -> None:
        """Let a copy happen."""
        self.queue.remove(operation)
        try:
            operation.act()
        except Fault as fault:
            fault.line, fault.where = fault.line or operation.line, fault.where or self.name
            raise
        operation.done = True
        if self.races and operation.copy:
            operation.clocks = self.races.finish(operation.copy)
        self.grid.events += 1

    def describe(self) -> str:
        """What its warps wait for, and how its mbarriers stand."""
        places = self.grid.program.kernel.places
        warps = [
            f"warp {w.number} {w.blocked or 'spins'} at line {w.line}"
            + (f" ({source})" if (source := places.at(w.line)) else "")
            for w in self.warps
            if not w.done
        ]
        barriers = [
            f"mbarrier at {address - SHARED_BASE}: phase {b.phase}, {b.pending} arrivals and "
            f"{b.transactions} bytes missing"
            for address, b in sorted(self.mbarriers.items())
            if b.pending != b.expected or b.transactions
        ]
        return f"{self.name}: {'; '.join([*warps, *barriers])}"
