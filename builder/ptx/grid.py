"""Runs a launch: all blocks, warp by warp, in the order of a schedule."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from builder.ptx.block import MOST_MEMORY, Cluster, Launch, LaunchState
from builder.ptx.decoder import MOST_SHARED, PRED, U16, U32, U64
from builder.ptx.machine import (
    ALL_LANES,
    COOPERATIVE,
    COOPERATIVE_BYTES,
    EXIT,
    LANES,
    NOT_UNDERSTOOD,
    Deadlock,
    Fault,
    PtxError,
    not_understood,
    some,
)
from builder.ptx.memory import GlobalMemory, Region
from builder.ptx.native import CHOOSE, DECLINED, LaunchCore, WarpCore, core
from builder.ptx.program import BasicBlock
from builder.ptx.races import LaunchRaces
from builder.ptx.warps import Apart, ready

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from builder.ptx.block import Block, Layout, Warp
    from builder.ptx.decoder import Target
    from builder.ptx.program import Program
    from builder.ptx.races import Race

Order = Literal["eager", "lazy", "random"]

#: The most basic blocks of a warp in one turn: more is an endless loop.
_ENDLESS = 2_000_000
#: The same for all warps together, as a factor, if turns are random and nothing happens.
_ALL_WARPS = 8
#: How much longer turns of random length become when nothing has happened for long.
_LONGER = 64
#: Blocks that are there at once; more if these wait for others.  Our choice: 64 MB.
_RESIDENT = 256
#: A turn of this many basic blocks is more than a check of what the warp waits for.
_MORE = 8
#: Turns of every warp without progress after which the grid counts as deadlocked.
_PATIENCE = 64
#: The same if registers still change: a loop that counts, but waits for nobody.  Our choice.
_ROUNDS = 2048
#: Jumps back of a lane that waits for others, after which the lanes elsewhere go first: more than
#: lanes that take turns need.  As in core.c.
_SPINS = 64


@dataclass(frozen=True)
class Schedule:
    """When copies happen, and which warp goes first.

    ``eager``: copies happen when they are issued.  ``lazy``: as late as possible, and stores only
    when a thread waits for them or the block ends; the last block goes first, which shows who does
    not wait for the first.  ``random``: at any time, and warps take turns of random length in
    random order; ``seed`` repeats it.
    """

    order: Order = "eager"
    seed: int = 0

    def __str__(self) -> str:
        """The schedule's name."""
        return f"random {self.seed}" if self.order == "random" else self.order


@dataclass
class Outcome:
    """The outcome of a run, besides its output."""

    instructions: int = 0
    #: basic blocks that ran, by their first instruction
    covered: set[int] = field(default_factory=set)
    races: list[Race] = field(default_factory=list)
    #: copies that no thread had waited for when their block ended
    unawaited: int = 0
    #: what ``printf`` wrote
    printed: list[str] = field(default_factory=list)


def _own_regions(layout: Layout) -> Iterable[Region]:
    """The variables of the kernel's module, with their first values."""
    for address, contents, one in layout.data:
        data = np.frombuffer(contents, np.uint8).copy()
        yield Region(address, data, one.writable, one.name)


def _cooperates(layout: Layout) -> bool:
    """Whether the kernel asks for the barrier of a cooperative launch, as ``this_grid()`` does."""
    return not {"%envreg1", "%envreg2"}.isdisjoint(layout.special)


def _drivers_regions(layout: Layout) -> Iterable[Region]:
    """What the driver has for a cooperative launch."""
    if _cooperates(layout):
        data = np.array([COOPERATIVE_BYTES, 0], np.uint32).view(np.uint8)
        yield Region(COOPERATIVE, data, True, "the grid's barrier")


def _block_bytes(layout: Layout, launch: Launch) -> int:
    """What a block needs.

    Raises:
        PtxError: not even those of one cluster do.
    """
    cluster, each = math.prod(launch.cluster), layout.block_bytes(launch)
    most_shared = layout.shared_bytes + launch.shared
    if most_shared > MOST_SHARED:
        raise PtxError(
            f"a block with {most_shared} bytes of shared memory; {MOST_SHARED} are the most"
        )
    if each * cluster > MOST_MEMORY:
        raise PtxError(
            f"a block needs {each} bytes for its registers and its local and shared memory, of "
            f"which {MOST_MEMORY} are the most"
        )
    return each


