"""Floating-point arithmetic on 32 bits, alone or in pairs, on pairs of halves, and on 64 bits.

PTX ISA, "Floating Point Instructions" and "Half Precision Floating Point Instructions".  Functions
with ``.approx`` are computed exactly here and rounded once, which is within the error that the ISA
allows a GPU, but not the GPU's own bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import (
    F32,
    F64,
    U16,
    U32,
    U64,
    Decoder,
    Emitter,
    Mask,
    Step,
    put,
    type_named,
)
from builder.ptx.formats import flush, from_bf16, from_f16, one_nan, some, to_bf16, to_f16

if TYPE_CHECKING:
    from builder.ptx.block import Warp
    from builder.ptx.source import Instruction

#: Modifiers without effect: rounding to nearest even is the default.
_PLAIN = {"rn", "f32"}


def _registers(d: Decoder, i: Instruction, name: str, count: int) -> tuple[int, list[int]]:
    """The destination and the ``count`` operands, all of one type."""
    kind = type_named(name)
    assert kind is not None
    if len(i.operands) != count + 1:
        raise d.unknown(i, f"{len(i.operands)} operands")
    return d.out(i, i.operands[0], kind), [d.source(i, s, kind) for s in i.operands[1:]]


def _float(function: Any, count: int, *more: str, paired: bool = False) -> Emitter:
    """``op{.rn}{.ftz}.f32``; ``paired`` also has ``.f32x2``: both halves of 64 bits."""

    def emit(d: Decoder, i: Instruction) -> Step:
        if paired and i.modifiers[-1] in _PAIRS:
            return _pair(d, i, function, count)
        if i.modifiers[-2:-1] == ("f32",) and i.modifiers[-1] in _WIDENED and i.opcode == "add":
            return _mixed(d, i)
        if paired and i.modifiers[-1] == "bf16":
            return _half(d, i, function, count)
        if i.modifiers[-1] == "f64" and i.opcode in _DOUBLE:
            return _double(d, i)
        if not set(i.modifiers) <= {*_PLAIN, "ftz", *more} or i.modifiers[-1] != "f32":
            raise d.unknown(i)
        out, sources = _registers(d, i, "f32", count)
        ftz = i.has("ftz")

        def run(w: Warp, m: Mask) -> None:
            rows = w.views[F32]
            values = [flush(rows[s]) if ftz else rows[s] for s in sources]
            result = function(*values)
            put(rows[out], one_nan(flush(result) if ftz else result), m)

        return run

    return emit


#: 64-bit operations, rounded once to nearest even by numpy; subnormal numbers are kept.
_DOUBLE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def _double(d: Decoder, i: Instruction) -> Step:
    """``op{.rn}.f64`` ("Floating Point Instructions: add, sub, mul, div").

    For two NaNs the result of a sum, difference or product is the second (recorded on an H100).
    """
    if not set(i.modifiers[:-1]) <= {"rn"} or (i.opcode == "div" and not i.has("rn")):
        raise d.unknown(i)
    function = _DOUBLE[i.opcode]
    out, (a, b) = _registers(d, i, "f64", 2)

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[F64]
        with np.errstate(all="ignore"):
            result = function(rows[a], rows[b])
        if i.opcode != "div":
            result = np.where(np.isnan(rows[b]), rows[b], result)
        put(rows[out], result, m)

    return run


#: Types of two numbers: the register that holds them.
_PAIRS = {"f32x2": ("b64", U64), "bf16x2": ("b32", U32), "f16x2": ("b32", U32)}
#: For 16-bit types: the conversions to float32 and back.
_HALVES = {"bf16x2": (from_bf16, to_bf16), "f16x2": (from_f16, to_f16)}


def _pair(d: Decoder, i: Instruction, function: Any, count: int) -> Step:
    """``op{.rn}{.ftz}.f32x2``, ``op{.rn}.bf16x2`` and ``.f16x2``: two results, each rounded once.

    The sum or product of two halves has, rounded to float32, all bits that rounding needs.
    """
    name = i.modifiers[-1]
    halves = _HALVES.get(name)
    if not set(i.modifiers[:-1]) <= ({"rn"} if halves else {"rn", "ftz"}) or (halves and count > 2):
        raise d.unknown(i)
    held, view = _PAIRS[name]
    out, sources = _registers(d, i, held, count)
    ftz = i.has("ftz")

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[view]
        if halves:
            values = [halves[0](rows[s].view(np.uint16)) for s in sources]
        else:
            values = [rows[s].view(np.float32) for s in sources]
        result = function(*(map(flush, values) if ftz else values))
        if halves:
            both = halves[1](result).astype(np.uint16).view(np.uint32)
        else:
            both = one_nan(flush(result) if ftz else result).view(np.uint64)
        put(rows[out], both, m)

    return run


#: Types of 16 bits that a mixed sum widens first.
_WIDENED = {"bf16": from_bf16, "f16": from_f16}


def _mixed(d: Decoder, i: Instruction) -> Step:
    """``add{.rn}.f32.bf16`` and ``.f16`` ("Mixed Precision Floating Point Instructions: add"): the
    first operand has 16 bits, and becomes float32 exactly before it is added."""
    half, real = type_named("b16"), type_named("f32")
    assert half is not None
    assert real is not None
    if not set(i.modifiers[:-2]) <= {"rn"} or len(i.operands) != 3:
        raise d.unknown(i)
    widen = _WIDENED[i.modifiers[-1]]
    out = d.out(i, i.operands[0], real)
    a, c = d.source(i, i.operands[1], half), d.source(i, i.operands[2], real)

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[F32]
        put(rows[out], one_nan(widen(w.views[U16][a]) + rows[c]), m)

    return run


def _half(d: Decoder, i: Instruction, function: Any, count: int) -> Step:
    """``op{.rn}.bf16`` of two operands: as one half of ``bf16x2``."""
    if not set(i.modifiers[:-1]) <= {"rn"} or count > 2:
        raise d.unknown(i)
    out, sources = _registers(d, i, "b16", count)

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[U16]
        result = function(*(from_bf16(rows[s]) for s in sources))
        put(rows[out], to_bf16(result).astype(np.uint16), m)

    return run


def _once(function: Any) -> Any:
    """Compute in float64, round once."""
    return lambda *values: function(*(v.astype(np.float64) for v in values)).astype(np.float32)


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, to nearest even.

    The sum in float64 may be rounded too: that shows where it lies half-way between two of float32,
    or where these are subnormal and so lie elsewhere.
    """
    total = np.multiply(a, b, dtype=np.float64) + c
    if some(total.view(np.int64) & _BELOW == _HALF) or some(
        (np.abs(total) < _NORMAL) & (total != 0)
    ):
        return _odd(a, b, c).astype(np.float32)
    return total.astype(np.float32)


