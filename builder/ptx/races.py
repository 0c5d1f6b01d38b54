"""Finds races on the shared memory of a block: accesses without a defined order.

Happens-before by vector clocks.  Agents are the block's warps (lanes of one warp count as ordered)
and its asynchronous copies.  Barriers, mbarriers and waits for copies create order; writes of
generic accesses are visible to the asynchronous proxy only after a ``fence.proxy.async``.

PTX ISA, "Memory Consistency Model" (causality order, proxies) and "Async proxy".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.machine import SHARED_BASE, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Clock = Any
#: Granules: their numbers, or a slice of them.
Places = Any
#: Clocks are allocated for this many agents at a time.
_STEP = 64
#: The write time of an uninitialised granule: later than any clock.
_NEVER = np.iinfo(np.int32).max
#: Granules of the largest access, in order.
_COUNT = np.arange(32)


@dataclass(frozen=True)
class Race:
    """Two unordered accesses, or a read of uninitialised memory.  Lines are those of the PTX."""

    kind: str
    line: int
    other: int
    #: who: ``warp 3``, ``copy``
    agents: tuple[str, str]
    offset: int
    words: int


@dataclass
class VectorClocks:
    """Two vector clocks of an agent, a barrier or a copy: all seen, and all fenced."""

    clock: Clock
    fenced: Clock

    @classmethod
    def nothing(cls, size: int) -> VectorClocks:
        """Clocks at zero."""
        return cls(np.zeros(size, np.int32), np.zeros(size, np.int32))

    def join(self, other: VectorClocks) -> None:
        """Merge with the clocks of another."""
        self.clock = _larger(self.clock, other.clock)
        self.fenced = _larger(self.fenced, other.fenced)

    def copy(self) -> VectorClocks:
        """An independent copy."""
        return VectorClocks(self.clock.copy(), self.fenced.copy())


def _larger(one: Clock, other: Clock) -> Clock:
    size = max(len(one), len(other))
    return np.maximum(_grown(one, size), _grown(other, size))


def _grown(clock: Clock, size: int) -> Clock:
    return clock if len(clock) >= size else np.pad(clock, (0, size - len(clock)))


def _chosen(places: Places, which: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The given granules, sorted and without duplicates."""
    found: NDArray[np.int64]
    if isinstance(places, slice):
        found = np.flatnonzero(which) + places.start
    else:
        found = np.unique(places[which])
    return found


@dataclass
class Sync:
    """Clocks that an mbarrier passes from arriving to waiting warps: this phase and the last."""

    arriving: VectorClocks | None = None
    completed: VectorClocks | None = None

    def complete(self) -> None:
        """A phase ended."""
        self.completed, self.arriving = self.arriving, None


@dataclass
class Copy:
    """A pending asynchronous copy."""

    agent: int
    #: its number among the agent's copies
    clock: int
    line: int
    clocks: VectorClocks