class Grid:
    """One launch of a program."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        schedule: Schedule | None = None,
        *,
        watch: bool = False,
        as_gpus: bool = False,
        fast: bool = True,
        strict: bool = False,
    ) -> None:
        if len(launch.parameters) != program.kernel.parameter_bytes:
            raise Fault(
                f"{len(launch.parameters)} bytes of parameters for a kernel that takes "
                f"{program.kernel.parameter_bytes}"
            )
        self.program = program
        self.schedule = schedule or Schedule()
        self.random = np.random.default_rng(self.schedule.seed)
        self._state = LaunchState(
            launch,
            program.layout,
            GlobalMemory(
                [
                    *memory.regions,
                    *_own_regions(program.layout),
                    *_drivers_regions(program.layout),
                ]
            ),
            program.kernel.places,
            eager=self.schedule.order == "eager",
            races=LaunchRaces(
                program.layout.global_granule, math.prod(launch.cluster), as_gpus, strict
            )
            if watch
            else None,
            waiting=deque(),
        )
        #: the most basic blocks that ran since the last event, in turns of random length
        self._quiet = 0
        #: how many blocks fit in memory, and how many may be there at once: few, if they are large
        #: or the kernel cancels the launch of others
        each = _block_bytes(program.layout, launch)
        tables = program.layout.table_bytes(launch) if watch else 0
        self._most = max(MOST_MEMORY // (each + tables), 1)
        self._room = min(_RESIDENT, max(MOST_MEMORY // 2 // each, 1), self._most)
        if any(one.opcode == "clusterlaunchcontrol" for one in program.kernel.code):
            more = int(self.random.integers(math.prod(launch.grid)))
            self._room = min(self._most, 1 + more) if self.schedule.seed > 0 else 1
        if _cooperates(program.layout):
            self._room = math.prod(launch.grid)
            if self._room > self._most:
                raise PtxError(
                    f"blocks that meet at a barrier of the grid are all there at once: "
                    f"{self._room} blocks, and {self._most} fit here"
                )
        self.outcome = Outcome()
        #: by the first instruction of a basic block: how often it ran, and where it ends
        self._executions = np.zeros(len(program.steps) + 1, np.int64)
        self._ends = np.zeros(len(program.steps) + 1, np.int64)
        #: whether lanes wait there for others
        self._gathers = np.zeros(len(program.steps) + 1, np.uint8)
        #: registers and positions of all warps in the rounds since the last event
        self._states: set[int] = set()
        #: parts of basic blocks, at whose start lanes have waited
        self._added: set[int] = set()
        self._blocks = dict(program.blocks)
        for start, one in program.blocks.items():
            self._ends[start], self._gathers[start] = one.end, one.gathers
        self._core = (
            LaunchCore(program.table, self._state, self._ends, self._gathers, self._executions)
            if fast and not strict and core()
            else None
        )

    def _late(self, block: Block) -> bool:
        """No warp can continue: perform the first copy that one may be waiting for."""
        copies = [o for o in block.queue if o.kind == "load" or o.awaited]
        if copies:
            block.perform(copies[0])
        return bool(copies)

    # -------------------------------------------------------------------------------------- running

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            Fault: a thread did something invalid.
            Deadlock: no thread can continue.
        """
        try:
            with np.errstate(all="ignore"):  # what PTX makes of overflow and NaN is no error
                self._run()
        finally:
            self._count()
        self.outcome.races, self.outcome.printed = self.races(), self._state.printed
        return self.outcome

    def _count(self) -> None:
        """What ran, also before a fault."""
        starts = np.flatnonzero(self._executions)
        self.outcome.covered = {*starts.tolist()} - self._added
        self.outcome.instructions = int(
            (self._executions[starts] * (self._ends[starts] - starts)).sum()
        )

    def _fill(self, live: dict[int, Block]) -> None:
        """Make clusters while there is room, and give each its first turn; some then have ended."""
        while self._state.waiting and len(live) < self._room:
            cluster = Cluster(self._state, self._state.waiting.popleft())
            blocks = [*cluster.blocks]
            for block in blocks:
                self._turn(block)
            live |= {
                block.linear: block for block in blocks if block.queue or not self._ended(block)
            }

    def _run(self) -> None:
        by_chance, idle = self.schedule.order == "random", 0
        waiting, launch = self._state.waiting, self._state.launch
        count = math.prod(launch.grid) // math.prod(launch.cluster)
        order = range(count)[::-1] if self.schedule.order == "lazy" else range(count)
        waiting.extend(self.random.permutation(count).tolist() if by_chance else order)
        by_number: dict[int, Block] = {}
        self._fill(by_number)
        while by_number:
            latest_first = self.schedule.order == "lazy"
            live = [by_number[number] for number in sorted(by_number, reverse=latest_first)]
            before, busy = self._state.events, False
            for number in self.random.permutation(len(live)) if by_chance else range(len(live)):
                busy |= self._turn(live[number])
            by_number = {block.linear: block for block in live if not self._ended(block)}
            live = [*by_number.values()]
            self._fill(by_number)
            if self._state.events != before:
                self._quiet = 0
            if self._state.events != before or busy:
                idle = 0
                self._states.clear()
                continue
            idle += 1
            if any(self._late(block) for block in live):
                idle = 0
            elif idle > (_PATIENCE if by_chance else 3) and not self._patient(live, idle):
                if not waiting:
                    raise Deadlock("; ".join(block.describe() for block in live))
                if self._room == self._most:
                    raise Fault(f"blocks wait for others, and no more than {self._room} fit here")
                # these may wait for a block that is not there yet
                self._room = min(self._room + _RESIDENT, self._most)
                self._fill(by_number)
                idle = 0

    def _patient(self, live: list[Block], idle: int) -> bool:
        """Whether blocks that wait may yet go on by themselves."""
        apart = [w for block in live for w in block.warps if w.pcs is not None]
        if apart and idle < _PATIENCE + 2 * LANES:
            for warp in apart:  # let those go first that did not run last
                warp.spins[warp.latest_lanes] += _SPINS
            return True
        return self._computes(live, idle)

    def _computes(self, live: list[Block], idle: int) -> bool:
        """Whether registers are not as in an earlier round: a loop may end without an event."""
        warps = [w for block in live for w in block.warps if not w.done and not w.blocked]
        pcs = [b"" if w.pcs is None else w.pcs.tobytes() for w in warps]
        registers = [w.files[view].tobytes() for w in warps for view in (U16, U32, U64, PRED)]
        state = hash((*pcs, *(w.pc for w in warps), *registers))
        new = state not in self._states
        self._states.add(state)
        return new and idle < _ROUNDS

    def races(self) -> list[Race]:
        """The races found so far, even if the run did not end."""
        return self._state.races.races if self._state.races else []

    def _ended(self, block: Block) -> bool:
        if not all(warp.done for warp in block.warps):
            return False
        self.outcome.unawaited += len(block.queue)
        block.end()
        block.cluster.close()
        return True

    def _turn(self, block: Block) -> bool:
        """Give each warp of a block a turn; return whether one of them could continue."""
        warps = [w for w in block.warps if not w.done]
        by_chance = self.schedule.order == "random"
        if by_chance:
            warps = [warps[n] for n in self.random.permutation(len(warps))]
        busy = False
        for warp in warps:
            if not warp.blocked and not warp.done:
                limit = int(self.random.integers(1, 40)) if by_chance else _ENDLESS
                limit *= _LONGER if by_chance and self._quiet > _ENDLESS // 8 else 1
                went_on = not warp.asleep and self._advance(warp, limit)
                self._quiet += limit if went_on and by_chance else 0
                if (went_on and not by_chance) or self._quiet > _ENDLESS * _ALL_WARPS:
                    raise Fault("a loop that does not end", warp.line, block.name)
                busy |= went_on and limit >= _MORE
            if by_chance and block.queue and self.random.random() < 0.3:
                block.perform(block.queue[int(self.random.integers(len(block.queue)))])
        return busy

    def _advance(self, warp: Warp, limit: int) -> bool:
        """Run a warp for up to ``limit`` basic blocks; return whether it reached the limit."""
        warp.yielded, warp.awaited = False, None
        while limit:
            mask: Any = True
            if warp.pcs is not None:
                mask = self._choose(warp, warp.pcs)
                if mask is None:
                    return False
                if mask.tobytes() == ALL_LANES:
                    warp.pcs, mask = None, True
                    warp.spins[...] = 0
                else:
                    warp.latest_lanes = mask
            if warp.pc >= EXIT or not self._ends[warp.pc]:
                warp.done = True
                self._state.events += 1
                warp.block.ended()
                return False
            if self._core:
                limit = self._run_core(warp, mask, limit)
            else:
                self._executions[warp.pc] += 1
                target = self._steps(warp, mask, range(warp.pc, int(self._ends[warp.pc])))
                self._finish(warp, mask, target)
                limit -= 1
            if warp.yielded:
                warp.waited = True
                if warp.pc - 1 not in self.program.spins:
                    warp.awaited = None
                return False
        return True

    def _steps(self, warp: Warp, mask: Any, places: range) -> Target:
        """Run some instructions of a basic block; return where the last one jumps to.

        Lanes that miss others of their warp at an instruction wait there, and the result is None.
        """
        place, target = places.start, None
        try:
            for place in places:
                target = self.program.steps[place](warp, mask)
        except Apart:
            self._wait_apart(warp, mask, place)
            return None
        except Fault as fault:
            fault.line = fault.line or self.program.kernel.code[place].line
            fault.where = fault.where or f"{warp.block.name}, warp {warp.number}"
            raise
        except NOT_UNDERSTOOD as error:
            one = self.program.kernel.code[place]
            raise not_understood(one.name, error, one.line) from error
        warp.line = self.program.kernel.code[place].line
        return places.stop if target is None else target

    def _run_core(self, warp: Warp, mask: Any, limit: int) -> int:
        """Run basic blocks in the core, and what it declines here, until that jumps or yields."""
        assert self._core is not None
        core = warp.core = warp.core or WarpCore(self._core, warp)
        state = core.struct
        state.pc, state.at, state.limit, state.last = warp.pc, -1, limit, -1
        patient = mask is True or not some(warp.spins >= _SPINS)
        state.bound, state.parts = self._bound(warp, mask) if patient else -1, patient
        while (reason := core.run(mask)) == DECLINED:
            if state.changed:
                mask = core.lanes()
            if mask is not True and warp.pc != state.pc and warp.pcs is not None:
                warp.pcs[mask] = state.pc
            warp.pc, place, end = state.pc, state.at, int(self._ends[state.pc])
            target = self._steps(warp, mask, range(place, place + 1))
            if target is None or place + 1 == end:
                self._finish(warp, mask, target)
                return int(state.limit)
            state.at = place + 1
        if state.changed:
            mask = core.lanes()
        if state.last >= 0:
            warp.line = self.program.kernel.code[state.last].line
        if not state.parts:
            self._finish(warp, mask, state.pc)
        elif reason != CHOOSE:
            warp.pc = state.pc
            if mask is not True:
                assert warp.pcs is not None
                warp.pcs[mask] = state.pc
        return int(state.limit)

    @staticmethod
    def _bound(warp: Warp, mask: Any) -> int:
        """The position before which lanes go on alone: of others, who go first or meet them."""
        if mask is True or warp.pcs is None:
            return -1
        others = warp.pcs[~mask & ~warp.at_barrier]
        return int(others.min()) if len(others) else EXIT

    def _wait_apart(self, warp: Warp, mask: Any, place: int) -> None:
        """Lanes that ran a part of a block wait there for the others of their warp."""
        if place != warp.pc:
            self._added.add(place)
        end = int(self._ends[warp.pc])
        self._ends[place], self._gathers[place] = end, True
        self._blocks[place] = BasicBlock(place, end, gathers=True)
        assert warp.pcs is not None
        warp.pcs[mask] = place

    def _choose(self, warp: Warp, pcs: NDArray[np.int64]) -> Any:
        """The lanes of a diverged warp that continue next; None if all wait.

        The first position goes first, so that lanes meet again; lanes that jumped back often, as
        they wait for others, come later.  Lanes wait where an instruction is one of several lanes.
        """
        blocks, warp.alone = self._blocks, False
        free = (pcs < EXIT) & ~warp.at_barrier
        places = {*pcs[free].tolist()}
        if not places:
            if warp.at_barrier.any():
                warp.yielded = True
                return None
            warp.pc = EXIT
            return pcs >= EXIT
        order = sorted(places)
        if len(order) > 1 and some(warp.spins >= _SPINS):
            turns = warp.spins // _SPINS
            order.sort(key=lambda place: (int(turns[free & (pcs == place)].min()), place))
        for place in order:
            here = free & (pcs == place)
            block = blocks.get(place)
            if block is not None and block.gathers:
                row = warp.views[U32][block.members] if block.members >= 0 else None
                here = ready(warp, here, row)
                if not some(here):
                    continue
            warp.pc = place
            return here
        if some(warp.at_barrier):  # a barrier of the block may free the lanes that these wait for
            warp.yielded = True
            return None
        warp.pc, warp.alone = order[0], True
        return free & (pcs == order[0])

    @staticmethod
    def _finish(warp: Warp, mask: Any, target: Any) -> None:
        """Lanes go on elsewhere, or wait where they are."""
        if target is None:
            return
        if mask is True and isinstance(target, int):
            warp.pc = target
            if warp.yielded and some(warp.at_barrier) and not warp.at_barrier.all():
                warp.pcs = np.full(LANES, target, np.int64)  # a guard let some lanes wait
            return
        if mask is True:
            warp.pcs = np.asarray(target, np.int64).copy()
        else:
            assert warp.pcs is not None
            after = np.where(mask, target, warp.pcs)
            back = mask & (after <= warp.pc)
            if warp.waited and some(back):
                warp.spins += back
                warp.waited = False
            warp.pcs = after
        if warp.block.named_barriers and some(warp.pcs >= EXIT):
            warp.block.ended()
