"""A decoded kernel in basic blocks, by the instructions that are supported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.accesses import ASYNC, MEMORY, YIELDING
from builder.ptx.block import Layout
from builder.ptx.decoder import Decoder, guarded
from builder.ptx.machine import LANES, SPECIAL
from builder.ptx.registers import CONVERT, DATA, FLOAT, INTEGER
from builder.ptx.warps import MATRIX, WARP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from builder.ptx.decoder import Emitter, Step
    from builder.ptx.source import Instruction, Kernel


def _number(d: Decoder, i: Instruction) -> Step:
    """Select between integer and floating-point instructions of the same name by their type."""
    table = FLOAT if i.modifiers and i.modifiers[-1].startswith(("f", "bf")) else INTEGER
    if i.opcode not in table:
        raise d.unknown(i)
    return table[i.opcode](d, i)


EMITTERS: dict[str, Emitter] = {
    **dict.fromkeys((*INTEGER, *FLOAT), _number),
    **CONVERT,
    **DATA,
    **MEMORY,
    **MATRIX,
    **WARP,
    **ASYNC,
}

#: Opcodes after which a warp may have jumped or yielded.
_ENDS = {"bra", "ret", "exit", "bar", "barrier", "nanosleep", "atom", "red"}
#: Opcodes at which diverged lanes converge; ``mma`` and matrix moves need converged lanes.
_GATHERS = {"bar", "barrier", "shfl", "vote", "elect", "redux"}


def ends_block(i: Instruction) -> bool:
    """Whether a warp may stop after an instruction."""
    waits = {"try_wait", "test_wait", "wait_group"} & set(i.modifiers)
    return (
        i.opcode in _ENDS or bool(waits) or (i.opcode == "ld" and bool(YIELDING & set(i.modifiers)))
    )


def begins_block(i: Instruction) -> bool:
    """Whether a warp may have to execute an instruction again, or some of its lanes wait there."""
    return "wait_group" in i.modifiers or gathers(i)


def gathers(i: Instruction) -> bool:
    """Whether lanes wait there for the others of their warp.

    This is the meaning of ``.sync``; with ``.aligned`` all threads of a warp run the same barrier.
    """
    return i.opcode in _GATHERS and ("sync" in i.modifiers or i.opcode in ("bar", "barrier"))


@dataclass
class BasicBlock:
    """Instructions that run in sequence; only the last one may jump."""

    start: int
    end: int
    steps: list[Step]
    lines: list[int]
    #: lanes wait at the first instruction for diverged ones
    gathers: bool = False


class Program:
    """A decoded kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.decoder = decoder = Decoder(kernel)
        steps = []
        leaders = {0, *kernel.labels}
        for place, one in enumerate(kernel.code):
            emitter = EMITTERS.get(one.opcode)
            if emitter is None:
                raise decoder.unknown(one)
            try:
                steps.append(guarded(decoder, one, emitter(decoder, one), place))
            except (LookupError, ValueError, TypeError, AttributeError, AssertionError):
                raise decoder.unknown(one, "its operands are not understood") from None
            if begins_block(one):
                leaders.add(place)
            if ends_block(one):
                leaders.add(place + 1)
        self.blocks = dict(self._blocks(sorted(leaders), steps))

    def _blocks(self, leaders: list[int], steps: list[Step]) -> Iterable[tuple[int, BasicBlock]]:
        count = len(steps)
        for start, end in zip(leaders, [*leaders[1:], count], strict=True):
            if start < count:
                lines = [one.line for one in self.kernel.code[start:end]]
                first = gathers(self.kernel.code[start])
                yield start, BasicBlock(start, end, steps[start:end], lines, first)

    @cached_property
    def layout(self) -> Layout:
        """The registers and memory that the code needs."""
        decoder = self.decoder
        return Layout(
            counts=decoder.counts,
            constants=self._constants(),
            special={name: decoder.slots[name].index for name in SPECIAL},
            shared_bytes=decoder.shared_bytes,
            local_bytes=decoder.local_bytes,
            granule=min(decoder.shared_sizes),
            global_granule=min(decoder.global_sizes),
        )

    def _constants(self) -> dict[int, NDArray[Any]]:
        """The constants by width: one row of equal lanes for each."""
        kinds = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
        found = {}
        for width, kind in kinds.items():
            values: NDArray[Any] = np.array(list(self.decoder.constants[width]), dtype=kind)
            found[width] = np.repeat(values[:, None], LANES, axis=1)
        return found