@dataclass
class Races:
    """Watches one block."""

    size: int
    warps: int
    #: bytes that are tracked together
    granule: int = 4
    where: str = ""
    found: list[Race] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = -(-self.size // self.granule)
        self._writer = np.full(count, -1, np.int32)
        self._written = np.full(count, _NEVER, np.int32)
        self._write_line = np.zeros(count, np.int32)
        self._read = np.zeros((self.warps, count), np.int32)
        self._read_line = np.zeros((self.warps, count), np.int32)
        self._shift = self.granule.bit_length() - 1
        self._copied = np.zeros(count, np.int32)
        self._copier = np.zeros(count, np.int32)
        self._copy_line = np.zeros(count, np.int32)
        #: some copy has read
        self._copies_read = False
        self._agents: dict[object, int] = {}
        #: copies of the generic proxy among them
        self._generic: set[int] = set()
        self._issued: list[int] = []
        self.clocks = [VectorClocks.nothing(_STEP) for _ in range(self.warps)]
        for number, clocks in enumerate(self.clocks):
            clocks.clock[number] = 1
        self._seen: set[tuple[str, int, int]] = set()
        #: mbarriers that were initialised, but not fenced: warp and line by address
        self._unfenced: dict[int, tuple[int, int]] = {}

    # ------------------------------------------------------------------------------------- accesses

    def _granules(self, offsets: NDArray[np.int64], size: int) -> Places:
        """The granules that lanes access; one may occur more than once."""
        places = offsets >> self._shift
        parts = size >> self._shift
        return places if parts < 2 else (places[:, None] + _COUNT[:parts]).reshape(-1)

    def _span(self, first: int, size: int) -> Places:
        begin = first // self.granule
        return slice(begin, begin + max(1, size // self.granule))

    def _name(self, agent: int) -> str:
        return f"warp {agent}" if agent < self.warps else "asynchronous copy"

    def _known(self, clocks: VectorClocks) -> Clock:
        """The clocks of all agents."""
        return _grown(clocks.clock, self.warps + len(self._agents))

    def _report(
        self, kind: str, agent: int, line: int, places: Any, other: int, other_line: int
    ) -> None:
        key = (kind, line, other_line)
        if key not in self._seen:
            self._seen.add(key)
            agents = (self._name(agent), self._name(other))
            first, count = int(places[0]) * self.granule, len(places)
            self.found.append(Race(kind, line, other_line, agents, first, count))

    def read(self, agent: int, offsets: NDArray[np.int64], size: int, line: int) -> None:
        """A warp reads ``size`` bytes at each offset."""
        places = self._granules(offsets, size)
        clocks = self.clocks[agent]
        self._check_read(agent, places, line, clocks, asynchronous=False)
        self._read[agent][places] = clocks.clock[agent]
        self._read_line[agent][places] = line

    def write(self, agent: int, offsets: NDArray[np.int64], size: int, line: int) -> None:
        """A warp writes ``size`` bytes at each offset."""
        places = self._granules(offsets, size)
        clocks = self.clocks[agent]
        self._check_write(agent, places, line, clocks)
        self._wrote(agent, places, line, int(clocks.clock[agent]))

    def _wrote(self, agent: int, places: Places, line: int, clock: int) -> None:
        self._writer[places] = agent
        self._written[places] = clock
        self._write_line[places] = line
        if self._copies_read:
            self._copied[places] = 0

    def _check_read(
        self, agent: int, places: Places, line: int, clocks: VectorClocks, *, asynchronous: bool
    ) -> None:
        writer, written = self._writer[places], self._written[places]
        clock = self._known(clocks)
        # a warp knows its own
        bad = written > clock[writer]
        if not asynchronous and not some(bad):
            return
        never = writer < 0
        if some(never):
            hit = _chosen(places, never)
            self._report("read of uninitialised memory", agent, line, hit, agent, 0)
        bad &= ~never
        if asynchronous:
            bad &= writer != agent
            fenced = _grown(clocks.fenced, len(clock))[writer]
            generic = (writer < self.warps) | np.isin(writer, [*self._generic])
            unseen = (written > fenced) & generic & ~never & ~bad
            if unseen.any():
                self._report_write("asynchronous read of a write without fence.proxy.async",
                                   agent, line, _chosen(places, unseen))  # fmt: skip
        if some(bad):
            kind = "read without order after a write"
            self._report_write(kind, agent, line, _chosen(places, bad))

    def _report_write(self, kind: str, agent: int, line: int, places: Any) -> None:
        first = places[0]
        self._report(
            kind, agent, line, places, int(self._writer[first]), int(self._write_line[first])
        )

    def _check_write(self, agent: int, places: Places, line: int, clocks: VectorClocks) -> None:
        clock = self._known(clocks)
        # an agent's copies are not ordered among each other
        writer = self._writer[places]
        bad = self._written[places] > clock[writer]
        if some(bad) and some(bad := bad & (writer >= 0)):
            kind = "write without order after a write"
            self._report_write(kind, agent, line, _chosen(places, bad))
        # a warp knows its own reads
        late = self._read[:, places] > clock[: self.warps, None]
        if some(late):
            row = int(np.flatnonzero(late.any(axis=1))[0])
            hit = _chosen(places, late[row])
            other_line = int(self._read_line[row, hit[0]])
            kind = "write without order after a read"
            self._report(kind, agent, line, hit, row, other_line)
        if not self._copies_read:
            return
        bad = self._copied[places] > clock[self._copier[places]]
        if some(bad):
            hit = _chosen(places, bad)
            kind = "write while a copy may still read"
            other_line = int(self._copy_line[hit[0]])
            self._report(kind, agent, line, hit, int(self._copier[hit[0]]), other_line)

    # ------------------------------------------------------------------------- asynchronous copies

    def issue(self, warp: int, key: Sequence[object], line: int) -> Copy:
        """A warp starts a copy; those with the same key (place, mbarrier) are one agent."""
        agent = self._agents.setdefault((warp, *key), self.warps + len(self._agents))
        if agent == self.warps + len(self._issued):
            self._issued.append(0)
        self._issued[agent - self.warps] += 1
        clocks = self.clocks[warp].copy()
        self.clocks[warp].clock[warp] += 1
        return Copy(agent, self._issued[agent - self.warps], line, clocks)

    def initialised(self, warp: int, address: int, line: int) -> None:
        """A warp initialised an mbarrier."""
        self._unfenced[address] = warp, line

    def signals(self, copy: Copy, address: int) -> None:
        """Check that the asynchronous proxy sees the mbarrier on which a copy completes.

        PTX ISA, "membar / fence": ``fence.mbarrier_init``; or ``fence.proxy.async``.
        """
        if address in self._unfenced:
            warp, line = self._unfenced[address]
            kind = "asynchronous copy on an mbarrier without fence.mbarrier_init"
            place = [(address - SHARED_BASE) // self.granule]
            self._report(kind, copy.agent, copy.line, place, warp, line)

    def fence_initialised(self, warp: int) -> None:
        """``fence.mbarrier_init``: copies see the mbarriers that the warp initialised."""
        self._unfenced = {a: made for a, made in self._unfenced.items() if made[0] != warp}

    def copy_reads(self, copy: Copy, first: int, size: int) -> None:
        """A copy reads shared memory."""
        places = self._span(first, size)
        self._copies_read = True
        self._check_read(copy.agent, places, copy.line, copy.clocks, asynchronous=True)
        self._copied[places] = copy.clock
        self._copier[places] = copy.agent
        self._copy_line[places] = copy.line

    def copy_writes(self, copy: Copy, first: int, size: int) -> None:
        """A copy writes shared memory."""
        places = self._span(first, size)
        self._check_write(copy.agent, places, copy.line, copy.clocks)
        self._wrote(copy.agent, places, copy.line, copy.clock)

    def copy_scatters(self, copy: Copy, offsets: NDArray[np.int64], size: int) -> None:
        """A copy of the generic proxy writes ``size`` bytes of shared memory at each offset."""
        places = self._granules(offsets, size)
        self._check_write(copy.agent, places, copy.line, copy.clocks)
        self._generic.add(copy.agent)
        self._wrote(copy.agent, places, copy.line, copy.clock)

    def finish(self, copy: Copy) -> VectorClocks:
        """The clocks of a warp that waited for the copy."""
        clocks = copy.clocks.copy()
        size = -(-(copy.agent + 1) // _STEP) * _STEP
        clocks.clock = _grown(clocks.clock, size)
        clocks.clock[copy.agent] = copy.clock
        return clocks

    # ------------------------------------------------------------------------------------- ordering

    def arrive(self, clocks: VectorClocks, sync: Sync) -> None:
        """Record an arrival: warps that wait for the phase get its clocks."""
        if sync.arriving is None:
            sync.arriving = clocks.copy()
        else:
            sync.arriving.join(clocks)

    def tick(self, warp: int) -> None:
        """Start a new step of a warp: warps that it released earlier did not see it."""
        self.clocks[warp].clock[warp] += 1

    def acquire(self, warp: int, clocks: VectorClocks | None) -> None:
        """Merge clocks into those of a warp."""
        if clocks is not None:
            self.clocks[warp].join(clocks)

    def barrier(self, warps: Iterable[int]) -> None:
        """Warps met at a barrier: all get the merged clocks."""
        met = list(warps)
        whole = self.clocks[met[0]].copy()
        for warp in met[1:]:
            whole.join(self.clocks[warp])
        for warp in met:
            self.clocks[warp] = whole.copy()
            self.tick(warp)

    def fence(self, warp: int) -> None:
        """``fence.proxy.async``: the asynchronous proxy sees what the warp has seen."""
        self.fence_initialised(warp)
        clocks = self.clocks[warp]
        clocks.fenced = _larger(clocks.fenced, clocks.clock)
        self.tick(warp)