#: The bits of float64 that float32 has not, half of its last one, and its smallest normal number.
_BELOW, _HALF, _NORMAL = np.int64(2**29 - 1), np.int64(2**28), 2.0**-126


def _fused_down(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, downwards (``.rm``): a sum of zero is -0 unless both parts are +0."""
    odd = _odd(a, b, c)
    near = odd.astype(np.float32)
    down = np.where(near > odd, np.nextafter(near, np.float32(-np.inf)), near)
    positive = (np.signbit(a) == np.signbit(b)) & ~np.signbit(c)
    return np.where((odd == 0) & ~positive, np.float32(-0.0), down).astype(np.float32)


def _odd(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float64, rounded to odd: another rounding to float32 is then the only one.

    The product is exact in float64.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    # what the addition lost (Knuth's two-sum); with it the second rounding is by odd bits right
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (lost > 0) == (total > 0)
    return np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


_NEAREST, _DOWN = _float(_fused, 3, paired=True), _float(_fused_down, 3, "rm")


def _multiply_add(d: Decoder, i: Instruction) -> Step:
    """``fma.rn`` and ``fma.rm``."""
    if i.has("rm") and i.has("rn"):
        raise d.unknown(i)
    return (_DOWN if i.has("rm") else _NEAREST)(d, i)


#: Emitters by opcode, of those whose type is a float.
FLOAT: dict[str, Emitter] = {
    "add": _float(np.add, 2, paired=True),
    "sub": _float(np.subtract, 2, paired=True),
    "mul": _float(np.multiply, 2, paired=True),
    "fma": _multiply_add,
    # of a number and a NaN, the number
    "min": _float(np.fmin, 2),
    "max": _float(np.fmax, 2),
    "abs": _float(np.abs, 1),
    "neg": _float(np.negative, 1),
    "div": _float(_once(np.divide), 2, "approx", "full"),
    "rcp": _float(_once(np.reciprocal), 1, "approx"),
    "sqrt": _float(_once(np.sqrt), 1, "approx"),
    "rsqrt": _float(_once(lambda v: 1 / np.sqrt(v)), 1, "approx"),
    "ex2": _float(_once(np.exp2), 1, "approx"),
    "lg2": _float(_once(np.log2), 1, "approx"),
    "tanh": _float(_once(np.tanh), 1, "approx"),
}
