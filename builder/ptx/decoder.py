"""Decodes operands: each instruction becomes a function of a warp.

A warp's registers are arrays of 32 lanes.  Registers, constants and special registers of one width
are in one list, so that a decoded instruction only needs indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.machine import (
    ALL_LANES,
    DATA_BASE,
    FUNCTIONS,
    LANES,
    NO_LANES,
    PARAMETERS,
    SHARED_BASE,
    SPECIAL,
    PtxError,
)
from builder.ptx.source import (
    SIZES,
    Address,
    Instruction,
    Kernel,
    Name,
    Negated,
    Number,
    Operand,
    Variable,
    Vector,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.ptx.block import Warp

#: Lanes that take part; True where all 32 do.
Mask = Any
#: The next position: a code index for all lanes or for each, or None for the next instruction.
Target = Any
Step = Callable[["Warp", Mask], Target]
Emitter = Callable[["Decoder", Instruction], Step]

#: A view of registers, by its index in ``Warp.views``.
U16, S16, U32, S32, F32, U64, S64, F64, PRED = range(9)
_WIDTHS: dict[int, tuple[int, ...]] = {16: (U16, S16), 32: (U32, S32, F32), 64: (U64, S64, F64)}


@dataclass(frozen=True)
class Type:
    """A fundamental type: the view for its instructions, and its size."""

    name: str
    view: int
    bits: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.bits // 8

    @property
    def signed(self) -> bool:
        """Whether it is a signed integer."""
        return self.name.startswith("s")


@cache
def type_named(name: str) -> Type | None:
    """The type of a modifier, if it is one."""
    kind, bits = name[:1], name[1:]
    if name == "pred":
        return Type(name, PRED, 1)
    if bits not in SIZES or bits == "128" or kind not in "busf" or (kind, bits) == ("f", "16"):
        return None
    width = max(int(bits), 16)
    number = {"b": 0, "u": 0, "s": 1, "f": 2}[kind]
    return Type(name, _WIDTHS[width][number], int(bits)) if number < len(_WIDTHS[width]) else None


@dataclass(frozen=True)
class Slot:
    """A register's position: its width and index."""

    width: int
    index: int


