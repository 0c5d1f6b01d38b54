"""Finds races on shared and global memory: accesses without a defined order.

Happens-before by vector clocks.  Agents are the threads of the grid and the asynchronous copies of
its blocks.  Order comes from barriers of a block and of a warp, mbarriers, waits for copies,
release and acquire patterns at their scopes, and from one ``fence.sc`` to the next.  Which of two
such fences is first is what strong accesses show: one that follows the first fence, and a later
one of the same place before the second.  Fences that no access relates are in no order here,
although the model orders them in some way.  Writes of generic accesses are visible to the
asynchronous proxy only after a ``fence.proxy.async``.  Lanes of one warp are ordered only by
``bar.warp.sync`` and barriers; a matrix instruction (``ldmatrix``) is one access of all of them.

PTX ISA, "Memory Consistency Model" (causality order, scopes, proxies) and "Async proxy".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from builder.ptx.findings import OF_LANES, UNWAITED
from builder.ptx.machine import LANES, SHARED_BASE, Fault, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from builder.ptx.memory import GlobalMemory, Region

#: Lanes by number: an array, or None for all of a warp.
Lanes = Any
#: The strength of an access: weak, or strong with the scope of one block, of a cluster, or of all.
#: ``volatile`` orders as the last, but says nothing of atomicity: two such accesses race, and a
#: store that no fence precedes in its thread also races with atomics.
WEAK, BLOCK, CLUSTER, GRID, VOLATILE, _UNORDERED = range(6)
#: Kinds of accesses in core.c, and its result for a strong read of what a strong write left.
READ, WRITE, ADD, OBSERVED = 0, 1, 2, 2
#: Tables of earlier accesses in core.c, by the noun of a message; and of places never written.
COPIES, NEVER = 3, 4
_TABLES = {"a write": 0, "a read": 1, "an atomic": 2}
#: Whose the other access of a race is, in messages.
_SAME_WARP, _OTHER_BLOCK = " in the same warp", " in another block"
_RELATIONS = ("", _SAME_WARP, _OTHER_BLOCK)
#: Clocks are allocated for this many agents at a time.
_STEP = 64
_ALL = np.arange(LANES)
#: So many acquired clocks of a warp are remembered: a few more than mbarriers it takes turns at.
_ACQUIRED = 8
#: Granules of the largest access, in order.
_COUNT = np.arange(32)
#: The most earlier accesses of one place that are remembered in global memory, and of atomics:
#: the latest, and the latest of another warp, of another block and of another lane.
_REMEMBERED = 4

#: The most events: with the number of a lane their rows have 31 bits.
_MOST_EVENTS = 2**26

_UNWRITTEN = "read of uninitialised memory"
_UNFENCED = "asynchronous {} without fence.proxy.async"
_MAP_IN_USE = "write to a tensor map that a store may still read"
_NOT_BEGUN = "access to shared memory of a block that may not have begun"
_BARRIER = "a cluster barrier (barrier.cluster.arrive and .wait)"
_LANES_APART = "bar.warp.sync (__syncwarp) between the two lanes"
_WARPS_APART = "a barrier (bar.sync, __syncthreads) or an mbarrier between the two warps"


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
    #: what would order the two
    missing: str = ""
    memory: str = "shared memory"


# ------------------------------------------------------------------------------------------- clocks

_Map = dict[int, "NDArray[np.int32]"]
#: Which ``fence.sc`` another one is morally strong with: those of a scope of a block, a cluster, or
#: the grid, and its number.
_Reach = tuple[int, int]


@dataclass(frozen=True, eq=False)
class VectorClocks:
    """What an agent, a barrier or a copy has seen, and what of it is fenced.

    By block: the clock of each of its threads and copies; of ``fenced`` the key is twice the block
    for shared memory, and one more for global memory.  Arrays are shared, and never changed.
    ``epoch``: of what one thread handed over, its block, its clock's index, and its time then.
    Who has seen that thread as late or later knows all of this, as clocks are passed on whole.
    ``sc``: what was seen before the ``fence.sc`` up to here.  ``observed``: the same of fences that
    an access up to here shows to be earlier than the next fence.
    """

    seen: Mapping[int, NDArray[np.int32]]
    fenced: Mapping[int, NDArray[np.int32]]
    epoch: tuple[int, int, int] | None = None
    sc: Mapping[_Reach, VectorClocks] = field(default_factory=dict)
    observed: Mapping[_Reach, VectorClocks] = field(default_factory=dict)

    def includes(self, other: VectorClocks) -> bool:
        """Whether all that another has seen is known to be here, by its epoch."""
        if other.epoch is None:
            return other is _NOTHING
        block, thread, time = other.epoch
        clock = self.seen.get(block)
        return clock is not None and len(clock) > thread and bool(clock[thread] >= time)

    def covers(self, other: VectorClocks) -> bool:
        """Whether all that another has seen, and what of it is fenced, is here; clock by clock."""
        return all(
            mine is clock
            or (mine is not None and not (clock > _grown(mine, len(clock))[: len(clock)]).any())
            for own, theirs in ((self.seen, other.seen), (self.fenced, other.fenced))
            for block, clock in theirs.items()
            for mine in (own.get(block),)
        )

    @cached_property
    def table(self) -> Table:
        """What was seen, as core.c reads it."""
        return Table.of(self.seen)

    @cached_property
    def _fenced_tables(self) -> tuple[Table, Table]:
        of_shared = {key // 2: clock for key, clock in self.fenced.items() if key % 2 == 0}
        of_global = {key // 2: clock for key, clock in self.fenced.items() if key % 2}
        return Table.of(of_shared), Table.of(of_global)

    def fenced_table(self, *, shared: bool) -> Table:
        """What is fenced of shared or of global memory, as core.c reads it."""
        return self._fenced_tables[0 if shared else 1]


@dataclass(frozen=True, eq=False)
class Table:
    """Addresses of clocks by block, 0 if there are none, and their lengths; where both are."""

    clocks: NDArray[np.uint64]
    lengths: NDArray[np.int32]
    at: tuple[int, int]

    @classmethod
    def of(cls, by_block: Mapping[int, NDArray[np.int32]]) -> Table:
        """The table of some blocks' clocks."""
        count = max(by_block, default=-1) + 1
        clocks, lengths = np.zeros(count, np.uint64), np.zeros(count, np.int32)
        for block, clock in by_block.items():
            clocks[block], lengths[block] = clock.__array_interface__["data"][0], len(clock)
        both = (clocks, lengths)
        return cls(*both, tuple(one.__array_interface__["data"][0] for one in both))


_NOTHING = VectorClocks({}, {})


def joined(clocks: Iterable[VectorClocks]) -> VectorClocks:
    """What all of some have seen together."""
    distinct = list({id(one): one for one in clocks}.values())
    if len(distinct) == 1:
        return distinct[0]
    return _both(*distinct) if len(distinct) == 2 else _together(distinct)


@lru_cache(maxsize=256)
def _both(one: VectorClocks, other: VectorClocks) -> VectorClocks:
    """Of two: the same object again, so that lanes that learn the same stay one group."""
    if one.includes(other):
        return one
    if other.includes(one):
        return other
    return _together((one, other))


def _together(clocks: Sequence[VectorClocks]) -> VectorClocks:
    return VectorClocks(
        _larger([one.seen for one in clocks]),
        _larger([one.fenced for one in clocks]),
        None,
        _of_fences([one.sc for one in clocks]),
        _of_fences([one.observed for one in clocks]),
    )


def _of_fences(maps: Sequence[Mapping[_Reach, VectorClocks]]) -> Mapping[_Reach, VectorClocks]:
    by: dict[_Reach, list[VectorClocks]] = {}
    for one in maps:
        for reach, clocks in one.items():
            by.setdefault(reach, []).append(clocks)
    return {reach: joined(parts) for reach, parts in by.items()}


def _larger(maps: Sequence[Mapping[int, NDArray[np.int32]]]) -> _Map:
    largest: _Map = {}
    for one in maps:
        for block, clock in one.items():
            before = largest.get(block)
            if before is None:
                largest[block] = clock
            elif before is not clock:
                size = max(len(before), len(clock))
                largest[block] = np.maximum(_grown(before, size), _grown(clock, size))
    return largest


def _grown(clock: Any, size: int) -> Any:
    return clock if len(clock) >= size else _fresh(clock, size)


def _fresh(clock: Any, size: int) -> Any:
    """A copy of at least a size, with zeros behind."""
    fresh = np.zeros(max(size, len(clock)), np.int32)
    fresh[: len(clock)] = clock
    return fresh


