"""Instructions on registers: moves, comparisons, arithmetic, logic and conversions.

PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions", "Half Precision
Floating Point Instructions", "Comparison and Selection Instructions", "Logic and Shift
Instructions" and "Data Movement and Conversion Instructions".  Functions with ``.approx`` are
computed exactly here and rounded once, which is within the error that the ISA allows a GPU, but not
the GPU's own bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import (
    F32,
    F64,
    PRED,
    U16,
    U32,
    U64,
    Decoder,
    Emitter,
    Mask,
    Step,
    Type,
    put,
    type_named,
)
from builder.ptx.machine import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    Fault,
    finite_bf16,
    flush,
    from_bf16,
    from_e2m1,
    from_e4m3,
    from_f16,
    one_nan,
    saturated,
    some,
    to_bf16,
    to_e2m1,
    to_e4m3,
    to_f16,
)
from builder.ptx.source import Address, Instruction, Name, Negated, Number, Vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp

# ------------------------------------------------------ moves, comparisons, selection and addresses


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # of unsigned values
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def typed(name: str) -> Type:
    """The type, which must be set."""
    found = type_named(name)
    assert found is not None
    return found


def _move(d: Decoder, i: Instruction) -> Step:
    """``mov``: a register, a constant, an address; vectors packed and unpacked, low part first."""
    if len(i.modifiers) != 1:
        raise d.unknown(i)
    kind = d.type(i)
    to, source = i.operands
    if isinstance(to, Vector):
        return _unpack(d, i, kind, to)
    if isinstance(source, Vector):
        return _pack(d, i, kind, source)
    out = d.out(i, to, kind)
    if kind.view == PRED and isinstance(source, Number):
        value = d.constant(int(source.value != 0), 1)
    else:
        value = d.source(i, source, kind)
    view = kind.view

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[view]
        put(rows[out], rows[value], m)

    return run


#: numpy's type of a part that ``mov`` packs; parts of 8 bits have 16-bit registers.
_PARTS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def _unpack(d: Decoder, i: Instruction, kind: Type, to: Vector) -> Step:
    part, count = typed(f"b{kind.bits // len(to.parts)}"), len(to.parts)
    source = d.source(i, i.operands[1], typed(f"b{kind.bits}"))
    view, held = typed(f"b{kind.bits}").view, _PARTS.get(part.bits)
    if held is None:
        raise d.unknown(i)
    outs = [
        (number, d.out(i, one, part)) for number, one in enumerate(to.parts) if one != Name("_")
    ]

    def run(w: Warp, m: Mask) -> None:
        parts, rows = w.views[view][source].view(held), w.views[part.view]
        for number, out in outs:
            put(rows[out], parts[number::count], m)

    return run


def _pack(d: Decoder, i: Instruction, kind: Type, source: Vector) -> Step:
    part, count = typed(f"b{kind.bits // len(source.parts)}"), len(source.parts)
    out = d.out(i, i.operands[0], typed(f"b{kind.bits}"))
    view, held = typed(f"b{kind.bits}").view, _PARTS.get(part.bits)
    if held is None:
        raise d.unknown(i)
    sources = [d.source(i, one, part) for one in source.parts]

    def run(w: Warp, m: Mask) -> None:
        parts, rows = w.views[view][out].view(held), w.views[part.view]
        for number, one in enumerate(sources):
            put(parts[number::count], rows[one], m)

    return run


def _or_nan(function: Any) -> Any:
    return lambda a, b: function(a, b) | _either_nan(a, b)


def _either_nan(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


_SIGNED = ("eq", "ne", "lt", "le", "gt", "ge")
#: Comparisons of floats.  One with NaN is false, unless its name has a ``u``.
_COMPARE_FLOATS: dict[str, Any] = {
    **{name: _COMPARE[name] for name in _SIGNED},
    **{f"{name}u": _or_nan(_COMPARE[name]) for name in _SIGNED},
    "ne": lambda a, b: (a < b) | (a > b),
    "nan": _either_nan,
    "num": lambda a, b: ~_either_nan(a, b),
}
#: Types of 16 bits that are compared by their values.
_FROM_HALF = {"bf16": from_bf16, "f16": from_f16}


def _compare(d: Decoder, i: Instruction) -> Step:
    """``setp.cmp{.bool}{.ftz}.type p, a, b{, c}``; ``.ftz`` of float32 only."""
    words = list(i.modifiers[:-1])
    half = _FROM_HALF.get(i.modifiers[-1]) if i.modifiers else None
    kind = typed("b16") if half else d.type(i)
    floats = half is not None or kind.name[0] == "f"
    known = _COMPARE_FLOATS if floats else _COMPARE
    function = known.get(words[0]) if words else None
    if kind.bits in (1, 8) or function is None:
        raise d.unknown(i)
    ftz = words[-1] == "ftz" and kind.name == "f32"
    joined = words[1:-1] if ftz else words[1:]
    join = _JOIN.get(joined[0]) if joined else None
    if joined not in ([], ["and"], ["or"], ["xor"]):
        raise d.unknown(i)
    pred = typed("pred")
    out = d.out(i, i.operands[0], pred)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    third = i.operands[3] if join else None
    negated = isinstance(third, Negated)
    named = third.name if isinstance(third, Negated) else third
    c = d.source(i, named, pred) if named is not None else 0
    view, held = kind.view, half or (flush if ftz else None)
    plain = held is None and join is None and isinstance(function, np.ufunc)

    def run(w: Warp, m: Mask) -> None:
        rows, flags = w.views[view], w.views[PRED]
        if plain:
            function(rows[a], rows[b], out=flags[out], where=m)
            return
        values = (rows[a], rows[b]) if held is None else (held(rows[a]), held(rows[b]))
        holds = function(*values)
        if join is not None:
            holds = join(holds, ~flags[c] if negated else flags[c])
        put(flags[out], holds, m)

    return run


def _select(d: Decoder, i: Instruction) -> Step:
    """``selp``: a where the predicate holds, else b."""
    if len(i.modifiers) != 1:
        raise d.unknown(i)
    kind = d.type(i)
    out = d.out(i, i.operands[0], kind)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    p = d.source(i, i.operands[3], typed("pred"))
    view = kind.view

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[view]
        put(rows[out], np.where(w.views[PRED][p], rows[a], rows[b]), m)

    return run


def _convert_address(d: Decoder, i: Instruction) -> Step:
    """``cvta``: shared and local memory have windows of generic addresses, other spaces none."""
    space = next((m.partition("::")[0] for m in i.modifiers if m not in ("to", "u64", "u32")), "")
    if i.modifiers[-1] != "u64" or space not in (
        "global", "param", "const", "shared", "local",
    ):  # fmt: skip
        raise d.unknown(i)
    kind = typed("u64")
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    change = np.uint64(-window % 2**64 if i.has("to") else window)

    def run(w: Warp, m: Mask) -> None:
        put(w.views[U64][out], w.views[U64][a] + change, m)

    return run


def load_parameter(d: Decoder, i: Instruction) -> Step:
    """``ld.param``: bytes of the parameter space, at an address known before the launch."""
    kind, place = d.type(i), i.operands[1]
    if not set(i.modifiers[1:-1]) <= {"v2", "v4"} or not isinstance(place, Address):
        raise d.unknown(i)
    if not isinstance(place.base, Name) or place.base.text not in d.kernel.parameters:
        raise d.unknown(i, "its address is not a parameter")
    first = d.kernel.parameters[place.base.text].offset + place.offset
    outs = [d.register(i, one) for one in d.parts(i.operands[0])]
    read = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")

    def run(w: Warp, m: Mask) -> None:
        data = w.block.state.launch.parameters
        if first + kind.bytes * len(outs) > len(data):
            raise Fault("a read beyond the last parameter")
        values = np.frombuffer(data, np.uint8, kind.bytes * len(outs), first).view(read)
        for slot, value in zip(outs, values, strict=True):
            row = w.views[_VIEW_OF[slot.width]][slot.index]
            put(row, value, m)

    return run


_VIEW_OF = {16: U16, 32: U32, 64: U64}

#: Emitters by opcode.
DATA: dict[str, Emitter] = {
    "mov": _move,
    "setp": _compare,
    "selp": _select,
    "cvta": _convert_address,
}


# ----------------------------------------------------------------------- integers, logic and shifts


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


def _multiply_integers(d: Decoder, i: Instruction) -> Step:
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


def _multiply_add_integers(d: Decoder, i: Instruction) -> Step:
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


def _divide_integers(d: Decoder, i: Instruction) -> Step:
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
    "mul": _multiply_integers,
    "mad": _multiply_add_integers,
    "div": _divide_integers,
    "rem": _divide_integers,
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


# ----------------------------------------------------------- floats: one, pairs, halves and doubles


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
            return _double_arithmetic(d, i)
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


def _double_arithmetic(d: Decoder, i: Instruction) -> Step:
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


def _multiply_add_floats(d: Decoder, i: Instruction) -> Step:
    """``fma.rn`` and ``fma.rm``."""
    if i.has("rm") and i.has("rn"):
        raise d.unknown(i)
    return (_DOWN if i.has("rm") else _NEAREST)(d, i)


#: Emitters by opcode, of those whose type is a float.
FLOAT: dict[str, Emitter] = {
    "add": _float(np.add, 2, paired=True),
    "sub": _float(np.subtract, 2, paired=True),
    "mul": _float(np.multiply, 2, paired=True),
    "fma": _multiply_add_floats,
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


# --------------------------------------------------------------------------------- conversions: cvt


_F32 = type_named("f32")


def _convert(d: Decoder, i: Instruction) -> Step:
    """``cvt{.rnd}{.ftz}{.sat}.to.from d, a``; two sources give two packed values."""
    packed = ".".join(i.modifiers)
    if packed in _PACKED:
        return _packed(d, i, *_PACKED[packed])
    if packed in _UNPACKED:
        return _unpacked(d, i, *_UNPACKED[packed])
    if packed in ("f64.f32", "rn.f32.f64"):
        return _convert_double(d, i)
    if i.modifiers[-2:] == ("f32", "bf16"):
        return _from_half(d, i, from_bf16)
    if i.modifiers[-2:] == ("f32", "f16"):
        return _from_half(d, i, from_f16)
    return _numeric(d, i)


def _bf16_finite(values: Any) -> Any:
    return to_bf16(finite_bf16(values))


#: By modifiers: how one value is converted, and the bits that it takes.  Of two sources the first
#: goes into the upper half.
_PACKED: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "rn.bf16x2.f32": (to_bf16, 16, 2),
    "rn.satfinite.bf16x2.f32": (_bf16_finite, 16, 2),
    "rn.f16x2.f32": (to_f16, 16, 2),
    "rn.satfinite.e4m3x2.f32": (to_e4m3, 8, 2),
    "rn.satfinite.e2m1x2.f32": (to_e2m1, 4, 2),
    "rn.bf16.f32": (to_bf16, 16, 1),
    "rn.f16.f32": (to_f16, 16, 1),
}


def _packed(
    d: Decoder, i: Instruction, function: Callable[[Any], Any], bits: int, count: int
) -> Step:
    assert _F32 is not None
    kind = type_named("b32" if bits * count == 32 else "b16")
    assert kind is not None
    if len(i.operands) != count + 1:
        raise d.unknown(i, f"{len(i.operands)} operands")
    out = d.out(i, i.operands[0], kind)
    sources = [d.source(i, s, _F32) for s in i.operands[1:]]
    shift = np.uint32(bits)

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[F32]
        value = function(rows[sources[0]]).astype(np.uint32)
        for source in sources[1:]:
            value = value << shift | function(rows[source]).astype(np.uint32)
        put(w.views[kind.view][out], value, m)

    return run


def _halves(values: Any) -> Any:
    return to_f16(values.reshape(-1)).astype(np.uint16)


def _bf16_halves(values: Any) -> Any:
    return to_bf16(values.reshape(-1)).astype(np.uint16)


_BYTES = np.arange(256, dtype=np.uint8)
#: By modifiers: the half-precision bits of a byte's one value or two, and the bits of the source.
_UNPACKED: dict[str, tuple[Any, str]] = {
    "rn.f16x2.e4m3x2": (_halves(from_e4m3(_BYTES)), "b16"),
    "rn.f16x2.e2m1x2": (_halves(from_e2m1(_BYTES)).view(np.uint32), "b8"),
    "rn.bf16x2.e4m3x2": (_bf16_halves(from_e4m3(_BYTES)), "b16"),
    "rn.bf16x2.e2m1x2": (_bf16_halves(from_e2m1(_BYTES)).view(np.uint32), "b8"),
}


def _unpacked(d: Decoder, i: Instruction, table: Any, held: str) -> Step:
    """``cvt.rn`` of ``e4m3x2`` or ``e2m1x2`` to two halves: exact; the low part goes to the low."""
    source, word = type_named(held), type_named("b32")
    assert source is not None
    assert word is not None
    out, a = d.out(i, i.operands[0], word), d.source(i, i.operands[1], source)
    kind = np.dtype(f"u{source.bytes}")

    def run(w: Warp, m: Mask) -> None:
        codes = w.views[U16][a].astype(kind).view(np.uint8)
        put(w.views[U32][out], table[codes].view(np.uint32), m)

    return run


def _convert_double(d: Decoder, i: Instruction) -> Step:
    """``cvt.f64.f32``, exact, and ``cvt.rn.f32.f64``, rounded to nearest even.

    A NaN keeps its payload, as far as it has room (recorded on an H100).
    """
    to, source = d.type(i, -2), d.type(i)
    out, a = d.out(i, i.operands[0], to), d.source(i, i.operands[1], source)

    def run(w: Warp, m: Mask) -> None:
        value = w.views[source.view][a]
        with np.errstate(all="ignore"):
            value = value.astype(np.float64 if to.bits == 64 else np.float32)
        put(w.views[to.view][out], value, m)

    return run


def _from_half(d: Decoder, i: Instruction, function: Callable[[Any], Any]) -> Step:
    """``cvt.f32.bf16`` and ``cvt.f32.f16``: exact."""
    half = type_named("b16")
    assert _F32 is not None
    assert half is not None
    if len(i.modifiers) != 2:
        raise d.unknown(i)
    out, a = d.out(i, i.operands[0], _F32), d.source(i, i.operands[1], half)

    def run(w: Warp, m: Mask) -> None:
        put(w.views[F32][out], function(w.views[U16][a]), m)

    return run


def _numeric(d: Decoder, i: Instruction) -> Step:
    """Integers and float32; ``.sat`` of float32.

    Integers are truncated or sign-extended by the source's type; a destination register that is
    wider than the type is extended by the destination's type.  Floats become integers with the
    named rounding; NaN is zero, and values that are too large become the limit.
    """
    if len(i.modifiers) < 2:
        raise d.unknown(i)
    to, source, rounding = d.type(i, -2), d.type(i), i.modifiers[:-2]
    floats = (to.name[0] == "f", source.name[0] == "f")
    allowed: set[str] = set()
    if floats == (True, False):
        allowed = {"rn"}
    elif floats == (False, True):
        allowed = {"rni", "rzi", "rmi", "rpi", "ftz"}
    elif floats == (True, True):
        allowed = {"ftz", "rn", "sat"}
    if not set(rounding) <= allowed or (any(floats) and 64 in (to.bits, source.bits)):
        raise d.unknown(i)
    register = d.register(i, i.operands[0])
    a = d.source(i, i.operands[1], source)
    narrow = np.dtype(f"{'if'[floats[1]] if source.signed or floats[1] else 'u'}{source.bytes}")
    wide = np.dtype(f"{'if'[floats[0]] if to.signed or floats[0] else 'u'}{to.bytes}")
    held = type_named(f"{to.name[0]}{register.width}")
    if held is None:
        raise d.unknown(i)
    view, index, ftz = held.view, register.index, "ftz" in rounding
    limited = "sat" in rounding
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    function = next((whole[r] for r in rounding if r in whole), None)

    def run(w: Warp, m: Mask) -> None:
        value = w.views[source.view][a]
        if floats[1]:
            value = flush(value) if ftz else value
            value = saturated(value) if limited else value
            if function is not None:
                limits = np.iinfo(wide)
                exact = np.nan_to_num(function(value.astype(np.float64)), nan=0.0)
                value = np.clip(exact, limits.min, limits.max)
        else:
            value = value.astype(narrow)
        put(w.views[view][index], value.astype(wide), m)

    return run


#: Emitters by opcode.
CONVERT = {"cvt": _convert}
