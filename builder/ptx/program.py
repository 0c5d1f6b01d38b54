"""A decoded kernel in basic blocks, by the instructions that are supported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.accesses import ASYNC, MEMORY, YIELDING
from builder.ptx.block import Layout
from builder.ptx.calls import CALLS
from builder.ptx.decoder import Decoder, guarded
from builder.ptx.floats import CONVERT, FLOAT
from builder.ptx.machine import LANES, SPECIAL, PtxError
from builder.ptx.matrices import MATRIX
from builder.ptx.native import Translator
from builder.ptx.registers import DATA, INTEGER, typed
from builder.ptx.source import FRAME, Negated
from builder.ptx.warps import WARP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from builder.ptx.decoder import Emitter, Step
    from builder.ptx.source import Instruction, Kernel, Variable


def _number(d: Decoder, i: Instruction) -> Step:
    """Select between integer and floating-point instructions of the same name by their type."""
    table = FLOAT if i.modifiers and i.modifiers[-1].startswith(("f", "bf")) else INTEGER
    return table[i.opcode](d, i)


EMITTERS: dict[str, Emitter] = {
    **INTEGER,
    **FLOAT,
    **dict.fromkeys(INTEGER.keys() & FLOAT.keys(), _number),
    **CONVERT,
    **DATA,
    **MEMORY,
    **MATRIX,
    **WARP,
    **ASYNC,
    **CALLS,
}

#: Opcodes after which a warp may have jumped or yielded.
_ENDS = {"bra", "brx", "call", "ret", "exit", "bar", "barrier", "nanosleep", "atom", "red"}
#: Opcodes at which diverged lanes wait for others, and the operand that names these; all of the
#: warp, if there is none.  Matrix instructions wait too, but not at the start of a basic block.
_GATHERS = {"bar": None, "barrier": None, "shfl": 4, "vote": 2, "elect": 1, "redux": 2, "match": 2}


def ends_block(i: Instruction) -> bool:
    """Whether a warp may stop after an instruction."""
    waits = {"try_wait", "test_wait", "wait_group", "wait_all"} & set(i.modifiers)
    return (
        i.opcode in _ENDS or bool(waits) or (i.opcode == "ld" and bool(YIELDING & set(i.modifiers)))
    )


def begins_block(i: Instruction) -> bool:
    """Whether a warp may have to execute an instruction again, or some of its lanes wait there."""
    return bool({"wait_group", "wait_all"} & set(i.modifiers)) or gathers(i)


def gathers(i: Instruction) -> bool:
    """Whether lanes wait there for others of their warp: ``.sync``, and ``.aligned`` barriers."""
    if i.opcode in ("bar", "barrier"):
        return "warp" in i.modifiers or i.opcode == "bar" or "aligned" in i.modifiers
    return i.opcode in _GATHERS and "sync" in i.modifiers


@dataclass
class BasicBlock:
    """Instructions that run in sequence; only the last one may jump."""

    start: int
    end: int
    #: lanes wait at the first instruction for diverged ones
    gathers: bool = False
    #: the register that names these, or -1 for all of the warp
    members: int = -1


def step_of(decoder: Decoder, place: int, one: Instruction) -> Step:
    """An instruction at its place in the kernel, decoded.

    Raises:
        PtxError: it is unknown, or this form of it is.
    """
    emitter = EMITTERS.get(one.opcode)
    if emitter is None:
        raise decoder.unknown(one)
    try:
        return guarded(decoder, one, emitter(decoder, one), place)
    except (
        LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError
    ):  # fmt: skip
        raise decoder.unknown(one, "its operands are not understood") from None


def missing_of(kernel: Kernel) -> dict[int, PtxError]:
    """The instructions of a kernel that are unknown, by their places."""
    decoder, missing = Decoder(kernel), {}
    for place, one in enumerate(kernel.code):
        try:
            step_of(decoder, place, one)
        except PtxError as error:
            missing[place] = error
    return missing


class Program:
    """A decoded kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.decoder = Decoder(kernel)
        leaders = {0, *kernel.labels}
        missing: dict[str, PtxError] = {}
        self.steps: list[Step] = []
        translator = Translator(self.decoder)
        for place, one in enumerate(kernel.code):
            try:
                self.steps.append(step_of(self.decoder, place, one))
                translator.add(one)
            except PtxError as error:
                missing.setdefault(error.what, error)
            if begins_block(one):
                leaders.add(place)
            if ends_block(one):
                leaders.add(place + 1)
        if missing:
            first, *others = missing.values()
            more = [f"{error.what} (line {error.line})" for error in others]
            raise PtxError("; ".join([first.what, *more]), first.line)
        self.blocks = dict(self._blocks(sorted(leaders)))
        #: the instructions as core.c has them
        self.table = translator.table()
        #: a block may wait for what another one writes
        self.polls = any(one.opcode == "ld" and one.has("acquire") for one in kernel.code)

    def _blocks(self, leaders: list[int]) -> Iterable[tuple[int, BasicBlock]]:
        count = len(self.steps)
        for start, end in zip(leaders, [*leaders[1:], count], strict=True):
            if start < count:
                one = self.kernel.code[start]
                members = self._members(one) if gathers(one) else -1
                yield start, BasicBlock(start, end, gathers(one), members)

    def _members(self, one: Instruction) -> int:
        """The register with the lanes that an instruction names."""
        place = 0 if "warp" in one.modifiers else _GATHERS[one.opcode]
        if place is None:
            return -1
        return self.decoder.source(one, one.operands[place], typed("b32"))

    @cached_property
    def spins(self) -> frozenset[int]:
        """The waits for an mbarrier after which, if they fail, only branches lead back to them."""
        code = self.kernel.code
        return frozenset(
            place
            for place, one in enumerate(code)
            if one.opcode == "mbarrier" and one.has("try_wait") and self._spins(place)
        )

    def _spins(self, wait: int) -> bool:
        """Whether a wait that failed comes next, after nothing but branches."""
        code, failed = self.kernel.code, self.kernel.code[wait].operands[0]
        at, passed = wait + 1, set[int]()
        while at not in passed and at < len(code) and code[at].opcode == "bra":
            passed.add(at)
            guard = code[at].guard
            name = guard.name if isinstance(guard, Negated) else guard
            if name not in (None, failed):
                return False
            at = at + 1 if guard == failed else code[at].target
        return at == wait and code[wait].guard is None

    @cached_property
    def layout(self) -> Layout:
        """The registers and memory that the code needs."""
        decoder = self.decoder
        return Layout(
            counts=decoder.counts,
            constants=self._constants(),
            special={n: decoder.slots[n].index for n in SPECIAL if n in decoder.slots},
            frame=decoder.slots[FRAME].index if FRAME in decoder.slots else -1,
            shared_bytes=decoder.shared_bytes,
            local_bytes=max(decoder.local_bytes, self.kernel.stack),
            data=tuple(self._data()),
            granule=min(decoder.shared_sizes),
            global_granule=min(decoder.global_sizes),
        )

    def _data(self) -> Iterable[tuple[int, bytes, Variable]]:
        """The address and the contents of each variable of the module."""
        symbols = self.decoder.symbols
        for one in self.kernel.data:
            values = (symbols[v] if isinstance(v, str) else v for v in one.values)
            most = (1 << 8 * one.element) - 1
            contents = b"".join((v & most).to_bytes(one.element, "little") for v in values)
            yield symbols[one.name], contents.ljust(one.size or 0, b"\0"), one

    def _constants(self) -> dict[int, NDArray[Any]]:
        """The constants by width: one row of equal lanes for each."""
        kinds = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
        rows = {}
        for width, kind in kinds.items():
            values: NDArray[Any] = np.array(list(self.decoder.constants[width]), dtype=kind)
            rows[width] = np.repeat(values[:, None], LANES, axis=1)
        return rows
