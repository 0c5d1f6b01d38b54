"""Runs a launch: all blocks, warp by warp, in the order of a schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from builder.ptx.block import Block, Launch, LaunchState
from builder.ptx.decoder import PRED, U16, U32, U64
from builder.ptx.machine import ALL_LANES, EXIT, LANES, Deadlock, Fault
from builder.ptx.races import LaunchRaces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.ptx.block import Warp
    from builder.ptx.memory import GlobalMemory
    from builder.ptx.program import Program
    from builder.ptx.races import Race

Order = Literal["eager", "lazy", "random"]

#: The most basic blocks of a warp in one turn: more is an endless loop.
_ENDLESS = 2_000_000
#: The same for all warps together, as a factor, if turns are random and nothing happens.
_ALL_WARPS = 8
#: A turn of this many basic blocks is more than a check of what the warp waits for.
_MORE = 8
#: Turns of every warp without progress after which the grid counts as deadlocked.
_PATIENCE = 64
#: The same if registers still change: a loop that counts, but waits for nobody.  Our choice.
_ROUNDS = 2048


@dataclass(frozen=True)
class Schedule:
    """When copies happen, and which warp goes first.

    ``eager``: copies happen when they are issued.  ``lazy``: as late as possible, and stores only
    when a thread waits for them or the block ends.  ``random``: at any time, and warps take turns
    of random length in random order; ``seed`` repeats it.
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
            memory,
            program.kernel.places,
            eager=self.schedule.order == "eager",
            races=LaunchRaces(program.layout.global_granule) if watch else None,
        )
        #: the most basic blocks that ran since the last event, in turns of random length
        self._quiet = 0
        self.outcome = Outcome()
        self._taken: Counter[int] = Counter()
        #: registers and positions of all warps in the rounds since the last event
        self._states: set[int] = set()
        x, y, z = launch.grid
        places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self.blocks = [Block(self._state, place) for place in places]

    def _late(self, block: Block) -> bool:
        """No warp can continue: perform the first copy that one may be waiting for."""
        wanted = [o for o in block.queue if o.kind == "load" or o.awaited]
        if wanted:
            block.perform(wanted[0])
        return bool(wanted)

    # -------------------------------------------------------------------------------------- running

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            Fault: a thread did something invalid.
            Deadlock: no thread can continue.
        """
        with np.errstate(all="ignore"):  # what PTX makes of overflow and NaN is no error
            self._run()
        self.outcome.races = self.races()
        self.outcome.covered = set(self._taken)
        blocks = self.program.blocks
        self.outcome.instructions = sum(
            count * len(blocks[start].steps) for start, count in self._taken.items()
        )
        return self.outcome

    def _run(self) -> None:
        live, idle = list(self.blocks), 0
        by_chance = self.schedule.order == "random"
        while live:
            before, busy = self._state.events, False
            for number in self.random.permutation(len(live)) if by_chance else range(len(live)):
                busy |= self._turn(live[number])
            live = [block for block in live if not self._ended(block)]
            if self._state.events != before:
                self._quiet = 0
            if self._state.events != before or busy:
                idle = 0
                self._states.clear()
                continue
            idle += 1
            if any(self._late(block) for block in live):
                idle = 0
            elif idle > (_PATIENCE if by_chance else 3) and not self._computes(live, idle):
                raise Deadlock("; ".join(block.describe() for block in live))

    def _computes(self, live: list[Block], idle: int) -> bool:
        """Whether registers are not as in an earlier round: a loop may end without an event."""
        warps = [w for block in live for w in block.warps if not w.done and not w.blocked]
        pcs = [b"" if w.pcs is None else w.pcs.tobytes() for w in warps]
        held = [w.files[view].tobytes() for w in warps for view in (U16, U32, U64, PRED)]
        state = hash((*pcs, *(w.pc for w in warps), *held))
        new = state not in self._states
        self._states.add(state)
        return new and idle < _ROUNDS

    def races(self) -> list[Race]:
        """The races found so far, even if the run did not end."""
        return self._state.races.found if self._state.races else []

    def _ended(self, block: Block) -> bool:
        if not all(warp.done for warp in block.warps):
            return False
        self.outcome.unawaited += len(block.queue)
        block.end()
        for operation in list(block.queue):
            block.perform(operation)
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
                went_on = self._advance(warp, limit)
                self._quiet += limit if went_on and by_chance else 0
                if (went_on and not by_chance) or self._quiet > _ENDLESS * _ALL_WARPS:
                    raise Fault("a loop that does not end", warp.line, block.name)
                busy |= went_on and limit >= _MORE
            if by_chance and block.queue and self.random.random() < 0.3:
                block.perform(block.queue[int(self.random.integers(len(block.queue)))])
        return busy

    def _advance(self, warp: Warp, limit: int) -> bool:
        """Run a warp for up to ``limit`` basic blocks; return whether it reached the limit."""
        blocks, taken = self.program.blocks, self._taken
        warp.yielded = False
        for _ in range(limit):
            mask = True
            if warp.pcs is not None:
                warp.pc = self._apart(warp.pcs)
                lanes = warp.pcs == warp.pc
                if lanes.tobytes() == ALL_LANES:
                    warp.pcs = None
                else:
                    mask = lanes
            if warp.pc >= EXIT or warp.pc not in blocks:
                warp.done = True
                self._state.events += 1
                return False
            block = blocks[warp.pc]
            taken[warp.pc] += 1
            target, done = None, 0
            try:
                for step in block.steps:
                    target = step(warp, mask)
                    done += 1
            except Fault as fault:
                fault.line = fault.line or block.lines[done]
                fault.where = fault.where or f"{warp.block.name}, warp {warp.number}"
                raise
            warp.line = block.lines[-1]
            self._go(warp, mask, block.end if target is None else target)
            if warp.yielded:
                return False
        return True

    def _apart(self, pcs: NDArray[np.int64]) -> int:
        """The position to continue of diverged lanes: the first at which no lane has to wait."""
        held = sorted({*pcs.tolist()})
        places = [place for place in held if place < EXIT]
        if len(places) < 2:
            return int(held[0])
        blocks = self.program.blocks
        free = (place for place in places if place not in blocks or not blocks[place].gathers)
        return int(next(free, held[0]))

    @staticmethod
    def _go(warp: Warp, mask: object, target: object) -> None:
        if mask is True and isinstance(target, int):
            warp.pc = target
        elif mask is True:
            warp.pcs = np.asarray(target, np.int64).copy()
        else:
            assert warp.pcs is not None
            warp.pcs = np.where(np.asarray(mask), np.broadcast_to(target, LANES), warp.pcs)  # type: ignore[call-overload]
