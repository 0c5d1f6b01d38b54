"""Integer arithmetic, logic and shifts.

PTX ISA, "Integer Arithmetic Instructions" and "Logic and Shift Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import PRED, Decoder, Emitter, Mask, Step, Type, put, type_named
from builder.ptx.source import Number

if TYPE_CHECKING:
    from builder.ptx.block import Warp
    from builder.ptx.source import Instruction

_U64 = np.uint64


def elementwise(function: Any, kind: Type, out: int, sources: tuple[int, ...]) -> Step:
    """A numpy function of values of one type."""
    view = kind.view
    if len(sources) == 1:
        (a,) = sources

        def one(w: Warp, m: Mask) -> None:
            rows = w.views[view]
            function(rows[a], out=rows[out], where=m)

        return one
    a, b = sources

    def two(w: Warp, m: Mask) -> None:
        rows = w.views[view]
        function(rows[a], rows[b], out=rows[out], where=m)

    return two


def _integer(d: Decoder, i: Instruction, *allowed: str) -> Type:
    """The type of an integer instruction whose other modifiers are all known."""
    kind = d.type(i)
    if not set(i.modifiers[:-1]) <= set(allowed) or kind.name[0] not in "busp" or kind.bits == 8:
        raise d.unknown(i)
    return kind


def _plain(function: Any, logical: Any = None) -> Emitter:
    """``op.type d, a, b``: the low bits of the result; of predicates, ``logical``."""

    def emit(d: Decoder, i: Instruction) -> Step:
        kind = _integer(d, i, "lo") if i.opcode == "mul" else _integer(d, i)
        chosen = logical if kind.view == PRED else function
        if chosen is None or i.modifiers[-1][0] == "f":
            raise d.unknown(i)
        out, *sources = i.operands
        found = tuple(d.source(i, s, kind) for s in sources)
        return elementwise(chosen, kind, d.out(i, out, kind), found)

    return emit


def _multiply(d: Decoder, i: Instruction) -> Step:
    """``mul.lo``, ``mul.hi`` (the upper half of the product), ``mul.wide`` (the whole product)."""
    if i.has("lo"):
        return _plain(np.multiply)(d, i)
    kind = _integer(d, i, "hi", "wide")
    wide = type_named(f"{kind.name[0]}{2 * kind.bits}") if kind.bits < 64 else None
    if wide is None or kind.name[0] not in "us":
        raise d.unknown(i)
    out = d.out(i, i.operands[0], wide if i.has("wide") else kind)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    whole, shift = np.int64 if kind.signed else np.uint64, kind.bits
    half = i.has("hi")

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        product = rows[a].astype(whole) * rows[b].astype(whole)
        target = rows[out] if half else w.views[wide.view][out]
        product = product >> whole(shift) if half else product
        put(target, product.astype(target.dtype), m)

    return run


def _multiply_add(d: Decoder, i: Instruction) -> Step:
    """``mad.lo``: a * b + c, the low half."""
    kind = _integer(d, i, "lo")
    if not i.has("lo"):
        raise d.unknown(i)
    out = d.out(i, i.operands[0], kind)
    a, b, c = (d.source(i, s, kind) for s in i.operands[1:4])

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        put(rows[out], rows[a] * rows[b] + rows[c], m)

    return run


def _divide(d: Decoder, i: Instruction) -> Step:
    """``div`` and ``rem``: towards zero; by zero the result is machine-specific, here all ones."""
    kind = _integer(d, i)
    out = d.out(i, i.operands[0], kind)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    remainder = i.opcode == "rem"

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        divisor = np.where(rows[b] == 0, 1, rows[b])
        rest = np.fmod(rows[a], divisor)
        value = rest if remainder else (rows[a] - rest) // divisor
        put(rows[out], np.where(rows[b] == 0, ~np.zeros_like(value), value), m)

    return run


def _negate(d: Decoder, i: Instruction) -> Step:
    """``neg``: 0 - a; ``abs``: the magnitude."""
    kind = _integer(d, i)
    if not kind.signed:
        raise d.unknown(i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    return elementwise(np.negative if i.opcode == "neg" else np.abs, kind, out, (a,))


def _shift(d: Decoder, i: Instruction) -> Step:
    """``shl`` and ``shr``: amounts beyond the width count as the width; ``.s`` repeats the sign."""
    kind = _integer(d, i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    amounts = type_named("u32")
    assert amounts is not None
    by, bits = i.operands[2], kind.bits
    if isinstance(by, Number) and 0 <= by.value < bits:
        shift = np.left_shift if i.opcode == "shl" else np.right_shift
        return elementwise(shift, kind, out, (a, d.constant(by.value, max(bits, 16))))
    n = d.source(i, by, amounts)
    left, signed = i.opcode == "shl", kind.signed and i.opcode == "shr"

    def run(w: Warp, m: Mask) -> None:
        row = w.views[kind.view]
        by = w.views[amounts.view][n]
        within = np.minimum(by, bits - 1).astype(row[a].dtype)
        value = np.left_shift(row[a], within) if left else np.right_shift(row[a], within)
        if not signed:
            value = np.where(by < bits, value, 0)
        put(row[out], value, m)

    return run


def _logic3(d: Decoder, i: Instruction) -> Step:
    """``lop3.b32``: for each bit, the entry of the table that the three bits select."""
    if i.modifiers != ("b32",) or not isinstance(i.operands, tuple) or len(i.operands) != 5:
        raise d.unknown(i)
    kind = _integer(d, i)
    out = d.out(i, i.operands[0], kind)
    a, b, c, table = (d.source(i, s, kind) for s in i.operands[1:5])

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        x, y, z, bits = rows[a], rows[b], rows[c], int(rows[table][0])
        value = np.zeros_like(x)
        for number in range(8):
            if bits >> number & 1:
                first = x if number & 4 else ~x
                second = y if number & 2 else ~y
                value |= first & second & (z if number & 1 else ~z)
        put(rows[out], value, m)

    return run


def _permute(d: Decoder, i: Instruction) -> Step:
    """``prmt.b32``: four bytes of two words by selectors; bit 3 of one repeats the byte's sign."""
    if i.modifiers != ("b32",):
        raise d.unknown(i)
    kind = _integer(d, i)
    out = d.out(i, i.operands[0], kind)
    a, b, c = (d.source(i, s, kind) for s in i.operands[1:4])

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        pool = rows[a].astype(_U64) | rows[b].astype(_U64) << _U64(32)
        value = np.zeros(len(pool), np.uint32)
        for number in range(4):
            chosen = (rows[c] >> np.uint32(4 * number)) & np.uint32(15)
            byte = (pool >> ((chosen & np.uint32(7)).astype(_U64) * _U64(8))).astype(np.uint32)
            byte &= np.uint32(0xFF)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(chosen & np.uint32(8), sign, byte).astype(np.uint32)
            value |= byte << np.uint32(8 * number)
        put(rows[out], value, m)

    return run


#: Emitters by opcode.
INTEGER: dict[str, Emitter] = {
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _multiply,
    "mad": _multiply_add,
    "div": _divide,
    "rem": _divide,
    "neg": _negate,
    "abs": _negate,
    "min": _plain(np.minimum),
    "max": _plain(np.maximum),
    "and": _plain(np.bitwise_and, np.logical_and),
    "or": _plain(np.bitwise_or, np.logical_or),
    "xor": _plain(np.bitwise_xor, np.logical_xor),
    "not": _plain(np.bitwise_not, np.logical_not),
    "shl": _shift,
    "shr": _shift,
    "lop3": _logic3,
    "prmt": _permute,
}
