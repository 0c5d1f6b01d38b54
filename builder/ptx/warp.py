"""A warp: the registers of 32 lanes, and the position of each lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import EXIT, LANES, SPECIAL
from builder.ptx.memory import POISON

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from builder.ptx.block import Block
    from builder.ptx.program import Program

_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
#: What registers hold before they are written.
_UNSET = {1: 0, 16: 0xBEEF, 32: 0xDEADBEEF, 64: 0xDEADBEEFDEADBEEF}
_AS = {
    16: (np.uint16, np.int16),
    32: (np.uint32, np.int32, np.float32),
    64: (np.uint64, np.int64, np.float64),
    1: (np.bool_,),
}


class Views(dict[int, list["NDArray[Any]"]]):
    """Rows of registers and constants by type, made when an instruction of that type runs."""

    def __init__(self, files: list[NDArray[Any]], counts: Mapping[int, int]) -> None:
        self._files, self._counts = files, counts

    def __missing__(self, view: int) -> list[NDArray[Any]]:
        file = self._files[view]
        bits = 1 if file.dtype == np.bool_ else file.itemsize * 8
        count = self._counts[bits]
        fixed = file[count:]
        fixed.flags.writeable = False
        rows = self[view] = [*file[:count], *fixed]
        return rows


class Warp:
    """32 lanes of a block."""

    def __init__(self, program: Program, block: Block, number: int) -> None:
        self.number = number
        self.block = block
        #: registers and constants as each type: all in one array, and row by row
        self.files: list[NDArray[Any]] = []
        for width in (16, 32, 64, 1):
            constants = program.constants[width]
            count = program.decoder.counts[width]
            file: NDArray[Any] = np.empty((count + len(constants), LANES), _DTYPES[width])
            file[:count], file[count:] = _UNSET[width], constants
            self.files += [file.view(kind) for kind in _AS[width]]
        self.views = Views(self.files, program.decoder.counts)
        threads: NDArray[np.int64] = number * LANES + np.arange(LANES, dtype=np.int64)
        #: local memory, a row for each lane
        self.local = np.full((LANES, program.decoder.local_bytes), POISON, np.uint8)
        #: lanes that exist: a block's size need not be a multiple of 32
        exist = threads < block.threads
        self.pc = 0
        #: where each lane is, where they are not together
        self.pcs: NDArray[np.int64] | None = None
        if not exist.all():
            self.pcs = np.where(exist, 0, EXIT).astype(np.int64)
        self.done = False
        #: gave up its turn: it waits for others
        self.yielded = False
        #: what it waits for, until somebody lets it go on
        self.blocked = ""
        self.line = 0
        self._set_special(program, threads)

    def _set_special(self, program: Program, threads: NDArray[np.int64]) -> None:
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
        for number, axis in enumerate("xyz"):
            values[f"%ntid.{axis}"] = block.shape[number]
            values[f"%ctaid.{axis}"] = block.place[number]
            values[f"%nctaid.{axis}"] = block.grid.shape[number]
        for name in SPECIAL:
            self.views[2][program.decoder.slots[name].index][...] = values[name]

    def lanes(self, mask: Any) -> NDArray[np.intp]:
        """The numbers of the lanes that take part."""
        return np.arange(LANES) if mask is True else np.flatnonzero(mask)
