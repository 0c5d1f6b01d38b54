"""A thread block in a launch: its warps, shared memory, barriers, mbarriers and pending copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.machine import (
    COOPERATIVE,
    EXIT,
    LANES,
    NOT_UNDERSTOOD,
    RANK_SHIFT,
    SHARED_BASE,
    Fault,
    not_understood,
    some,
)
from builder.ptx.memory import POISON, SharedMemory
from builder.ptx.races import Races, Sync

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from builder.ptx.memory import GlobalMemory
    from builder.ptx.races import Copy, LaunchRaces, Shadow, VectorClocks
    from builder.ptx.source import Places, Variable

# ---------------------------------------------------------------------------- what its blocks share


@dataclass(frozen=True)
class Launch:
    """The arguments of a launch, from the host."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    #: dynamic shared memory in bytes
    shared: int
    #: the parameter space
    parameters: bytes
    #: the blocks of a cluster along each axis, which divide those of the grid
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Layout:
    """The registers and memory that a kernel's code needs."""

    #: the number of registers of each width, and the constants after them, one row each
    counts: Mapping[int, int]
    constants: Mapping[int, NDArray[Any]]
    #: the index of each special register among those of 32 bits
    special: Mapping[str, int]
    #: the index of the address of the frame among those of 64 bits, or -1
    frame: int
    shared_bytes: int
    local_bytes: int
    #: variables of the module: the address and the contents
    data: tuple[tuple[int, bytes, Variable], ...]
    #: the smallest access to shared memory, in bytes
    granule: int
    global_granule: int = 4

    def block_bytes(self, launch: Launch) -> int:
        """The bytes of a block's registers, local and shared memory."""
        registers = sum(rows * size for rows, size in zip(self.rows, (1, 2, 4, 8), strict=True))
        threads = -(-math.prod(launch.block) // LANES) * LANES
        return threads * (registers + self.local_bytes) + self.shared_bytes + launch.shared

    def table_bytes(self, launch: Launch) -> int:
        """The bytes of what the race detector remembers of a block's shared memory, at most."""
        warps = -(-math.prod(launch.block) // LANES) * math.prod(launch.cluster)
        granules = -(-(self.shared_bytes + launch.shared) // self.granule)
        return 4 * granules * (2 * warps + 6)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the registers' files, of 1, 16, 32 and 64 bits: at least one each."""
        return tuple(
            max(self.counts[width] + len(self.constants[width]), 1) for width in (1, 16, 32, 64)
        )


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
    #: looks for races
    races: LaunchRaces | None
    #: the numbers of the clusters that have not begun
    waiting: deque[int]
    #: counts events that may unblock a warp
    events: int = 0
    #: the clock, which advances when it is read
    clock: int = 0
    #: bytes that stacks have grown by, and that ``malloc`` gave; characters that ``printf`` wrote
    grown: int = 0
    allocated: int = 0
    written: int = 0
    #: what ``printf`` wrote
    printed: list[str] = field(default_factory=list)
    #: tensor maps that the kernel wrote, by their address: what was there before, and of those
    #: that were not released yet the number of the block
    replaced: dict[int, bytes] = field(default_factory=dict)
    unreleased: dict[int, int] = field(default_factory=dict)


# ------------------------------------------------------------------------------ asynchronous copies


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
    #: the address of the tensor map of a store
    map: int = 0


#: The kind of tensor stores, which are in bulk groups.
STORE = "store"
#: The group of a copy that its lane has not committed yet: it comes after all others.
_OPEN = np.iinfo(np.int32).max


@dataclass
class Issued:
    """An operation: the lanes that issued it, and its group in each lane."""

    operation: Operation
    lanes: NDArray[np.bool_]
    group: NDArray[np.int32] = field(default_factory=lambda: np.full(LANES, _OPEN, np.int32))


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

    def of(self, lanes: NDArray[np.intp]) -> list[Operation]:
        """The operations that one of these lanes issued and has not waited for."""
        return [one.operation for one in self.issued if some(one.lanes[lanes])]

    def commit(self, mask: NDArray[np.bool_] | bool) -> None:
        """Close the group of these lanes since their last one, even if it is empty."""
        for one in self.issued:
            mine = one.lanes & (one.group == _OPEN) & mask
            one.group[mine] = self.committed[mine]
        self.committed += mask

    def _before(self, latest: int) -> NDArray[np.bool_]:
        """By operation, the lanes in which it is in an earlier group than the latest ones."""
        last = self.committed - latest
        lanes = np.array([one.lanes for one in self.issued])
        earlier: NDArray[np.bool_] = lanes & (np.array([one.group for one in self.issued]) < last)
        return earlier

    def due(self, mask: NDArray[np.bool_] | bool, latest: int) -> list[Operation]:
        """The operations in all but the latest groups of these lanes."""
        if not self.issued:
            return []
        due: NDArray[np.bool_] = np.any(self._before(latest) & mask, axis=1)
        return [one.operation for one, now in zip(self.issued, due.tolist(), strict=True) if now]

    def waited(self, mask: NDArray[np.bool_] | bool, latest: int) -> None:
        """Record that these lanes have waited for due operations."""
        if not self.issued:
            return
        before = self._before(latest) & mask
        for number in np.flatnonzero(before.any(1)).tolist():
            self.issued[number].lanes &= ~before[number]
        self.issued = [one for one in self.issued if some(one.lanes)]


# ---------------------------------------------------------------------------------------- the block


#: The most bytes that the blocks of a run have at once.  Our choice.
MOST_MEMORY = 2**32
#: Bits of a transaction count ("mbarrier object": -(2**20 - 1) to 2**20 - 1).
TRANSACTION_LIMIT = 2**20 - 1

#: The places of the registers of 32 and 64 bits, as unsigned numbers, among the views.
_U32, _U64 = 2, 5
_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
#: Multiprocessors of a GB10.
MULTIPROCESSORS = 48
#: The contents of registers before they are written.
_UNSET = {1: 0, 16: 0xBEEF, 32: 0xDEADBEEF, 64: 0xDEADBEEFDEADBEEF}
_AS = {
    16: (np.uint16, np.int16),
    32: (np.uint32, np.int32, np.float32),
    64: (np.uint64, np.int64, np.float64),
    1: (np.bool_,),
}


#: The numbers of all lanes, and masks of all and of none; they are never changed.
_LANES = np.arange(LANES)
ALL, _NONE = np.full(LANES, True), np.full(LANES, False)
for _fixed in (_LANES, ALL, _NONE):
    _fixed.flags.writeable = False


class Warp:
    """32 lanes of a block."""

    def __init__(self, block: Block, number: int) -> None:
        self.number = number
        self.block = block
        layout = block.state.layout
        #: registers and constants by type, a row each
        self.files: list[NDArray[Any]] = []
        rows = dict(zip((1, 16, 32, 64), layout.rows, strict=True))
        for width in (16, 32, 64, 1):
            constants, count = layout.constants[width], layout.counts[width]
            file: NDArray[Any] = np.full((rows[width], LANES), _UNSET[width], _DTYPES[width])
            file[count : count + len(constants)] = constants
            self.files += [file.view(kind) for kind in _AS[width]]
        self.views = self.files
        threads: NDArray[np.int64] = number * LANES + np.arange(LANES, dtype=np.int64)
        #: local memory, a row for each lane
        self.local = np.full((LANES, layout.local_bytes), POISON, np.uint8)
        #: lanes that exist: a block's size need not be a multiple of 32
        exist = threads < block.threads
        self.pc = 0
        #: the position of each lane, if they have diverged
        self.pcs: NDArray[np.int64] | None = None
        #: lanes that wait at a barrier
        self.at_barrier = np.zeros(LANES, np.bool_)
        #: lanes that arrived in this phase of the cluster's barrier, in one before, and that wait
        self.arrived = self.passed = self.awaits = _NONE
        #: how often each lane jumped back while it waited for others: those with less go first
        self.spins = np.zeros(LANES, np.int64)
        #: it yielded since it last jumped back
        self.waited = False
        #: the lanes that ran last, if they have diverged
        self.latest_lanes = self.at_barrier
        #: the carry flag of each lane
        self.carry = np.zeros(LANES, np.uint64)
        #: no other lane can continue, so that an instruction does not wait for them
        self.alone = False
        if not exist.all():
            self.pcs = np.where(exist, 0, EXIT).astype(np.int64)
        self.done = False
        #: it yielded, to wait for others
        self.yielded = False
        #: what it waits for
        self.blocked = ""
        #: the mbarrier, and the parity of its phase, that all lanes wait for, and do nothing else
        self.awaited: tuple[int, int] | None = None
        self.line = 0
        #: the calls of each lane: where it returns to, and the registers to restore
        self.calls: list[list[tuple[int, int, Any]]] = [[] for _ in range(LANES)]
        #: the warp as core.c sees it
        self.core: Any = None
        self._set_special(threads)
        if layout.frame >= 0:
            self.views[_U64][layout.frame][...] = 0

    def _set_special(self, threads: NDArray[np.int64]) -> None:
        block, lane = self.block, np.arange(LANES, dtype=np.int64)
        x, y, _ = block.shape
        one = np.int64(1)
        values: dict[str, Any] = {
            "%tid.x": threads % x,
            "%tid.y": threads // x % y,
            "%tid.z": threads // (x * y),
            "%laneid": lane,
            "%warpid": self.number,
            "%nwarpid": -(-block.threads // LANES),
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - 1,
            "%lanemask_le": (one << (lane + 1)) - 1,
            "%lanemask_gt": 0xFFFFFFFF ^ ((one << (lane + 1)) - 1),
            "%lanemask_ge": 0xFFFFFFFF ^ ((one << lane) - 1),
        }
        where, launch = block.linear, block.state.launch
        values |= {
            "%smid": where % MULTIPROCESSORS, "%nsmid": MULTIPROCESSORS,
            "%dynamic_smem_size": launch.shared, "%total_smem_size": block.shared.size,
            "%cluster_ctarank": block.rank, "%cluster_nctarank": math.prod(launch.cluster),
            "%envreg1": COOPERATIVE >> 32, "%envreg2": COOPERATIVE & 0xFFFFFFFF,
        }  # fmt: skip
        for number, axis in enumerate("xyz"):
            size = launch.cluster[number]
            values[f"%clusterid.{axis}"], values[f"%cluster_ctaid.{axis}"] = divmod(
                block.place[number], size
            )
            values[f"%nclusterid.{axis}"] = launch.grid[number] // size
            values[f"%cluster_nctaid.{axis}"] = size
            values[f"%ntid.{axis}"] = block.shape[number]
            values[f"%ctaid.{axis}"] = block.place[number]
            values[f"%nctaid.{axis}"] = launch.grid[number]
        for name, index in block.state.layout.special.items():
            self.views[_U32][index][...] = values[name]

    @property
    def asleep(self) -> bool:
        """Whether it would only find that it still has to wait for its mbarrier."""
        if self.awaited is None:
            return False
        address, parity = self.awaited
        barrier = self.block.mbarriers.get(address)
        return barrier is not None and barrier.phase == parity

    @property
    def live(self) -> NDArray[np.bool_]:
        """The lanes that have not ended."""
        if self.pcs is None:
            return _NONE if self.done else ALL
        return self.pcs < EXIT

    def lanes(self, mask: Any) -> NDArray[np.intp]:
        """The numbers of the lanes that take part."""
        return _LANES if mask is True else np.flatnonzero(mask)


@dataclass
class Mbarrier:
    """PTX ISA, "mbarrier": the counts and the number of the current phase."""

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    sync: Sync = field(default_factory=Sync)


@dataclass
class NamedBarrier:
    """A named barrier: the lanes of each warp that have arrived, and those that wait."""

    #: the number of threads, or None for all of the block
    threads: int | None
    arrived: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    waiting: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    #: of threads whose predicate held, and the lanes to tell: ``bar.red``
    count: int = 0
    results: list[Callable[[int, int], None]] = field(default_factory=list)


class Block:
    """One block of a grid."""

    def __init__(self, cluster: Cluster, place: tuple[int, int, int], rank: int) -> None:
        self.state = state = cluster.state
        self.cluster, self.place, self.rank = cluster, place, rank
        #: it has ended, and its shared memory is gone
        self.gone = False
        self.shape = state.launch.block
        self.threads: int = self.shape[0] * self.shape[1] * self.shape[2]
        self.shared = SharedMemory(state.layout.shared_bytes + state.launch.shared)
        self.warps = [Warp(self, n) for n in range(-(-self.threads // LANES))]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named_barriers: dict[int, NamedBarrier] = {}
        self._groups: dict[tuple[str, int], LaneGroups] = {}
        self.queue: list[Operation] = []
        #: tensor maps in global memory, as the block acquired them, by their address
        self.maps: dict[int, bytes] = {}
        #: bytes that its threads' stacks have grown by
        self.grown = 0
        #: the block as core.c sees it
        self.core: Any = None
        self.races: Races | None = None
        if state.races:
            granule = state.layout.granule
            self.races = Races(self.shared.size, len(self.warps), granule, self.name, state.races)

    @property
    def linear(self) -> int:
        """Its number in the grid."""
        (x, y, _), (i, j, k) = self.state.launch.grid, self.place
        return i + x * (j + y * k)

    @property
    def name(self) -> str:
        """``block 0,0,3``."""
        return f"block {','.join(map(str, self.place))}"

    @property
    def shadow(self) -> Shadow | None:
        """What the race detector knows of its shared memory."""
        return self.races.shared if self.races else None

    def grows(self, size: int) -> None:
        """The stacks of its threads grow, or shrink.

        Raises:
            Fault: those of all blocks are larger than a run may have.
        """
        self.grown += size
        self.state.grown += size
        if self.state.grown > MOST_MEMORY:
            raise Fault(f"the stacks of all threads have more than {MOST_MEMORY >> 30} GiB")

    # ----------------------------------------------------------------------------- shared::cluster

    def owner(self, address: int) -> tuple[Block, int]:
        """The block that an address of the cluster's shared memory is of, and its address there."""
        rank = (address >> RANK_SHIFT) - 1
        return (self, address) if rank < 0 else (self.peer(rank), address % (1 << RANK_SHIFT))

    def owners(self, addresses: Any) -> Iterator[tuple[Block, Any, Any]]:
        """The same for addresses of lanes: each block, which they are, and the addresses there."""
        at = addresses.astype(np.int64)
        ranks = at >> RANK_SHIFT
        if not some(ranks != 0):
            yield self, slice(None), at
            return
        for rank in {*ranks.tolist()}:
            which = np.flatnonzero(ranks == rank)
            yield self.peer(rank - 1) if rank else self, which, at[which] % (1 << RANK_SHIFT)

    def peer(self, rank: int) -> Block:
        """A block of the cluster that has not ended, by its rank.

        Raises:
            Fault: there is none.
        """
        blocks = self.cluster.blocks
        if not 0 <= rank < len(blocks):
            raise Fault(
                f"an address in shared memory of block {rank}, but the cluster has {len(blocks)}"
            )
        if blocks[rank].gone:
            raise Fault(
                f"shared memory of {blocks[rank].name}, which has ended: it wants a cluster "
                "barrier (barrier.cluster.arrive and .wait) before its end"
            )
        return blocks[rank]

    # ------------------------------------------------------------------------------- named barriers

    def meet(
        self, warp: Warp, lanes: NDArray[np.bool_], number: int, threads: int | None, *, wait: bool
    ) -> NamedBarrier:
        """``barrier.sync`` and ``barrier.arrive`` of lanes.

        Lanes that have ended are not waited for: all others of a warp count as 32 threads.
        """
        if threads is not None and threads % LANES:
            raise Fault(f"barrier {number} wants {threads} threads, not a multiple of {LANES}")
        barrier = self.named_barriers.setdefault(number, NamedBarrier(threads))
        barrier.threads = threads
        before = barrier.arrived.get(warp.number)
        if before is not None and (before & lanes).any():
            raise Fault(f"barrier {number}: more than {self._expected(barrier)} threads arrived")
        barrier.arrived[warp.number] = lanes if before is None else before | lanes
        if wait:
            waiting = barrier.waiting.get(warp.number)
            barrier.waiting[warp.number] = lanes if waiting is None else waiting | lanes
            warp.at_barrier |= lanes
            warp.yielded = True
            if lanes is ALL or warp.at_barrier[warp.live].all():
                warp.blocked = f"waits at barrier {number}"
        return barrier

    def settle(self, number: int) -> None:
        """Open a barrier if all threads have arrived."""
        barrier = self.named_barriers[number]
        expected, here = self._expected(barrier), sum(map(self._arrived(barrier), barrier.arrived))
        if barrier.threads is not None and here > expected:
            raise Fault(f"barrier {number}: more than {expected} threads arrived")
        if here < expected:
            return
        if self.races:
            self.races.barrier(self._agents(barrier.arrived), self._agents(barrier.waiting))
        for tell in barrier.results:
            tell(barrier.count, sum(int(lanes.sum()) for lanes in barrier.arrived.values()))
        for one, lanes in barrier.waiting.items():
            warp = self.warps[one]
            warp.at_barrier &= ~lanes
            warp.blocked = ""
        del self.named_barriers[number]
        self.state.events += 1

    def _agents(self, lanes: dict[int, NDArray[np.bool_]]) -> list[tuple[int, Any]]:
        """Warps and their lanes; None if all of them."""
        return [(one, None if mine.all() else np.flatnonzero(mine)) for one, mine in lanes.items()]

    def ended(self) -> None:
        """Lanes have ended: barriers no longer wait for them."""
        for number in [*self.named_barriers]:
            self.settle(number)
        self.cluster.settle()

    def _arrived(self, barrier: NamedBarrier) -> Callable[[int], int]:
        def threads(one: int) -> int:
            if barrier.arrived[one] is ALL:
                return LANES
            lanes, live = barrier.arrived[one], self.warps[one].live
            return int(lanes.sum()) if (live & ~lanes).any() else LANES

        return threads

    def _expected(self, barrier: NamedBarrier) -> int:
        """The threads that a barrier waits for; without a number, all that have not ended."""
        if barrier.threads is not None:
            return barrier.threads
        live = {warp.number for warp in self.warps if not warp.done}
        return LANES * len(live | barrier.arrived.keys())

    # ------------------------------------------------------------------------------------ mbarriers

    def initialise(self, address: int, count: int) -> None:
        """``mbarrier.init``."""
        if address % 8:
            raise Fault(f"an mbarrier at {address - SHARED_BASE}, not a multiple of 8")
        self.shared.offsets(np.array([address]), 8)
        if not 0 < count < 2**20:
            raise Fault(f"an mbarrier with an expected count of {count}")
        self.mbarriers[address] = Mbarrier(count, count)
        self.state.events += 1

    def mbarrier(self, address: int) -> Mbarrier:
        """The mbarrier at an address of shared memory."""
        if address not in self.mbarriers:
            raise Fault(f"no mbarrier was initialised at offset {address - SHARED_BASE}")
        return self.mbarriers[address]

    def expect(self, address: int, count: int) -> None:
        """``expect-tx``: the phase waits for this many more bytes."""
        barrier = self.mbarrier(address)
        barrier.transactions += count
        if abs(barrier.transactions) > TRANSACTION_LIMIT:
            raise Fault(f"an mbarrier that expects {barrier.transactions} bytes")

    def arrive(
        self, address: int, count: int, clocks: VectorClocks | None, *, drop: bool = False
    ) -> None:
        """``arrive-on``, after which the phase may be complete; ``drop``: for the next ones too."""
        barrier = self.mbarrier(address)
        if not 0 < count < 2**20:
            raise Fault(f"{count} arrivals at once at an mbarrier")
        if clocks:
            barrier.sync.arrive(clocks)
        barrier.pending -= count
        if barrier.pending < 0:
            raise Fault(
                f"{-barrier.pending} excess arrivals at the mbarrier at offset "
                f"{address - SHARED_BASE}"
            )
        barrier.expected -= count if drop else 0
        self.state.events += 1
        self._complete(barrier)

    def transferred(self, address: int, count: int, clocks: VectorClocks | None) -> None:
        """``complete-tx``: bytes of a copy have arrived."""
        barrier = self.mbarrier(address)
        if clocks:
            barrier.sync.arrive(clocks)
        barrier.transactions -= count
        self.state.events += 1
        self._complete(barrier)

    @staticmethod
    def _complete(barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.transactions == 0:
            barrier.phase ^= 1
            barrier.pending = barrier.expected
            barrier.sync.complete()

    def passed(self, address: int, parity: int) -> bool:
        """``try_wait.parity``: whether the phase of that parity is complete."""
        barrier = self.mbarrier(address)
        if parity not in (0, 1):
            raise Fault(f"a wait for parity {parity}; 0 and 1 are valid")
        return barrier.phase != parity

    # -------------------------------------------------------------------------- asynchronous copies

    def replaces(self, address: int, before: bytes, *, released: bool) -> None:
        """The block changes a tensor map in global memory, and releases it or not."""
        self.state.replaced.setdefault(address, before)
        self.state.unreleased.pop(address, None)
        if not released:
            self.state.unreleased[address] = self.linear

    def releases_maps(self) -> None:
        """The block releases what it changed of tensor maps."""
        unreleased = self.state.unreleased
        for address in [one for one, block in unreleased.items() if block == self.linear]:
            del unreleased[address]

    def groups(self, kind: str, warp: int) -> LaneGroups:
        """The groups of a warp's operations of one kind."""
        return self._groups.setdefault((kind, warp), LaneGroups())

    def stores_with(self, address: int) -> list[Operation]:
        """The stores with a tensor map that no thread has waited for."""
        every = (groups for (kind, _), groups in self._groups.items() if kind == STORE)
        issued = (one.operation for groups in every for one in groups.issued)
        return [one for one in issued if one.map == address]

    def issue(self, operation: Operation) -> Operation:
        """Start a copy; an eager schedule performs it at once, the others later."""
        self.queue.append(operation)
        if self.state.eager:
            self.perform(operation)
        return operation

    def perform(self, operation: Operation) -> None:
        """Perform a copy."""
        self.queue.remove(operation)
        try:
            operation.act()
        except Fault as fault:
            fault.line, fault.where = fault.line or operation.line, fault.where or self.name
            raise
        except NOT_UNDERSTOOD as error:
            raise not_understood("a copy", error, operation.line) from error
        operation.done = True
        if self.races and operation.copy:
            operation.clocks = self.races.finish(operation.copy)
        self.state.events += 1

    def end(self) -> None:
        """It ends: report what may still access its shared memory, and perform what is pending."""
        self.gone = True
        if self.races:
            self.races.ended(max(warp.line for warp in self.warps))
        stores = [groups for (kind, _), groups in self._groups.items() if kind == STORE]
        for one in (issued for groups in stores for issued in groups.issued):
            if self.races and one.operation.copy:
                self.races.unwaited(one.operation.copy)
        for operation in list(self.queue):
            self.perform(operation)

    def close(self) -> None:
        """It has ended: let go of what refers to it, so that its memory is free at once."""
        self.grows(-self.grown)
        for warp in self.warps:
            warp.core = None
        self.warps.clear()
        self._groups.clear()
        if self.races:
            self.races.close()

    def describe(self) -> str:
        """What its warps wait for, and the state of its mbarriers."""
        places = self.state.places
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


# -------------------------------------------------------------------------------------- the cluster


def first_block(launch: Launch, number: int) -> tuple[int, int, int]:
    """The place of the first block of a cluster."""
    clusters = [blocks // size for blocks, size in zip(launch.grid, launch.cluster, strict=True)]
    x, rest = number % clusters[0], number // clusters[0]
    i, j, k = launch.cluster
    return x * i, rest % clusters[1] * j, rest // clusters[1] * k


class Cluster:
    """The blocks that are there together, and can access each other's shared memory."""

    def __init__(self, state: LaunchState, number: int) -> None:
        self.state = state
        #: the threads of its barrier's phase, and of the one before
        self.sync = Sync()
        #: a thread has seen that no other cluster could be cancelled
        self.refused = False
        sizes, (x, y, z) = state.launch.cluster, first_block(state.launch, number)
        self.blocks: list[Block] = []
        for rank in range(math.prod(sizes)):
            i, rest = rank % sizes[0], rank // sizes[0]
            place = x + i, y + rest % sizes[1], z + rest // sizes[1]
            self.blocks.append(Block(self, place, rank))

    def arrive(self, warp: Warp, lanes: NDArray[np.bool_], clocks: VectorClocks | None) -> None:
        """``barrier.cluster.arrive``.

        Raises:
            Fault: a lane has arrived, and not waited since.
        """
        if some(lanes & (warp.arrived | warp.passed)):
            raise Fault("a second arrival at the cluster barrier without a wait")
        if clocks:
            self.sync.arrive(clocks)
        warp.arrived = warp.arrived | lanes
        self.settle()

    def wait(self, warp: Warp, lanes: NDArray[np.bool_]) -> None:
        """``barrier.cluster.wait``.

        Raises:
            Fault: a lane has not arrived.
        """
        if some(lanes & ~(warp.arrived | warp.passed)):
            raise Fault("a wait at the cluster barrier without an arrival")
        warp.awaits = warp.awaits | lanes
        warp.at_barrier |= lanes & warp.arrived
        if warp.at_barrier[warp.live].all():
            warp.blocked = "waits at the cluster barrier"
        warp.yielded = True
        self._release(warp)

    def settle(self) -> None:
        """End the phase if all threads that have not ended have arrived."""
        warps = [warp for block in self.blocks for warp in block.warps]
        if any(some(w.live & ~w.arrived) for w in warps) or not any(some(w.arrived) for w in warps):
            return
        self.sync.complete()
        self.state.events += 1
        for warp in warps:
            warp.passed, warp.arrived = warp.passed | warp.arrived, _NONE
            self._release(warp)

    def _release(self, warp: Warp) -> None:
        """Lanes that wait for a phase that has ended go on."""
        lanes = warp.awaits & warp.passed
        if not some(lanes):
            return
        warp.passed, warp.awaits = warp.passed & ~lanes, warp.awaits & ~lanes
        warp.at_barrier &= ~lanes
        warp.blocked = ""
        if warp.block.races:
            warp.block.races.acquire(warp.number, self.sync.completed, np.flatnonzero(lanes))

    def close(self) -> None:
        """Let its blocks go, if all of them have ended."""
        if all(block.gone for block in self.blocks):
            for block in self.blocks:
                block.close()
            self.blocks.clear()