class Decoder:
    """The state of decoding, which also collects constants."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.slots: dict[str, Slot] = {}
        for name, declared in kernel.registers.items():
            if declared == "b128":  # two registers
                self.slots[name] = Slot(128, self.counts[64])
                self.slots |= {half: self._new(64) for half in (f"{name}#0", f"{name}#1")}
                continue
            kind = type_named(declared) or (Type(declared, U16, 16) if declared == "f16" else None)
            if kind is None:
                raise PtxError(f"registers of type .{declared} are not known")
            self.slots[name] = self._new(1 if kind.bits == 1 else max(kind.bits, 16))
        used = {word for one in kernel.code for word in one.names if word.startswith("%")}
        for name in SPECIAL:
            if name in used:
                self.slots[name] = self._new(32)
        self.constants: dict[int, dict[int, int]] = {1: {}, 16: {}, 32: {}, 64: {}}
        self.shared_bytes, shared = _lay_out(kernel.shared, SHARED_BASE)
        self.local_bytes, local = _lay_out(kernel.local, 0)
        self.data_bytes, data = _lay_out(kernel.data, DATA_BASE, apart=DATA_GAP)
        self.data = data
        self._check_sizes()
        code = {one.name: FUNCTIONS + one.entry for one in kernel.functions}
        self.symbols = {**shared, **local, **data, **code}
        #: sizes of accesses to shared memory
        self.shared_sizes: set[int] = {4}
        #: the same for global memory
        self.global_sizes: set[int] = {4}

    def _check_sizes(self) -> None:
        """Check what a launch will need.

        Raises:
            PtxError: variables are larger than memory.
        """
        local = max(self.local_bytes, self.kernel.stack)
        for name, size, most in (
            ("shared", self.shared_bytes, MOST_SHARED),
            ("local", local, MOST_LOCAL),
            ("global and constant", self.data_bytes, _MOST_DATA),
        ):
            if size > most:
                raise PtxError(f"variables of {size} bytes in {name} memory; {most} are the most")

    def _new(self, width: int) -> Slot:
        self.counts[width] += 1
        return Slot(width, self.counts[width] - 1)

    # ------------------------------------------------------------------------------------ operands

    def type(self, i: Instruction, at: int = -1) -> Type:
        """The type that a modifier names."""
        kind = type_named(i.modifiers[at]) if i.modifiers else None
        if kind is None:
            raise self.unknown(i)
        return kind

    @staticmethod
    def unknown(i: Instruction, why: str = "") -> PtxError:
        """The error for an unknown instruction, or an unknown form of one."""
        return PtxError(f"unknown instruction {i.name}{f': {why}' if why else ''}", i.line)

    def register(self, i: Instruction, operand: Operand) -> Slot:
        """The place of an operand that must be a register."""
        if isinstance(operand, Name) and operand.text in self.slots:
            return self.slots[operand.text]
        raise self.unknown(i, f"{_text(operand)} is not a register")

    def guard(self, i: Instruction, guard: Name | Negated) -> tuple[int, bool]:
        """The index of a guard's predicate, and whether it is negated.

        Raises:
            PtxError: it is no predicate.
        """
        negated = isinstance(guard, Negated)
        name = guard.name if isinstance(guard, Negated) else guard
        slot = self.register(i, name)
        if slot.width != 1:
            raise self.unknown(i, f"its guard {_text(name)} is not a predicate")
        return slot.index, negated

    def pointer(self, i: Instruction, base: Name) -> Slot:
        """The register of an address.

        Raises:
            PtxError: it does not have 32 or 64 bits.
        """
        slot = self.register(i, base)
        if slot.width not in (32, 64):
            raise self.unknown(i, f"{_text(base)} has {slot.width} bits, which is no address")
        return slot

    def source(self, i: Instruction, operand: Operand, kind: Type) -> int:
        """The index of a value in the views of a type's width."""
        width = 1 if kind.bits == 1 else max(kind.bits, 16)
        if isinstance(operand, Number):
            if kind.name.startswith("f") and operand.width != kind.bits:
                raise self.unknown(i, f"{operand.value} is not of type {kind.name}")
            return self.constant(operand.value, width)
        if isinstance(operand, Name) and operand.text not in self.slots:
            if operand.text in self.symbols:
                return self.constant(self.symbols[operand.text], width)
            if operand.text == "WARP_SZ":
                return self.constant(LANES, width)
            if operand.text in self.kernel.parameters:
                place = self.kernel.parameters[operand.text].offset
                return self.constant(PARAMETERS + place, width)
        slot = self.register(i, operand)
        if slot.width != width:
            raise self.unknown(i, f"{_text(operand)} has {slot.width} bits, not {width}")
        return slot.index

    def out(self, i: Instruction, operand: Operand, kind: Type) -> int:
        """The index of a destination."""
        slot = self.register(i, operand)
        if slot.width != (1 if kind.bits == 1 else max(kind.bits, 16)):
            raise self.unknown(i, f"{_text(operand)} has {slot.width} bits")
        return slot.index

    def constant(self, value: int, width: int) -> int:
        """The index of a constant, the same for all lanes."""
        constants = self.constants[width]
        bits = value & ((1 << width) - 1)
        constants.setdefault(bits, len(constants))
        return self.counts[width] + constants[bits]

    def address(self, i: Instruction, operand: Operand, width: int = 32) -> Callable[[Warp], Any]:
        """The computation of an address: shared ones are 32 bits wide, others 64."""
        if not isinstance(operand, Address) or operand.coordinates:
            raise self.unknown(i, f"{_text(operand)} is not an address")
        base, offset = operand.base, operand.offset
        if isinstance(base, Number) or base.text not in self.slots:
            place = self.symbol(i, base) + offset
            index = self.constant(place, width)
            view = U32 if width == 32 else U64
            return lambda w: w.views[view][index]
        slot = self.pointer(i, base)
        view = U32 if slot.width == 32 else U64
        index = slot.index
        if not offset:
            return lambda w: w.views[view][index]
        added = self.constant(offset, slot.width)
        return lambda w: w.views[view][index] + w.views[view][added]

    def symbol(self, i: Instruction, base: Name | Number) -> int:
        """The address that a variable, a parameter or a number stands for."""
        if isinstance(base, Number):
            return base.value
        if base.text in self.symbols:
            return self.symbols[base.text]
        if base.text in self.kernel.parameters:
            return PARAMETERS + self.kernel.parameters[base.text].offset
        raise self.unknown(i, f"{base.text} is not declared")

    @staticmethod
    def halves(operand: Operand) -> tuple[Operand, ...]:
        """The two registers of 64 bits that one of 128 is, or a vector of them."""
        if isinstance(operand, Name):
            return Name(f"{operand.text}#0"), Name(f"{operand.text}#1")
        return operand.parts if isinstance(operand, Vector) else ()

    @staticmethod
    def parts(operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector; a scalar is one."""
        return operand.parts if isinstance(operand, Vector) else (operand,)


#: Shared memory of a block, the largest of any architecture (CUDA C++ Programming Guide, "Technical
#: Specifications": 227 KiB), and local memory of a thread.
MOST_SHARED, MOST_LOCAL = 227 * 1024, 512 * 1024
#: Bytes of all variables of a module: every schedule copies them.  Our choice.
_MOST_DATA = 2**28
#: Bytes between the variables of a module, so that an access beyond one is a fault.
DATA_GAP = 64


def _lay_out(
    variables: Iterable[Variable], base: int, apart: int = 0
) -> tuple[int, dict[str, int]]:
    """Place variables of known size first; those that the launch sizes share what follows.

    The bytes that align these are no part of the launch's size: the hardware has units of 128.
    """
    at, places = 0, {}
    for variable in sorted(variables, key=lambda v: v.size is None):
        begin = -(-at // variable.align) * variable.align
        places[variable.name] = begin + base
        at = begin if variable.size is None else begin + variable.size + apart
    return at, places


def _text(operand: Operand) -> str:
    return operand.text.partition("@")[0] if isinstance(operand, Name) else str(operand)


def put(row: NDArray[Any], values: Any, mask: Mask) -> None:
    """Write values into the lanes that take part.

    ``numpy.copyto`` makes an array of a mask that is ``True``, which takes ten times as long.
    """
    if mask is True:
        row[...] = values
    else:
        np.copyto(row, values, where=mask, casting="unsafe")


def guarded(decoder: Decoder, i: Instruction, step: Step, place: int) -> Step:
    """An instruction with its guard ("Predicated Execution")."""
    if i.guard is None:
        return step
    index, negated = decoder.guard(i, i.guard)
    following = place + 1

    def run(w: Warp, m: Mask) -> Target:
        holds = w.views[PRED][index]
        lanes = ~holds if negated else holds
        if m is not True:
            lanes = lanes & m
        taking_part = lanes.tobytes()
        if taking_part == NO_LANES:
            return None
        whole = m is True and taking_part == ALL_LANES
        target = step(w, True if whole else lanes)
        return target if target is None or whole else np.where(lanes, target, following)

    return run
