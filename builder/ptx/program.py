"""A decoded kernel in basic blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import LANES, SPECIAL
from builder.ptx.decoder import Decoder, guarded
from builder.ptx.instructions import EMITTERS, begins_block, ends_block, gathers
from builder.ptx.launch import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from builder.ptx.decoder import Step
    from builder.ptx.source import Kernel


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
        )

    def _constants(self) -> dict[int, NDArray[Any]]:
        """The constants by width: one row of equal lanes for each."""
        kinds = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
        found = {}
        for width, kind in kinds.items():
            values: NDArray[Any] = np.array(list(self.decoder.constants[width]), dtype=kind)
            found[width] = np.repeat(values[:, None], LANES, axis=1)
        return found