def _room(width: int) -> int:
    return -(-width // _STEP) * _STEP


@dataclass
class Sync:
    """Clocks that an mbarrier passes from arriving to waiting threads: this phase and the last."""

    arriving: VectorClocks | None = None
    completed: VectorClocks | None = None

    def arrive(self, clocks: VectorClocks) -> None:
        """Record an arrival: threads that wait for the phase get its clocks."""
        self.arriving = clocks if self.arriving is None else joined((self.arriving, clocks))

    def complete(self) -> None:
        """A phase ended."""
        self.completed, self.arriving = self.arriving, None


# ------------------------------------------------------------------------------------------- events


class Events:
    """The accesses so far: one row for all equal accesses of a warp or copy at one time."""

    KINDS: ClassVar[dict[str, Any]] = {
        "block": np.int32, "base": np.int32, "clock": np.int32, "line": np.int32,
        "scope": np.int8, "whole": np.bool_, "copy": np.bool_, "generic": np.bool_,
    }  # fmt: skip

    def __init__(self) -> None:
        #: row 0 is of places that nobody has accessed: its clock is 0, which everybody has seen
        self.count = 1
        self._rows: dict[tuple[int, ...], int] = {}
        for name, kind in self.KINDS.items():
            setattr(self, name, np.zeros(1024, kind))

    block: NDArray[np.int32]
    #: the clock's index of lane 0
    base: NDArray[np.int32]
    clock: NDArray[np.int32]
    line: NDArray[np.int32]
    scope: NDArray[np.int8]
    #: an access of the whole warp together
    whole: NDArray[np.bool_]
    #: by an asynchronous copy
    copy: NDArray[np.bool_]
    #: in the generic proxy
    generic: NDArray[np.bool_]

    def row(self, *values: int) -> int:
        """The row of an access, by its values in the order of the columns."""
        row = self._rows.get(values)
        if row is None:
            row = self._rows[values] = self.count
            self.count += 1
            if row == len(self.clock):
                self.grow()
            for name, value in zip(self.KINDS, values, strict=True):
                getattr(self, name)[row] = value
        return row

    def grow(self) -> None:
        """Make room for as many more.

        Raises:
            Fault: core.c's places of events have no bits for more.
        """
        if len(self.clock) >= _MOST_EVENTS:
            raise Fault(f"more than {_MOST_EVENTS} accesses: this kernel is too long to watch")
        for name in self.KINDS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))


class Shadow:
    """The latest accesses of each granule of a memory: ``row * 32 + lane`` of its event, or 0.

    ``warps``: so many warps access it, all of the cluster of block ``owner``, and the reads of each
    are remembered; else, with 0, some reads of many blocks are.
    """

    def __init__(self, name: str, size: int, granule: int, warps: int = 0, owner: int = -1) -> None:
        self.name, self.granule, self.warps, self.owner = name, granule, warps, owner
        self.shift = granule.bit_length() - 1
        self.size = -(-size // granule)
        self.writes = self._table()[0]
        #: reads of threads; atomics and other strong writes; reads of copies
        self.reads: NDArray[np.int32] | None = None
        self.atomics: NDArray[np.int32] | None = None
        self.copies: NDArray[np.int32] | None = None
        #: by granule: the block, the clock's index and the clock of threads whose strong read saw
        #: its latest strong write
        self.observers: dict[int, dict[tuple[int, int], int]] = {}
        #: granules with a strong store that read nothing, after another strong write
        self.restored: set[int] = set()
        #: called when a table was made
        self.updated: Callable[[], None] = lambda: None
        #: its address in core.c, or 0
        self.core = 0

    def _new(self, name: str, rows: int = 1) -> None:
        setattr(self, name, self._table(rows) if rows > 1 else self._table()[0])
        self.updated()

    def _table(self, rows: int = 1) -> NDArray[np.int32]:
        # zeros take no memory until they are written
        return np.zeros((rows, self.size), np.int32)

    def places(self, offsets: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """The granules of accesses; one may occur more than once."""
        first, parts = offsets >> self.shift, size >> self.shift
        return first if parts < 2 else (first[:, None] + _COUNT[:parts]).reshape(-1)

    def span(self, first: int, size: int) -> NDArray[np.int64]:
        """The granules of adjacent bytes."""
        return np.arange(first >> self.shift, -(-(first + size) // self.granule), dtype=np.int64)

    def note_reads(self, places: Any, mine: Any, warp: int, events: Events) -> None:
        """Remember reads of threads."""
        if self.reads is None:
            self._new("reads", 2 * self.warps or _REMEMBERED)
        assert self.reads is not None
        if not self.warps:
            _note(self.reads, places, mine, events)
            return
        latest, another = self.reads[2 * warp], self.reads[2 * warp + 1]
        before = latest[places]
        if np.array_equal(before, mine):
            return
        other = (before & 31) != (mine & 31)
        if some(other):
            another[places[other]] = before[other]
        latest[places] = mine
        overwritten = latest[places] != mine
        if some(overwritten):
            another[places[overwritten]] = mine[overwritten]

    def note_atomics(self, places: Any, mine: Any, events: Events, *, adds: bool = True) -> None:
        """Remember strong writes; ``adds``: of atomics, which read what was there."""
        if self.atomics is None:
            self._new("atomics", _REMEMBERED)
        assert self.atomics is not None
        if not adds:
            self.restored.update(places[self.atomics[0][places] != 0].tolist())
        self._unobserved(places)
        _note(self.atomics, places, mine, events)
        if self.warps:  # they also initialise
            self.writes[places] = np.where(self.writes[places] == 0, mine, self.writes[places])

    def overwritten(self, offsets: Any, size: int) -> None:
        """Strong writes were remembered: nobody has read these yet."""
        if self.observers:
            self._unobserved(self.places(offsets, size))

    def _unobserved(self, places: Any) -> None:
        for place in places.tolist() if self.observers else ():
            self.observers.pop(place, None)

    def note_copy(self, places: Any, mine: int) -> None:
        """Remember a read of a copy."""
        if self.copies is None:
            self._new("copies")
        assert self.copies is not None
        self.copies[places] = mine


def _note(table: NDArray[np.int32], places: Any, mine: Any, events: Events) -> None:
    """Remember an access, and the latest ones of another lane, warp and block."""
    before = table[0][places]
    if np.array_equal(before, mine):
        return
    if np.count_nonzero(before):
        was, now = before >> 5, mine >> 5
        block = events.block[was] != events.block[now]
        warp = block | (events.base[was] != events.base[now])
        lane = warp | ((before & 31) != (mine & 31))
        for row, differs in ((3, block), (2, warp), (1, lane)):
            differs &= before != 0
            table[row][places[differs]] = before[differs]
    table[0][places] = mine
    overwritten = table[0][places] != mine
    if some(overwritten):
        table[1][places[overwritten]] = mine[overwritten]


# ----------------------------------------------------------------------------------------- launches


@dataclass
class _Released:
    """Clocks that a place passes from strong writes to strong reads, by block and scope."""

    by: dict[tuple[int, int], VectorClocks] = field(default_factory=dict)


@dataclass
class _PlaceFences:
    """What was seen before ``fence.sc`` that come before strong accesses of one place.

    By block and scope of the accesses, all of the grid's scope together: up to the latest write,
    and of reads since then.
    """

    written: dict[tuple[int, int], dict[_Reach, VectorClocks]] = field(default_factory=dict)
    read: dict[tuple[int, int], dict[_Reach, VectorClocks]] = field(default_factory=dict)

    def add(
        self, who: tuple[int, int], fences: Mapping[_Reach, VectorClocks], *, write: bool
    ) -> None:
        """An access that comes after fences; a write is after all reads of what it replaces."""
        if write:
            for reader, of_reader in self.read.items():
                _add_fences(self.written.setdefault(reader, {}), of_reader)
            self.read = {}
        if fences:
            _add_fences((self.written if write else self.read).setdefault(who, {}), fences)


def _add_fences(known: dict[_Reach, VectorClocks], more: Mapping[_Reach, VectorClocks]) -> None:
    for reach, clocks in more.items():
        before = known.get(reach)
        if before is None:
            known[reach] = clocks
        elif not before.covers(clocks):
            known[reach] = clocks if clocks.covers(before) else joined((before, clocks))


class _LaunchCore(Protocol):
    """A launch in core.c: see `native`."""

    def knows_all(self, slots: Any, clocks: VectorClocks, block: int | None) -> bool: ...

    def watch_copy(
        self, shadow: Shadow, slot: int, places: Any, clocks: VectorClocks, block: int | None, *,
        write: bool, fenced: bool,
    ) -> bool: ...  # fmt: skip

    def reported(
        self, line: int, other: int, table: int, relation: int, *, shared: bool, half: bool
    ) -> None: ...


class _WarpCore(Protocol):
    """A warp in core.c: see `native`."""

    def watch(
        self, kind: int, shadow: Shadow, row: int, scope: int, lanes: Any, offsets: Any, size: int,
        changed: Any,
    ) -> int: ...  # fmt: skip


@dataclass
class LaunchRaces:
    """What the blocks of one launch share."""

    #: bytes of global memory that are tracked together
    granule: int = 4
    #: the blocks of a cluster, which have adjacent numbers
    cluster: int = 1
    #: order on global memory as GPUs keep it, where the memory model asks for more: a strong read
    #: acquires; it is after all earlier strong writes of the place, and not only after those that
    #: atomics passed on; and copies see what threads see
    as_gpus: bool = False
    #: a second write of the same value is a race, too
    strict: bool = False
    races: list[Race] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    blocks: list[Races] = field(default_factory=list)
    #: by the address of a place in global memory, or the block and offset in shared memory
    released: dict[object, _Released] = field(default_factory=dict)
    #: by the same place; and whether there was a ``fence.sc`` yet
    place_fences: dict[object, _PlaceFences] = field(default_factory=dict)
    has_sc: bool = False
    #: so many of the widest reaches of such fences are kept: more once a narrow one ran
    sc_reaches: int = 1
    #: pairs of blocks of which one released for itself only what the other acquired
    narrow: set[tuple[int, int]] = field(default_factory=set)
    #: the launch in core.c, where there is a compiler
    core: _LaunchCore | None = None
    _seen: set[tuple[str, int, int, bool]] = field(default_factory=set)
    _shadows: dict[int, Shadow] = field(default_factory=dict)

    def shadow(self, region: Region) -> Shadow:
        """What is known of a region of global memory."""
        shadow = self._shadows.get(region.address)
        if shadow is None:
            name = region.name or f"global memory at {region.address:#x}"
            shadow = Shadow(name, len(region.data), self.granule)
            self._shadows[region.address] = shadow
        return shadow

    def forget(self, region: Region) -> None:
        """A region of global memory is gone: what comes to its address has no history."""
        self._shadows.pop(region.address, None)
        tables: tuple[dict[object, Any], ...] = (self.released, self.place_fences)
        for table in tables:
            gone = [k for k in table if isinstance(k, int) and region.address <= k < region.end]
            for key in gone:
                del table[key]

    def is_new(self, kind: str, line: int, other: int, missing: str) -> bool:
        """Whether a race with these lines was not found before."""
        key = (kind, line, other, missing.startswith(OF_LANES))
        new = key not in self._seen
        self._seen.add(key)
        return new


@dataclass
class Copy:
    """A pending asynchronous copy."""

    #: the clock's index of its agent
    agent: int
    #: its number among the agent's copies
    clock: int
    line: int
    clocks: VectorClocks
    #: its event
    row: int


@dataclass
class _Fence:
    """A thread's last fence: what the thread knew and had done before it, and the scope."""

    known: VectorClocks
    time: int
    #: the time at which its own writes were last fenced
    fenced: Any
    scope: int
    #: all of it as clocks, once a strong write hands them over
    clocks: VectorClocks | None = None


# ------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class _Access:
    """An access of some places: who, what, and how the messages name it."""

    places: NDArray[np.int64]
    #: the event and lane for each place
    mine: NDArray[np.int32]
    clocks: VectorClocks
    verb: str


class Races:
    """Watches one block."""

    def __init__(
        self,
        size: int,
        warps: int,
        granule: int = 4,
        where: str = "",
        launch: LaunchRaces | None = None,
    ) -> None:
        self.warps, self.where = warps, where
        self.launch = launch or LaunchRaces()
        self.number = len(self.launch.blocks)
        self.launch.blocks.append(self)
        cluster = self.launch.cluster
        name = f"shared memory{f' of {where}' if cluster > 1 else ''}"
        self.shared = Shadow(name, size, granule, warps * cluster, self.number)
        #: agents with a clock: threads, then copies
        self._width = warps * LANES
        self.times = np.ones(warps, np.int32)
        #: the time at which each thread's own writes were last fenced
        self._fenced = np.zeros((2, warps * LANES), np.int32)
        #: the time of each thread's last ``fence.sc`` of at least a scope, the widest first; and
        #: whose they reach
        self._sc = np.zeros((3, warps * LANES), np.int32)
        self._sc_reach: tuple[_Reach, ...] = (
            (GRID, 0), (CLUSTER, self.number // cluster), (BLOCK, self.number)
        )  # fmt: skip
        #: by thread: what its fences hand over, and of which knowledge and time
        self._sc_cache: dict[int, tuple[object, int, Mapping[_Reach, VectorClocks]]] = {}
        #: what the lanes of each warp know: all the same, or each its own
        self.knows: list[VectorClocks | list[VectorClocks]] = [_NOTHING] * warps
        #: the clocks that all lanes of each warp acquired last, and need not acquire again
        self._acquired = [deque[VectorClocks](maxlen=_ACQUIRED) for _ in range(warps)]
        self._agents: dict[object, int] = {}
        self._issued: dict[int, int] = {}
        #: by thread: its last fence, and fence.mbarrier_init
        self._fences: dict[int, _Fence] = {}
        self._init_fences: dict[int, _Fence] = {}
        #: by thread: what strong reads saw that no fence has acquired yet
        self._pending: dict[int, list[tuple[int, int, VectorClocks]]] = {}
        #: warps as core.c sees them, by number
        self.cores: dict[int, _WarpCore] = {}
        #: mbarriers that were initialised, but not fenced: warp and line by address
        self._unfenced: dict[int, tuple[int, int]] = {}

    def close(self) -> None:
        """The block has ended: only its name is wanted from now on."""
        self.shared.updated = lambda: None
        self.shared = Shadow(self.shared.name, 0, self.shared.granule, self.warps)
        self.knows, self._fences, self._pending, self._init_fences = [], {}, {}, {}
        self.cores, self._sc_cache = {}, {}

    def ended(self, line: int) -> None:
        """The block ends: report accesses of its cluster that nothing orders before that."""
        shadow, events = self.shared, self.launch.events
        if self.launch.cluster == 1:
            return
        row = events.row(self.number, 0, 1 << 30, line, WEAK, True, False, True)
        clocks = joined(c for warp in range(self.warps) for c, _ in self._parts(warp, _ALL))
        for table, noun in (
            (shadow.writes, "a write"), (shadow.reads, "a read"), (shadow.atomics, "an atomic")
        ):  # fmt: skip
            for slots in () if table is None else np.atleast_2d(table):
                others = (events.block[slots >> 5] != self.number) & (slots != 0)
                if some(others):
                    places = np.flatnonzero(others)
                    mine = np.full(len(places), row * LANES, np.int32)
                    access = _Access(places, mine, clocks, "end of the block")
                    self._check(access, shadow, slots[places], noun, WEAK)

    # ------------------------------------------------------------------------------------ knowledge

    def _parts(self, warp: int, lanes: NDArray[Any]) -> Iterator[tuple[VectorClocks, Any]]:
        """Groups of lanes that know the same: their clocks, and which of the given they are."""
        clocks = self.knows[warp]
        if isinstance(clocks, VectorClocks):
            yield clocks, slice(None)
            return
        ids = np.array([id(clocks[lane]) for lane in lanes.tolist()])
        for one in dict.fromkeys(ids.tolist()):
            which = np.flatnonzero(ids == one)
            yield clocks[int(lanes[which[0]])], which

    def _each(self, warp: int) -> list[VectorClocks]:
        clocks = self.knows[warp]
        return [clocks] * LANES if isinstance(clocks, VectorClocks) else clocks

    def _with_own(
        self, clocks: VectorClocks, threads: Any, times: Any, fenced: Any
    ) -> VectorClocks:
        """Clocks, and some threads' own progress."""
        epoch = (self.number, threads, int(times)) if isinstance(threads, int) else None
        seen, all_fenced = self._progress(clocks, threads, times, fenced)
        sc = self._with_own_fences(clocks.sc, threads) if self.launch.has_sc else clocks.sc
        return VectorClocks(seen, all_fenced, epoch, sc, clocks.observed)

    def _progress(
        self, clocks: VectorClocks, threads: Any, times: Any, fenced: Any
    ) -> tuple[_Map, _Map]:
        width = _room(self._width)
        seen = _fresh(clocks.seen.get(self.number, ()), width)
        seen[threads] = times
        all_fenced = dict(clocks.fenced)
        for space, own in enumerate(fenced):
            if np.count_nonzero(own):
                key = 2 * self.number + space
                all_fenced[key] = known = _fresh(all_fenced.get(key, ()), width)
                known[threads] = np.maximum(known[threads], own)
        return {**clocks.seen, self.number: seen}, all_fenced

    def _with_own_fences(
        self, sc: Mapping[_Reach, VectorClocks], threads: Any
    ) -> Mapping[_Reach, VectorClocks]:
        """What ``fence.sc`` hand over, with those of some threads."""
        result = dict(sc)
        for reach, times in zip(self._sc_reach, self._sc[:, threads], strict=True):
            if np.count_nonzero(times):
                before = sc.get(reach, _NOTHING)
                known = _fresh(before.seen.get(self.number, ()), _room(self._width))[threads]
                fenced = self._fenced[:, threads]
                fenced = np.where(fenced <= times, fenced, 0)
                seen = self._progress(before, threads, np.maximum(known, times), fenced)
                result[reach] = VectorClocks(*seen)
        return result

    def released(self, warp: int, lanes: Lanes = None) -> VectorClocks:
        """What lanes have seen and done, to hand over; what they do next is not part of it."""
        chosen = _ALL if lanes is None else lanes
        common = joined(clocks for clocks, _ in self._parts(warp, chosen))
        threads: Any = warp * LANES + chosen
        if len(threads) == 1:
            threads = int(threads[0])
        released = self._with_own(common, threads, self.times[warp], self._fenced[:, threads])
        self.times[warp] += 1
        return released

    def acquire(self, warp: int, clocks: VectorClocks | None, lanes: Lanes = None) -> None:
        """Lanes see what others have handed over."""
        if clocks is None or any(clocks is one for one in self._acquired[warp]):
            return
        own = self.knows[warp]
        if isinstance(own, VectorClocks) and own.includes(clocks):
            return
        if isinstance(own, VectorClocks) and (lanes is None or len(lanes) == LANES):
            self.knows[warp] = joined((own, clocks))
            self._acquired[warp].append(clocks)
            return
        each, chosen = self._each(warp), _ALL if lanes is None else lanes
        if not all(each[lane].includes(clocks) for lane in chosen.tolist()):
            self._change(warp, chosen, lambda old: joined((old, clocks)))

    def _change(
        self, warp: int, lanes: NDArray[Any], change: Callable[[VectorClocks], VectorClocks]
    ) -> None:
        """Change what lanes know; those that knew the same know the same afterwards."""
        before, changed = self._each(warp), dict[int, VectorClocks]()
        each = list(before)
        for lane in lanes.tolist():
            old = before[lane]
            if id(old) not in changed:
                changed[id(old)] = change(old)
            each[lane] = changed[id(old)]
        self.knows[warp] = each if any(one is not each[0] for one in each) else each[0]

    def barrier(
        self, arrived: Sequence[tuple[int, Lanes]], waiting: Sequence[tuple[int, Lanes]]
    ) -> None:
        """Warps met, with these lanes: those that wait see what all that arrived have done."""
        parts_of_warps = [self._parts(w, _ALL if lanes is None else lanes) for w, lanes in arrived]
        whole = joined(clocks for parts in parts_of_warps for clocks, _ in parts)
        threads = np.concatenate(
            [warp * LANES + (_ALL if lanes is None else lanes) for warp, lanes in arrived]
        )
        times = self.times[threads >> 5]
        whole = self._with_own(whole, threads, times, self._fenced[:, threads])
        for warp in {warp for warp, _ in arrived}:
            self.times[warp] += 1
        for warp, lanes in waiting:
            if lanes is None or len(lanes) == LANES:
                self.knows[warp] = whole
            else:
                each = list(self._each(warp))
                for lane in lanes.tolist():
                    each[lane] = whole
                self.knows[warp] = each

    # ------------------------------------------------------------------------------------ detection

    def _latest(self, clocks: VectorClocks, block: int, shadow: Shadow, *, fenced: bool) -> Any:
        """The clocks up to which a block's accesses are known; ``fenced``: to the copies, too."""
        return (
            clocks.fenced.get(2 * block + (not shadow.warps)) if fenced else clocks.seen.get(block)
        )

    def _is_in_core(self, shadow: Shadow) -> bool:
        """Whether core.c has a memory, and it is not another block's."""
        return bool(shadow.core) and shadow.owner in (-1, self.number)

    def _only_block(self, shadow: Shadow) -> int | None:
        """The only block that accesses a memory: this one, if it is its shared memory."""
        return self.number if shadow.warps and self.launch.cluster == 1 else None

    def _limit(
        self, clocks: VectorClocks, block: Any, index: Any, shadow: Shadow, *, fenced: bool
    ) -> Any:
        """The clock up to which the given agents' accesses are known."""
        limit = np.zeros(index.shape, np.int32)
        for number in {*block.ravel().tolist()}:
            latest = self._latest(clocks, number, shadow, fenced=fenced)
            if latest is not None:
                which = block == number
                wide = _grown(latest, self.launch.blocks[number]._width)
                limit[which] = wide[index[which]]
        return limit

    def _late(self, slots: Any, access: _Access, shadow: Shadow, *, fenced: bool = False) -> Any:
        """Which earlier accesses an access does not know; None if it knows all."""
        events = self.launch.events
        core, only = self.launch.core, self._only_block(shadow)
        if core and not fenced and core.knows_all(slots, access.clocks, only):
            return None
        rows = slots >> 5
        clock = events.clock[rows]
        if not np.count_nonzero(clock):
            return None
        index, mine = events.base[rows] + (slots & 31), access.mine >> 5
        block = events.block[rows]
        if shadow.warps and self.launch.cluster == 1:
            latest = self._latest(access.clocks, self.number, shadow, fenced=fenced)
            limit = 0 if latest is None else _grown(latest, self._width)[index]
        else:
            limit = self._limit(access.clocks, block, index, shadow, fenced=fenced)
        late = clock > limit
        if not some(late):
            return None
        if not events.copy[mine[0]]:  # a thread knows its own; copies are unordered
            late &= (index != events.base[mine] + (access.mine & 31)) | (block != self.number)
        if some(late) and (some(events.whole[rows]) or events.whole[mine[0]]):
            self._forgive_whole(late, slots, access, shadow, fenced=fenced)
        return late if some(late) else None

    def _forgive_whole(
        self, late: Any, slots: Any, access: _Access, shadow: Shadow, *, fenced: bool
    ) -> None:
        """An access of a whole warp is known to all who know one of its lanes."""
        events = self.launch.events
        mine, rows = int(access.mine[0] >> 5), slots >> 5
        same = (events.base[rows] == events.base[mine]) & (events.block[rows] == self.number)
        late &= ~(same & (events.whole[rows] | events.whole[mine]))
        forgiven = []
        for row in {*rows[late & events.whole[rows]].tolist()}:
            latest = self._latest(access.clocks, int(events.block[row]), shadow, fenced=fenced)
            base = int(events.base[row])
            lanes = None if latest is None else latest[base : base + LANES]
            if lanes is not None and len(lanes) and lanes.max() >= events.clock[row]:
                forgiven.append(row)
        if forgiven:
            late &= ~np.isin(rows, forgiven)

    def _forgive_strong(self, late: Any, slots: Any, scope: int, *, written: bool) -> Any:
        """Two strong accesses whose scopes include each other are no race."""
        events, rows = self.launch.events, slots >> 5
        other = events.scope[rows]
        common, cluster = np.minimum(other, scope), self.launch.cluster
        near = (events.block[rows] == self.number) | (common >= GRID)
        near |= (common == CLUSTER) & (events.block[rows] // cluster == self.number // cluster)
        near &= (other < VOLATILE) | (scope < VOLATILE)
        if written:
            near &= (other != _UNORDERED) & (scope != _UNORDERED)
        late &= ~((other != WEAK) & near)
        return late if some(late) else None

    def _forgive_observed(self, late: Any, access: _Access, shadow: Shadow) -> Any:
        """A strong write is before what follows a strong read that saw it, acquired or not.

        So are the strong writes that it read itself, as atomics do.  PTX ISA, "Observation order"
        and "Causality order".
        """
        assert shadow.atomics is not None
        events, mine = self.launch.events, access.mine
        seen = self._is_own(shadow.atomics[0, access.places], access)
        threads = (events.base[mine >> 5] + (mine & 31)).tolist()
        for at, place in enumerate(access.places.tolist() if shadow.observers else ()):
            readers = shadow.observers.get(place, {})
            seen[at] |= (self.number, threads[at]) in readers or any(
                len(latest := access.clocks.seen.get(block, ())) > index and latest[index] >= clock
                for (block, index), clock in readers.items()
            )
        if not self.launch.as_gpus and shadow.restored:
            seen &= ~np.isin(access.places, [*shadow.restored])
        late &= ~seen
        return late if some(late) else None

    def _observe(self, access: _Access, shadow: Shadow) -> None:
        """Remember who read the latest strong writes with a strong read."""
        assert shadow.atomics is not None
        events, rows = self.launch.events, access.mine >> 5
        threads = (events.base[rows] + (access.mine & 31)).tolist()
        written = shadow.atomics[0, access.places] != 0
        for at in np.flatnonzero(written).tolist():
            readers = shadow.observers.setdefault(int(access.places[at]), {})
            readers[self.number, threads[at]] = int(events.clock[rows[at]])

    def _check(
        self,
        access: _Access,
        shadow: Shadow,
        slots: Any,
        noun: str,
        scope: int,
        changed: Any = None,
    ) -> Any:
        """Report the earlier accesses that an access does not know; return which they are."""
        late = self._late(slots, access, shadow)
        if late is not None and scope:
            both = access.verb != "read" and noun == "an atomic"
            late = self._forgive_strong(late, slots, scope, written=both)
        if late is not None and noun == "an atomic":
            late = self._forgive_observed(late, access, shadow)
        if late is not None and changed is not None and not self.launch.strict:
            late &= changed
        if late is None or not some(late):
            return None
        rows = slots.reshape(-1, slots.shape[-1])
        for row, which in zip(rows, late.reshape(rows.shape), strict=True):
            if some(which):
                self._report_pairs(access, shadow, row, which, noun)
        return late

    def _report_pairs(
        self, access: _Access, shadow: Shadow, slots: Any, which: Any, noun: str
    ) -> None:
        events = self.launch.events
        hits = np.flatnonzero(which)
        lines = events.line[slots[hits] >> 5]
        for line in dict.fromkeys(lines.tolist()):
            at = hits[lines == line]
            other, mine = int(slots[at[0]]), int(access.mine[at[0]])
            volatile = events.scope[other >> 5] >= VOLATILE
            strong = " of too narrow a scope" if self._both_strong(other, mine) else ""
            what = "a write" if volatile and noun == "an atomic" else noun
            kind = f"{access.verb} without order after {what}{strong}"
            if noun == "a read" and events.copy[other >> 5]:
                kind = "write while a copy may still read"
            relation = self._relation(mine, other)
            missing = self._half_known(access, other)
            self._report(kind + relation, access.places[at], shadow, mine, other, missing)
            if self.launch.core:
                table = COPIES if noun == "a read" and events.copy[other >> 5] else _TABLES[noun]
                self.launch.core.reported(
                    int(events.line[mine >> 5]), int(line), table, _RELATIONS.index(relation),
                    shared=bool(shadow.warps), half=bool(missing),
                )  # fmt: skip

    def _half_known(self, access: _Access, other: int) -> str:
        """What is missing if another lane of the other's warp handed over, but not this one."""
        events, row = self.launch.events, other >> 5
        latest = access.clocks.seen.get(int(events.block[row]))
        if latest is None or events.copy[row] or self._relation(int(access.mine[0]), other):
            return ""
        first = int(events.base[row])
        handed = np.flatnonzero(latest[first : first + LANES] >= events.clock[row])
        if not len(handed):
            return ""
        return (
            f"bar.warp.sync (__syncwarp) between line {events.line[row]} in lane {other & 31} and "
            f"lane {handed[0]}'s release: a lane hands over only what it has seen of its warp"
        )

    def _both_strong(self, *slots: int) -> bool:
        """Both are strong, and neither volatile."""
        return all(WEAK < self.launch.events.scope[slot >> 5] < VOLATILE for slot in slots)

    def _relation(self, mine: int, other: int) -> str:
        events = self.launch.events
        if events.block[mine >> 5] != events.block[other >> 5]:
            return _OTHER_BLOCK
        same = events.base[mine >> 5] == events.base[other >> 5]
        return _SAME_WARP if same and not events.copy[mine >> 5] else ""

    def _report(
        self, kind: str, places: Any, shadow: Shadow, mine: int, other: int, missing: str = ""
    ) -> None:
        """Report a race of the access ``mine`` with ``other``, which is 0 if there is none."""
        events = self.launch.events
        line, before = int(events.line[mine >> 5]), int(events.line[other >> 5])
        if not self.launch.is_new(kind, line, before, missing):
            return
        hit = np.unique(places)
        self.launch.races.append(
            Race(
                kind, line, before, (self._name(mine, other), self._name(other or mine, mine)),
                int(hit[0]) * shadow.granule, len(hit),
                missing or self._missing(mine, other, shadow),
                shadow.name,
            )
        )  # fmt: skip

    def _name(self, slot: int, other: int) -> str:
        """Who accessed: with lane or block, where that differs from the other's."""
        events, row = self.launch.events, slot >> 5
        apart = other and events.block[row] != events.block[other >> 5]
        block = f"{self.launch.blocks[int(events.block[row])].where} " if apart else ""
        if events.copy[row]:
            return f"{block}asynchronous copy"
        warp = int(events.base[row]) // LANES
        same = other and slot != other and self._relation(slot, other) == _SAME_WARP
        lane = f" lane {slot & 31}" if (same or apart) and not events.whole[row] else ""
        return f"{block}warp {warp}{lane}"

    def _missing(self, mine: int, other: int, shadow: Shadow) -> str:
        """What would order two accesses."""
        events, relation = self.launch.events, self._relation(mine, other)
        if not other:
            return ""
        if relation == _OTHER_BLOCK:
            if shadow.warps:
                return f"{_BARRIER} or an mbarrier between the two blocks"
            both = (int(events.block[other >> 5]), int(events.block[mine >> 5]))
            strong = events.scope[mine >> 5] or events.scope[other >> 5]
            remedy = (
                "a release at gpu scope after the first access and an acquire before the second"
                f"{', or both accesses atomic at gpu scope' if strong else ''}"
            )
            narrow = both in self.launch.narrow or self._both_strong(mine, other)
            return f"{remedy}; scope cta orders only the threads of one block" if narrow else remedy
        if events.copy[other >> 5]:
            return "a wait for the copy, and a barrier after it for threads that did not wait"
        if events.copy[mine >> 5]:
            return "a barrier or an mbarrier from the access to the thread that starts the copy"
        return _LANES_APART if relation else _WARPS_APART

    # ------------------------------------------------------------------------------------- accesses

    def _accesses(
        self, verb: str, shadow: Shadow, warp: int, lanes: Lanes, offsets: Any, size: int,
        line: int, scope: int,
    ) -> Iterator[tuple[_Access, Any]]:  # fmt: skip
        """An access by lanes that know the same, and which granules are theirs.

        ``lanes`` is None for an access of the whole warp together.
        """
        places = shadow.places(offsets, size)
        whole = lanes is None
        row = self.launch.events.row(
            self.number, warp * LANES, int(self.times[warp]), line, scope, whole, False, True
        )
        parts = len(places) // max(len(offsets), 1)
        numbers = np.zeros(len(offsets), np.int64) if whole else lanes
        mine = (row * LANES + numbers).astype(np.int32)
        if parts > 1:
            mine = np.repeat(mine, parts)
        if whole:
            clocks = joined(clocks for clocks, _ in self._parts(warp, _ALL))
            yield _Access(places, mine, clocks, verb), slice(None)
            return
        for clocks, which in self._parts(warp, lanes):
            at = which
            if not isinstance(which, slice) and parts > 1:
                at = (which[:, None] * parts + _COUNT[:parts]).reshape(-1)
            access = _Access(places[at], mine[at], clocks, verb)
            self._check_begun(access, shadow)
            yield access, at

    def _check_begun(self, access: _Access, shadow: Shadow) -> None:
        """Report an access to another block that nothing orders after the block's begin."""
        if shadow.owner not in (-1, self.number) and shadow.owner not in access.clocks.seen:
            mine = int(access.mine[0])
            self._report(_NOT_BEGUN, access.places, shadow, mine, 0, f"{_BARRIER} before it")

    def _row(self, warp: int, shadow: Shadow) -> int:
        """The number of a warp among those that access a memory: the owner's are first."""
        if shadow.owner < 0:
            return warp
        return (self.number - shadow.owner) % self.launch.cluster * self.warps + warp

    def _in_core(
        self, kind: int, warp: int, lanes: Lanes, offsets: Any, size: int, line: int, scope: int,
        shadow: Shadow, changed: Any = None,
    ) -> int:  # fmt: skip
        """Check an access in core.c, and remember it; 0 if Python has to look at it."""
        core = self.cores.get(warp)
        if core is None or not self._is_in_core(shadow):
            return 0
        row = self.launch.events.row(
            self.number, warp * LANES, int(self.times[warp]), line, scope, lanes is None, False,
            True,
        )  # fmt: skip
        result: int = core.watch(kind, shadow, row, scope, lanes, offsets, size, changed)
        return result

    def read(
        self, warp: int, lanes: Lanes, offsets: Any, size: int, line: int, scope: int = WEAK,
        shadow: Shadow | None = None, verb: str = "read",
    ) -> None:  # fmt: skip
        """Lanes read ``size`` bytes at each offset; of shared memory, or as the shadow says."""
        shadow = shadow or self.shared
        if in_core := self._in_core(READ, warp, lanes, offsets, size, line, scope, shadow):
            if in_core == OBSERVED:
                for access, _ in self._accesses(
                    verb, shadow, warp, lanes, offsets, size, line, scope
                ):
                    self._observe(access, shadow)
            return
        for access, _ in self._accesses(verb, shadow, warp, lanes, offsets, size, line, scope):
            slots = shadow.writes[access.places]
            self._check(access, shadow, slots, "a write", scope)
            if shadow.warps and not slots.all():
                never = access.places[slots == 0]
                self._report(_UNWRITTEN, never, shadow, int(access.mine[0]), 0)
                if self.launch.core:
                    self.launch.core.reported(line, 0, NEVER, 0, shared=True, half=False)
            if shadow.atomics is not None:
                slots = shadow.atomics.take(access.places, axis=1)
                self._check(access, shadow, slots, "an atomic", scope)
                if WEAK < scope < VOLATILE:
                    self._observe(access, shadow)
            row = self._row(warp, shadow)
            shadow.note_reads(access.places, access.mine, row, self.launch.events)

    def write(
        self, warp: int, lanes: Lanes, offsets: Any, size: int, line: int, changed: Any = None,
        shadow: Shadow | None = None,
    ) -> None:  # fmt: skip
        """Lanes write ``size`` bytes at each offset.

        ``changed``: which of them change a value.  A second write of the same value is no race.
        """
        shadow = shadow or self.shared
        if self._in_core(WRITE, warp, lanes, offsets, size, line, WEAK, shadow, changed):
            return
        if changed is not None:
            changed = np.repeat(changed, max(1, size // shadow.granule))
        for access, which in self._accesses(
            "write", shadow, warp, lanes, offsets, size, line, WEAK
        ):
            new = None if changed is None else changed[which]
            self._check_write(access, shadow, WEAK, new)
            shadow.writes[access.places] = access.mine

    def stores(
        self, warp: int, lanes: Lanes, offsets: Any, rows: Any, line: int, scope: int,
        memory: NDArray[np.uint8], shadow: Shadow,
    ) -> None:  # fmt: skip
        """Lanes are about to store rows of bytes at offsets of a memory."""
        size = rows.shape[1]
        if scope:
            threads = [warp * LANES + int(lane) for lane in (_ALL if lanes is None else lanes)]
            if scope == VOLATILE and not all(one in self._fences for one in threads):
                scope = _UNORDERED
            self.strong(warp, lanes, offsets, size, line, scope, shadow, adds=False)
            return
        changed = (memory[offsets[:, None] + np.arange(size)] != rows).any(axis=1)
        self.write(warp, lanes, offsets, size, line, changed, shadow)
        if lanes is None or len({*offsets.tolist()}) == len(offsets):
            return
        first: dict[int, int] = {}
        for number, offset in enumerate(offsets.tolist()):
            before = first.setdefault(offset, number)
            if (rows[before] != rows[number]).any():
                self._report_conflict(warp, (lanes[before], lanes[number]), offset, line, shadow)
                return

    def reads(
        self, warp: int, lanes: Lanes, at: Any, size: int, line: int, scope: int,
        memory: GlobalMemory,
    ) -> None:  # fmt: skip
        """Lanes are about to load from global memory; what no thread may write has no races."""
        for which, offsets, region in memory.spans(at, size):
            if region.writable:
                shadow = self.launch.shadow(region)
                self.read(warp, lanes[which], offsets, size, line, scope, shadow)

    def writes(
        self, warp: int, lanes: Lanes, at: Any, rows: Any, line: int, scope: int,
        memory: GlobalMemory,
    ) -> None:  # fmt: skip
        """Lanes are about to store to global memory; without lanes, the whole warp together."""
        for which, offsets, region in memory.spans(at, rows.shape[1], write=True):
            shadow = self.launch.shadow(region)
            own = None if lanes is None else lanes[which]
            self.stores(warp, own, offsets, rows[which], line, scope, region.data, shadow)

    def strongs(
        self, warp: int, lanes: Lanes, at: Any, size: int, line: int, scope: int,
        memory: GlobalMemory,
    ) -> None:  # fmt: skip
        """Lanes are about to run an atomic in global memory."""
        for which, offsets, region in memory.spans(at, size, write=True):
            shadow = self.launch.shadow(region)
            self.strong(warp, lanes[which], offsets, size, line, scope, shadow)

    def frees(self, warp: int, lane: int, line: int, region: Region) -> None:
        """A lane frees memory, which is a write of all that was accessed there."""
        shadow = self.launch.shadow(region)
        tables = [shadow.writes, shadow.reads, shadow.atomics, shadow.copies]
        used = [np.atleast_2d(table).any(axis=0) for table in tables if table is not None]
        offsets = np.flatnonzero(np.logical_or.reduce(used)) * shadow.granule
        if len(offsets):
            lanes = np.full(len(offsets), lane)
            for access, _ in self._accesses(
                "free", shadow, warp, lanes, offsets, shadow.granule, line, WEAK
            ):
                self._check_write(access, shadow, WEAK)
        self.launch.forget(region)

    def _report_conflict(
        self, warp: int, lanes: Lanes, offset: int, line: int, shadow: Shadow
    ) -> None:
        """Two lanes wrote different values to one place in one instruction."""
        row = self.launch.events.row(
            self.number, warp * LANES, int(self.times[warp]), line, WEAK, False, False, True
        )
        first, second = (row * LANES + int(lane) for lane in lanes)
        kind = "write without order after a write in the same warp"
        missing = "one lane that writes, or an atomic"
        places = np.array([offset // shadow.granule])
        self._report(kind, places, shadow, second, first, missing)

    def strong(
        self, warp: int, lanes: Lanes, offsets: Any, size: int, line: int, scope: int,
        shadow: Shadow | None = None, *, adds: bool = True,
    ) -> None:  # fmt: skip
        """Lanes write with an atomic, which ``adds``, or with a strong store."""
        shadow = shadow or self.shared
        if adds and self._in_core(ADD, warp, lanes, offsets, size, line, scope, shadow):
            shadow.overwritten(offsets, size)
            return
        verb = "write" if scope >= VOLATILE else "atomic"
        for access, _ in self._accesses(verb, shadow, warp, lanes, offsets, size, line, scope):
            self._check_write(access, shadow, scope)
            shadow.note_atomics(access.places, access.mine, self.launch.events, adds=adds)

    def _check_write(
        self, access: _Access, shadow: Shadow, scope: int, changed: Any = None
    ) -> None:
        places = access.places
        self._check(access, shadow, shadow.writes[places], "a write", scope, changed)
        if shadow.reads is not None:
            self._check(access, shadow, shadow.reads.take(places, axis=1), "a read", scope)
        if shadow.atomics is not None:
            slots = shadow.atomics.take(places, axis=1)
            self._check(access, shadow, slots, "an atomic", scope)
        if shadow.copies is not None:
            self._check(access, shadow, shadow.copies[places], "a read", WEAK)

    def _is_own(self, slots: Any, access: _Access) -> Any:
        """Which accesses were by the thread of another access."""
        events, rows, mine = self.launch.events, slots >> 5, access.mine >> 5
        same = (events.block[rows] == self.number) & (events.base[rows] == events.base[mine])
        return same & ((slots & 31) == (access.mine & 31)) & (slots != 0)

    # ------------------------------------------------------------------------- asynchronous copies

    def issue(
        self, warp: int, lanes: Lanes, key: Sequence[object], line: int, *, generic: bool = False,
        scope: int = WEAK,
    ) -> Copy:  # fmt: skip
        """Lanes start a copy; those with the same key (place, mbarrier) are one agent.

        A ``generic`` one has an agent for each lane.
        """
        name = (warp, *key)
        if name not in self._agents:
            self._agents[name] = self._width
            self._width += LANES if generic else 1
        agent = self._agents[name]
        clock = self._issued[agent] = self._issued.get(agent, 0) + 1
        clocks = self.released(warp, lanes)
        row = self.launch.events.row(self.number, agent, clock, line, scope, False, True, generic)
        return Copy(agent, clock, line, clocks, row)

    def _copied(
        self, copy: Copy, places: Any, lanes: Any, verb: str, shadow: Shadow
    ) -> _Access:  # fmt: skip
        mine = np.broadcast_to(np.asarray(copy.row * LANES + lanes, np.int32), places.shape)
        access = _Access(places, mine, copy.clocks, verb)
        self._check_begun(access, shadow)
        return access

    def _unfenced_write(self, access: _Access, shadow: Shadow) -> None:
        """Report writes of the generic proxy that the asynchronous proxy does not see."""
        if self.launch.as_gpus and not shadow.warps:
            return
        slots, events = shadow.writes[access.places], self.launch.events
        late = self._late(slots, access, shadow, fenced=True)
        if late is None:
            return
        unordered = self._late(slots, access, shadow)
        late &= events.generic[slots >> 5]
        if unordered is not None:
            late &= ~unordered
        if some(late):
            hit = np.flatnonzero(late)
            action = "read of a write" if access.verb == "read" else "write after a write"
            self._report(
                _UNFENCED.format(action), access.places[hit], shadow,
                int(access.mine[0]), int(slots[hit[0]]),
                "fence.proxy.async in the thread that wrote, before it hands over",
            )  # fmt: skip

    def _copy_in_core(self, copy: Copy, places: Any, shadow: Shadow, *, write: bool) -> bool:
        """Check an access in core.c, and remember it; false if Python has to look at it."""
        core = self.launch.core
        if core is None or not self._is_in_core(shadow):
            return False
        fenced = not self.launch.as_gpus or bool(shadow.warps)
        block = self._only_block(shadow)
        return core.watch_copy(
            shadow, copy.row * LANES, places, copy.clocks, block, write=write, fenced=fenced
        )

    def copy_reads(self, copy: Copy, places: Any, shadow: Shadow | None = None) -> None:
        """A copy reads granules of shared memory, or of the shadow's."""
        shadow = shadow or self.shared
        if self._copy_in_core(copy, places, shadow, write=False):
            return
        access = self._copied(copy, places, 0, "read", shadow)
        slots = shadow.writes[places]
        own = self.launch.events.base[slots >> 5] != copy.agent
        self._check(access, shadow, slots, "a write", WEAK, own)
        if shadow.warps and not slots.all():
            self._report(_UNWRITTEN, places[slots == 0], shadow, int(access.mine[0]), 0)
        if shadow.atomics is not None:
            self._check(access, shadow, shadow.atomics.take(places, axis=1), "an atomic", WEAK)
        self._unfenced_write(access, shadow)
        shadow.note_copy(places, int(access.mine[0]))

    def copy_writes(
        self, copy: Copy, places: Any, shadow: Shadow | None = None, changed: Any = None
    ) -> None:
        """A copy writes granules of shared memory, or of the shadow's; which of them it changes."""
        shadow = shadow or self.shared
        if self._copy_in_core(copy, places, shadow, write=True):
            return
        access = self._copied(copy, places, 0, "write", shadow)
        self._check_write(access, shadow, WEAK, changed)
        self._unfenced_write(access, shadow)
        shadow.writes[places] = access.mine

    def copy_global(
        self, copy: Copy, region: Region | None, offsets: Any, size: int, before: Any = None
    ) -> None:
        """A copy reads ``size`` bytes of global memory at each offset, or has written them.

        ``before``: what was there; a second write of the same bytes is no race.
        """
        write = before is not None
        if region is None or not (write or region.writable):
            return
        shadow, step = self.launch.shadow(region), np.arange(0, size, self.launch.granule)
        places = every = (offsets[:, None] + step).reshape(-1) // self.launch.granule
        if not (places[1:] > places[:-1]).all():
            places = np.unique(places)
        if not write:
            self.copy_reads(copy, places, shadow)
            return
        new = (region.data[offsets[:, None] + np.arange(size)] != before).any(1)
        changed = np.isin(places, every[np.repeat(new, len(step))])
        self.copy_writes(copy, places, shadow, changed)

    def copy_scatters(
        self, copy: Copy, lanes: Any, offsets: Any, size: int, shadow: Shadow | None = None,
        *, adds: bool = False,
    ) -> None:  # fmt: skip
        """A copy of the generic proxy writes ``size`` bytes of shared memory for each lane.

        ``adds``: with an atomic.
        """
        shadow = shadow or self.shared
        places = shadow.places(offsets, size)
        numbers = np.repeat(lanes, len(places) // max(len(offsets), 1))
        access = self._copied(copy, places, numbers, "atomic" if adds else "write", shadow)
        self._check_write(access, shadow, CLUSTER if adds else WEAK)
        if adds:
            shadow.note_atomics(places, access.mine, self.launch.events)
        else:
            shadow.writes[places] = access.mine

    def finish(self, copy: Copy, lane: int | None = None) -> VectorClocks:
        """The clocks of a thread that waited for the copy, or for a lane's part of it."""
        first, width = copy.agent, LANES if self.launch.events.generic[copy.row] else 1
        if lane is not None:
            first, width = first + lane, 1
        return self._with_own(copy.clocks, slice(first, first + width), copy.clock, (0, 0))

    def parts(self, copy: Copy, lanes: Any) -> VectorClocks:
        """The clocks of threads that waited for these lanes' parts of the copy."""
        if len(lanes) == LANES:
            return self.finish(copy)
        return joined(self.finish(copy, lane) for lane in lanes.tolist())

    def finished(self, warp: int, copy: Copy, lanes: Any) -> None:
        """Lanes waited for what each of them copied in the generic proxy."""
        for lane in lanes.tolist():
            self.acquire(warp, self.finish(copy, lane), np.array([lane]))

    def unwaited(self, copy: Copy) -> None:
        """The block ended, and no thread had waited for a copy from shared memory."""
        missing = "cp.async.bulk.wait_group.read in the thread that started it, before it exits"
        mine = copy.row * LANES
        self._report(UNWAITED, np.zeros(1, np.int64), self.shared, mine, 0, missing)

    def replaces_map(
        self, warp: int, line: int, copy: Copy, region: Region, address: int
    ) -> None:  # fmt: skip
        """A warp changes a tensor map of a store that no thread has waited for."""
        shadow, time = self.launch.shadow(region), int(self.times[warp])
        row = self.launch.events.row(self.number, warp * LANES, time, line, WEAK, True, False, True)
        place = np.array([(address - region.address) // shadow.granule])
        missing = "cp.async.bulk.wait_group.read 0 in the thread that started the store"
        self._report(_MAP_IN_USE, place, shadow, row * LANES, copy.row * LANES, missing)

    # ------------------------------------------------------------------------------------ mbarriers

    def initialised(self, warp: int, lane: int, address: int, line: int, *, changed: bool) -> None:
        """A lane initialised an mbarrier: a write, which changed it or not."""
        self._unfenced[address] = warp, line
        place, new = np.array([address - SHARED_BASE]), np.array([changed])
        self.write(warp, np.array([lane]), place, 8, line, new)

    def uses_mbarrier(
        self, warp: int, lanes: Any, addresses: Any, line: int, shadow: Shadow | None = None
    ) -> None:  # fmt: skip
        """Lanes arrive at mbarriers, or wait there."""
        offsets = np.asarray(addresses).astype(np.int64) - SHARED_BASE
        verb = "use of an mbarrier"
        self.read(warp, lanes, offsets, 8, line, CLUSTER, shadow, verb)

    def signals(self, copy: Copy, address: int, owner: Races) -> None:
        """Check that the asynchronous proxy sees the mbarrier on which a copy completes.

        PTX ISA, "membar / fence": ``fence.mbarrier_init``; or ``fence.proxy.async``.
        """
        if address in owner._unfenced:
            warp, line = owner._unfenced[address]
            kind = "asynchronous copy on an mbarrier without fence.mbarrier_init"
            place = np.array([(address - SHARED_BASE) // self.shared.granule])
            row = self.launch.events.row(
                owner.number, warp * LANES, 0, line, WEAK, True, False, True
            )
            missing = "fence.mbarrier_init in the thread that initialised it"
            self._report(kind, place, owner.shared, copy.row * LANES, row * LANES, missing)

    def arrives_at_cluster(self, warp: int, lanes: Any, *, release: bool) -> VectorClocks | None:
        """What lanes hand over at the cluster's barrier: all, or what their fences released."""
        if release:
            return self.released(warp, lanes)
        threads, tables = (warp * LANES + lanes).tolist(), (self._fences, self._init_fences)
        fences = [(one, table[one]) for table in tables for one in threads if one in table]
        parts = [self._before(fence, one) for one, fence in fences if fence.scope >= CLUSTER]
        return joined(parts) if parts else None

    # ------------------------------------------------------------------------------------- ordering

    def fence_initialised(self, warp: int, lanes: Lanes) -> None:
        """``fence.mbarrier_init``: copies see the mbarriers that the warp initialised.

        So do threads that meet these lanes at the cluster's barrier, even after a relaxed arrival.
        """
        self._unfenced = {a: origin for a, origin in self._unfenced.items() if origin[0] != warp}
        self._note_fences(self._init_fences, warp, lanes, CLUSTER)

    def fence_proxy(self, warp: int, lanes: Lanes, spaces: Sequence[int]) -> None:
        """``fence.proxy.async``: the asynchronous proxy sees what the lanes have seen.

        ``spaces``: 0 for shared memory, 1 for global memory.
        """
        chosen = _ALL if lanes is None else lanes
        if 0 in spaces:
            self.fence_initialised(warp, ())

        def fenced(old: VectorClocks) -> VectorClocks:
            own = {2 * block + n: one for block, one in old.seen.items() for n in spaces}
            return replace(old, fenced=_larger([old.fenced, own]), epoch=None)

        self._change(warp, chosen, fenced)
        for space in spaces:
            self._fenced[space, warp * LANES + chosen] = self.times[warp]
        self.times[warp] += 1

    def fence(self, warp: int, lanes: Lanes, scope: int, *, sc: bool = False) -> None:
        """``fence`` and ``membar``: strong reads before acquire, strong writes after release.

        ``sc``: it is also in order with other such fences.
        """
        chosen = _ALL if lanes is None else lanes
        for lane in chosen.tolist():
            for block, reach, clocks in self._pending.pop(warp * LANES + lane, ()):
                self._take(warp, lane, block, clocks, min(reach, scope))
        if sc:
            self._fence_sc(warp, chosen, scope)
        self._note_fences(self._fences, warp, chosen, scope)

    def _fence_sc(self, warp: int, lanes: Any, scope: int) -> None:
        """Lanes follow the fences that accesses showed to be earlier, and come before later ones.

        PTX ISA, "Fence-SC order": it relates every pair of morally strong ``fence.sc``, which
        synchronize in that order, and it does not contradict causality order.  Were the fence the
        earlier one, the accesses would contradict it.
        """
        launch, widest = self.launch, GRID - min(scope, GRID)
        launch.has_sc, launch.sc_reaches = True, max(launch.sc_reaches, 3 if widest else 1)
        reaches = self._sc_reach[widest : launch.sc_reaches]
        for clocks, which in list(self._parts(warp, lanes)):
            for reach in reaches:
                if reach in clocks.observed:
                    self.acquire(warp, clocks.observed[reach], lanes[which])

        def handed_over(old: VectorClocks) -> VectorClocks:
            known = dict.fromkeys(reaches, VectorClocks(old.seen, old.fenced))
            return replace(old, epoch=None, sc={**old.sc, **known})

        self._change(warp, lanes, handed_over)
        self._sc[widest : launch.sc_reaches, warp * LANES + lanes] = self.times[warp]

    def _meets_fences(
        self, warp: int, lane: int, key: object, scope: int, *, write: bool
    ) -> None:  # fmt: skip
        """A strong access of a place is after the fences before earlier accesses of it.

        A write is after all earlier accesses, a read after the latest write and all before that.
        """
        if not self.launch.has_sc:
            return
        fences, place = self._sc_before(warp, lane), self.launch.place_fences.get(key)
        if place is None:
            if not fences:
                return
            place = self.launch.place_fences[key] = _PlaceFences()
        earlier = [place.written, place.read] if write else [place.written]
        for (block, reach), known in (row for table in earlier for row in table.items()):
            if self._reaches(block, min(reach, scope)):
                self._observe_fences(warp, lane, known)
        who = (0, GRID) if scope >= GRID else (self.number, scope)
        place.add(who, fences, write=write)

    def _sc_before(self, warp: int, lane: int) -> Mapping[_Reach, VectorClocks]:
        """What the ``fence.sc`` before a lane's next access hand over, by their reach."""
        thread, sc = warp * LANES + lane, self._each(warp)[lane].sc
        time = int(self._sc[:, thread].max())
        cached = self._sc_cache.get(thread)
        if cached is None or cached[0] is not sc or cached[1] != time:
            cached = self._sc_cache[thread] = sc, time, self._with_own_fences(sc, thread)
        return cached[2]

    def _observe_fences(
        self, warp: int, lane: int, known: Mapping[_Reach, VectorClocks]
    ) -> None:  # fmt: skip
        each = self._each(warp)
        old, observed = each[lane], dict(each[lane].observed)
        _add_fences(observed, known)
        if any(observed[reach] is not old.observed.get(reach) for reach in known):
            each = list(each)
            each[lane] = replace(old, epoch=None, observed=observed)
            self.knows[warp] = each

    def _note_fences(self, table: dict[int, _Fence], warp: int, lanes: Lanes, scope: int) -> None:
        """Remember what lanes know at a fence."""
        each, time, first = self._each(warp), int(self.times[warp]), warp * LANES
        fenced = self._fenced[:, first : first + LANES].copy()
        for lane in map(int, lanes):
            table[first + lane] = _Fence(each[lane], time, fenced[:, lane], scope)
        self.times[warp] += 1

    def _before(self, fence: _Fence, thread: int) -> VectorClocks:
        """What a thread had seen and done before its fence."""
        if fence.clocks is None:
            fence.clocks = self._with_own(fence.known, thread, fence.time, fence.fenced)
        return fence.clocks

    def _reaches(self, block: int, scope: int) -> bool:
        """Whether a scope of a block's threads and of these includes both."""
        cluster = self.launch.cluster
        near = scope >= CLUSTER and block // cluster == self.number // cluster
        return block == self.number or scope >= GRID or near

    def _take(self, warp: int, lane: int, block: int, clocks: VectorClocks, scope: int) -> None:
        """A lane acquires what a block released, if the scope reaches."""
        if self._reaches(block, scope):
            self.acquire(warp, clocks, np.array([lane]))
        else:
            self.launch.narrow.add((block, self.number))

    def load_strong(self, warp: int, lane: int, key: object, scope: int, *, acquire: bool) -> None:
        """A strong read of a place: it acquires, or a later fence does."""
        self._meets_fences(warp, lane, key, scope, write=False)
        released = self.launch.released.get(key)
        for (block, reach), clocks in released.by.items() if released else ():
            if acquire or (self.launch.as_gpus and isinstance(key, int)):
                self._take(warp, lane, block, clocks, min(reach, scope))
            elif self._reaches(block, scope):
                waiting = self._pending.setdefault(warp * LANES + lane, [])
                if not any(one is clocks for _, _, one in waiting):
                    waiting.append((block, min(reach, scope), clocks))
            else:
                self.launch.narrow.add((block, self.number))

    def store_strong(
        self, warp: int, lane: int, key: object, scope: int, *, release: bool, adds: bool
    ) -> None:
        """A strong write of a place: it releases, or passes on what the last fence did.

        ``adds``: an atomic, which goes on with what earlier writes released.
        """
        self._meets_fences(warp, lane, key, scope, write=True)
        table, clocks = self.launch.released, None
        if not adds:
            table.pop(key, None)
        if release:
            clocks = self.released(warp, np.array([lane]))
        elif fence := self._fences.get(warp * LANES + lane):
            clocks, scope = self._before(fence, warp * LANES + lane), min(scope, fence.scope)
        if clocks is not None:
            by = table.setdefault(key, _Released()).by
            name = self.number, min(scope, GRID)
            by[name] = joined((by[name], clocks)) if name in by else clocks
