"""Instructions on registers: moves, comparisons, arithmetic, logic and conversions.

PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions", "Half Precision
Floating Point Instructions", "Comparison and Selection Instructions", "Logic and Shift
Instructions" and "Data Movement and Conversion Instructions".  Functions with ``.approx`` are
computed exactly here and rounded once, which is within the error that the ISA allows a GPU, but not
the GPU's own bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import (
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
    CLOCKS,
    FUNCTIONS,
    LOCAL_WINDOW,
    PARAMETERS,
    RANK_SHIFT,
    SHARED_WINDOW,
    Fault,
    flush,
    from_bf16,
    from_f16,
    to_bf16,
    to_f16,
)
from builder.ptx.source import Address, Instruction, Name, Negated, Number, Pair, Vector

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
    kind = type_named(name)
    assert kind is not None
    return kind


def _move(d: Decoder, i: Instruction) -> Step:
    """``mov``: a register, a constant, an address; vectors packed and unpacked, low part first."""
    if len(i.modifiers) != 1:
        raise d.unknown(i)
    if i.has("b128"):
        return _move_wide(d, i)
    kind = d.type(i)
    to, source = i.operands
    if isinstance(to, Vector):
        return _unpack(d, i, kind, to)
    if isinstance(source, Vector):
        return _pack(d, i, kind, source)
    if isinstance(source, Name) and source.text in CLOCKS:
        return _clock(d, i, source.text)
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


def _move_wide(d: Decoder, i: Instruction) -> Step:
    """``mov.b128``: of a register, or from and to two of 64 bits."""
    kind, (to, source) = typed("b64"), map(d.halves, i.operands)
    pairs = [
        (d.out(i, one, kind), d.source(i, other, kind))
        for one, other in zip(to, source, strict=True)
        if one != Name("_")
    ]

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[U64]
        for (out, _), values in zip(pairs, [rows[a].copy() for _, a in pairs], strict=True):
            put(rows[out], values, m)

    return run


def _clock(d: Decoder, i: Instruction, name: str) -> Step:
    """A clock: it advances whenever it is read."""
    kind = typed(f"b{CLOCKS[name]}")
    out, shift = d.out(i, i.operands[0], kind), 32 * name.endswith("hi")

    def run(w: Warp, m: Mask) -> None:
        state = w.block.state
        state.clock += _TICKS
        put(w.views[kind.view][out], state.clock >> shift & (1 << kind.bits) - 1, m)

    return run


#: What a clock advances by.  Our choice: loops that wait for a time are short.
_TICKS = 256


#: numpy's type of a part that ``mov`` packs; parts of 8 bits have 16-bit registers.
_PARTS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def _part(d: Decoder, i: Instruction, kind: Type, vector: Vector) -> Type:
    """The type of each part: a half or a quarter."""
    if len(vector.parts) not in (2, 4):
        raise d.unknown(i, f"{len(vector.parts)} parts")
    return typed(f"b{kind.bits // len(vector.parts)}")


def _unpack(d: Decoder, i: Instruction, kind: Type, to: Vector) -> Step:
    part, count = _part(d, i, kind, to), len(to.parts)
    source = d.source(i, i.operands[1], typed(f"b{kind.bits}"))
    view, element = typed(f"b{kind.bits}").view, _PARTS.get(part.bits)
    if element is None:
        raise d.unknown(i)
    outs = [
        (number, d.out(i, one, part)) for number, one in enumerate(to.parts) if one != Name("_")
    ]

    def run(w: Warp, m: Mask) -> None:
        parts, rows = w.views[view][source].view(element), w.views[part.view]
        for number, out in outs:
            put(rows[out], parts[number::count], m)

    return run


def _pack(d: Decoder, i: Instruction, kind: Type, source: Vector) -> Step:
    part, count = _part(d, i, kind, source), len(source.parts)
    out = d.out(i, i.operands[0], typed(f"b{kind.bits}"))
    view, element = typed(f"b{kind.bits}").view, _PARTS.get(part.bits)
    if element is None:
        raise d.unknown(i)
    sources = [d.source(i, one, part) for one in source.parts]

    def run(w: Warp, m: Mask) -> None:
        parts, rows = w.views[view][out].view(element), w.views[part.view]
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


def _flushed_half(values: Any) -> Any:
    """float16 values as float32, with subnormal ones as zeros."""
    return np.where(np.abs(values) < np.float32(2.0**-14), np.copysign(0, values), values)


def _read_as(name: str, *, ftz: bool) -> Callable[[Any], Any] | None:
    """How the bits of a type become values that can be compared; None where they are values."""
    half = _FROM_HALF.get(name.removesuffix("x2"))
    if half is None:
        return flush if ftz else None
    return (lambda bits: _flushed_half(half(bits))) if ftz else half


def _halves_of(words: Any) -> tuple[Any, Any]:
    """The lower and the upper halves of words."""
    return words & np.uint32(0xFFFF), words >> np.uint32(16)


def _compare(d: Decoder, i: Instruction) -> Step:
    """``setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}``.

    q is of the opposite comparison; of two halves, p is of the lower and q of the upper ones.
    """
    name, words = i.modifiers[-1] if i.modifiers else "", list(i.modifiers[:-1])
    half, packed = name.removesuffix("x2") in _FROM_HALF, name.endswith("x2")
    kind = typed("b32" if packed else "b16") if half else d.type(i)
    comparisons = _COMPARE_FLOATS if half or kind.name[0] == "f" else _COMPARE
    function = comparisons.get(words[0]) if words else None
    if kind.bits in (1, 8) or function is None:
        raise d.unknown(i)
    ftz = words[-1] == "ftz" and name in ("f32", "f16", "f16x2")
    joined = words[1:-1] if ftz else words[1:]
    join = _JOIN.get(joined[0]) if joined else None
    to, pred = i.operands[0], typed("pred")
    if joined not in ([], ["and"], ["or"], ["xor"]) or (packed and not isinstance(to, Pair)):
        raise d.unknown(i)
    first, second = (to.first, to.second) if isinstance(to, Pair) else (to, Name("_"))
    out, other = (-1 if one == Name("_") else d.out(i, one, pred) for one in (first, second))
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    third = i.operands[3] if join else None
    negated = isinstance(third, Negated)
    flag = third.name if isinstance(third, Negated) else third
    c = d.source(i, flag, pred) if flag is not None else 0
    view, read = kind.view, _read_as(name, ftz=ftz)
    plain = read is None and join is None and other < 0 and isinstance(function, np.ufunc)

    def run(w: Warp, m: Mask) -> None:
        rows, flags = w.views[view], w.views[PRED]
        if plain:
            function(rows[a], rows[b], out=flags[out], where=m)
            return
        if packed:
            parts = zip(_halves_of(rows[a]), _halves_of(rows[b]), strict=True)
            results = [function(read(x), read(y)) for x, y in parts]  # type: ignore[misc]
        else:
            holds = function(*(rows[s] if read is None else read(rows[s]) for s in (a, b)))
            results = [holds, ~holds]
        if join is not None:
            joins = ~flags[c] if negated else flags[c].copy()
            results = [join(one, joins) for one in results]
        for place, value in zip((out, other), results, strict=True):
            if place >= 0:
                put(flags[place], value, m)

    return run


def _select_by_sign(d: Decoder, i: Instruction) -> Step:
    """``slct{.ftz}.type.s32`` and ``.f32``: a where c is not below zero, else b; NaN gives b."""
    words, kind, by = i.modifiers[:-2], d.type(i, -2), d.type(i)
    if words not in ((), ("ftz",)) or kind.bits < 16 or by.name not in ("s32", "f32"):
        raise d.unknown(i)
    out, c = d.out(i, i.operands[0], kind), d.source(i, i.operands[3], by)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    ftz = bool(words)

    def run(w: Warp, m: Mask) -> None:
        rows, signs = w.views[kind.view], w.views[by.view][c]
        holds = (flush(signs) if ftz else signs) >= 0
        put(rows[out], np.where(holds, rows[a], rows[b]), m)

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


def _policy(d: Decoder, i: Instruction) -> Step:
    """``createpolicy.fractional``: how a cache is used, which changes no value."""
    if i.modifiers[:1] != ("fractional",) or i.modifiers[-1] != "b64":
        raise d.unknown(i)
    out = d.out(i, i.operands[0], typed("b64"))

    def run(w: Warp, m: Mask) -> None:
        put(w.views[U64][out], np.uint64(0), m)

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
    count = {"v2": 2, "v4": 4}.get(i.modifiers[-2], 1)
    narrow = any(one.width not in _VIEW_OF or one.width < kind.bits for one in outs)
    if len(outs) != count or narrow or len(i.modifiers) > 3:
        raise d.unknown(i, "its registers are others")
    read = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")

    def run(w: Warp, m: Mask) -> None:
        data = w.block.state.launch.parameters
        if not 0 <= first <= len(data) - kind.bytes * len(outs):
            raise Fault(f"a read at {first} of {len(data)} bytes of parameters")
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
    "slct": _select_by_sign,
    "cvta": _convert_address,
    "createpolicy": _policy,
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
        if i.has("cc"):
            return _carry(d, i)
        if i.modifiers[-1] in _HALF_WORDS or i.has("sat"):
            return _table(d, i)
        kind = _integer(d, i, "lo") if i.opcode == "mul" else _integer(d, i)
        chosen = logical if kind.view == PRED else function
        if chosen is None or i.modifiers[-1][0] == "f":
            raise d.unknown(i)
        out, *sources = i.operands
        operands = tuple(d.source(i, s, kind) for s in sources)
        return elementwise(chosen, kind, d.out(i, out, kind), operands)

    return emit


def upper(a: Any, b: Any) -> Any:
    """The upper half of the product of two integers of one type."""
    bits, kind = 8 * a.itemsize, a.dtype
    if bits < 64:
        wide = np.dtype(f"{kind.kind}8")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(kind)
    x, y, half = a.view(_U64), b.view(_U64), _U64(32)
    (x0, x1), (y0, y1) = ((v & _U64(0xFFFFFFFF), v >> half) for v in (x, y))
    low = (x0 * y0 >> half) + (x1 * y0 & _U64(0xFFFFFFFF)) + (x0 * y1 & _U64(0xFFFFFFFF))
    high = x1 * y1 + (x1 * y0 >> half) + (x0 * y1 >> half) + (low >> half)
    if kind.kind == "i":
        high = high - np.where(a < 0, y, 0) - np.where(b < 0, x, 0)
    return high.view(kind)


def _multiply_integers(d: Decoder, i: Instruction) -> Step:
    """``mul``, ``mad``, ``mul24``, ``mad24``: ``.lo`` or ``.hi``, a half of the product, or
    ``.wide``, all of it; ``mad`` adds c; ``.sat`` of ``mad.hi.s32``."""
    if i.opcode == "mul" and i.has("lo"):
        return _plain(np.multiply)(d, i)
    kind = _integer(d, i, "lo", "hi", "wide", *(("sat",) if i.opcode == "mad" else ()))
    part, adds, of24 = i.modifiers[0], i.opcode.startswith("mad"), i.opcode.endswith("24")
    wide = type_named(f"{kind.name[0]}{2 * kind.bits}") if part == "wide" else kind
    if wide is None or kind.name[0] not in "us" or part not in ("lo", "hi", "wide"):
        raise d.unknown(i)
    if (of24 and (kind.bits != 32 or part == "wide")) or (
        i.has("sat") and (part, kind.name) != ("hi", "s32")
    ):
        raise d.unknown(i)
    out = d.out(i, i.operands[0], wide)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    c = d.source(i, i.operands[3], wide) if adds else -1
    whole, limited = np.dtype(f"{'i' if kind.signed else 'u'}8").type, i.has("sat")

    def product(x: Any, y: Any) -> Any:
        if of24:
            x, y = (v << v.dtype.type(8) >> v.dtype.type(8) for v in (x, y))
            both = x.astype(whole) * y.astype(whole)
            return (both >> whole(16 if part == "hi" else 0)).astype(x.dtype)
        if part == "hi":
            return upper(x, y)
        return x * y if part == "lo" else x.astype(whole) * y.astype(whole)

    def run(w: Warp, m: Mask) -> None:
        rows, outs = w.views[kind.view], w.views[wide.view]
        value = product(rows[a], rows[b])
        if limited:
            total = value.astype(np.int64) + outs[c]
            value = np.clip(total, -(2**31), 2**31 - 1).astype(np.int32)
        elif adds:
            value = value.astype(outs[c].dtype) + outs[c]
        put(outs[out], value.astype(outs[out].dtype), m)

    return run


def _carry(d: Decoder, i: Instruction) -> Step:
    """``add``, ``sub`` and ``mad`` with the carry flag: ``.cc`` writes it, ``addc`` ... read it.

    "Extended-Precision Integer Arithmetic Instructions".  A difference is the sum of a, the
    complement of b, and 1 or the flag, as GPUs compute it: the flag that it leaves is that sum's
    carry, which the next ``addc`` reads as it is.
    """
    reads, writes = i.opcode.endswith("c"), i.has("cc")
    name, kind = i.opcode.removesuffix("c"), _integer(d, i, "cc", "lo", "hi")
    if kind.bits < 32:
        raise d.unknown(i)
    out, *sources = (i.operands[0], *(d.source(i, s, kind) for s in i.operands[1:]))
    to, minus = d.out(i, out, kind), name == "sub"
    low, plain = i.has("lo"), typed(f"u{kind.bits}").view

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        if name == "mad":
            x = (
                rows[sources[0]] * rows[sources[1]]
                if low
                else upper(*(rows[s] for s in sources[:2]))
            )
            a, b = x.view(w.views[plain][to].dtype), w.views[plain][sources[2]]
        else:
            a, b = (w.views[plain][s] for s in sources)
        b = ~b if minus else b
        more = w.carry.astype(a.dtype) if reads else np.full_like(a, minus)
        first = a + b
        total = first + more
        flag = (first < a) | (total < first)
        put(w.views[plain][to], total, m)
        if writes:
            put(w.carry, flag, m)

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
    """``lop3{.bool}.b32``: for each bit, the entry of the table that the three bits select.

    With ``.and`` or ``.or`` a predicate tells whether the result is not zero, and another holds.
    """
    join = {("b32",): None, ("and", "b32"): np.logical_and, ("or", "b32"): np.logical_or}
    to, pred = i.operands[0], typed("pred")
    if i.modifiers not in join or len(i.operands) != (6 if isinstance(to, Pair) else 5):
        raise d.unknown(i)
    joined = join[i.modifiers]
    if (joined is None) is isinstance(to, Pair):
        raise d.unknown(i)
    kind = typed("b32")
    first, flag = (to.first, to.second) if isinstance(to, Pair) else (to, None)
    out = -1 if first == Name("_") else d.out(i, first, kind)
    nonzero = d.out(i, flag, pred) if flag is not None else -1
    other = d.source(i, i.operands[5], pred) if flag is not None else -1
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
        if out >= 0:
            put(rows[out], value, m)
        if joined is not None:
            flags = w.views[PRED]
            put(flags[nonzero], joined(value != 0, flags[other]), m)

    return run


#: The modes of ``prmt``: the selectors for the values 0 to 3 of c.
_SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip


def _permute(d: Decoder, i: Instruction) -> Step:
    """``prmt.b32``: four bytes of two words by selectors; bit 3 of one repeats the byte's sign."""
    mode = i.modifiers[1] if len(i.modifiers) == 2 else ""
    if i.modifiers[:1] != ("b32",) or (mode and mode not in _SELECTORS):
        raise d.unknown(i)
    kind = typed("b32")
    out = d.out(i, i.operands[0], kind)
    a, b, c = (d.source(i, s, kind) for s in i.operands[1:4])
    selectors = np.array(_SELECTORS[mode], np.uint32) if mode else None

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        pool = rows[a].astype(_U64) | rows[b].astype(_U64) << _U64(32)
        value = np.zeros(len(pool), np.uint32)
        by = rows[c] if selectors is None else selectors[rows[c] & np.uint32(3)]
        for number in range(4):
            chosen = (by >> np.uint32(4 * number)) & np.uint32(15)
            byte = (pool >> ((chosen & np.uint32(7)).astype(_U64) * _U64(8))).astype(np.uint32)
            byte &= np.uint32(0xFF)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(chosen & np.uint32(8), sign, byte).astype(np.uint32)
            value |= byte << np.uint32(8 * number)
        put(rows[out], value, m)

    return run


def _top(a: Any) -> Any:
    """The position of the highest bit that is set, or -1."""
    if a.itemsize == 8:
        high = (a >> _U64(32)).astype(np.uint32)
        return np.where(high != 0, _top(high) + 32, _top(a.astype(np.uint32)))
    return np.frexp(a.astype(np.float64))[1] - 1


_BYTE = np.arange(256, dtype=np.uint8)[:, None]
_ONES = np.unpackbits(_BYTE, axis=1).sum(1).astype(np.uint32)
_TURNED = np.packbits(np.unpackbits(_BYTE, axis=1)[:, ::-1], axis=1)[:, 0]


def _ones(_: Any, a: Any) -> Any:
    return _ONES[a.view(np.uint8).reshape(len(a), -1)].sum(1)


def _turned(_: Any, a: Any) -> Any:
    return np.ascontiguousarray(_TURNED[a.view(np.uint8).reshape(len(a), -1)[:, ::-1]]).view(
        a.dtype
    )[:, 0]


def _highest(form: Form, a: Any) -> Any:
    bits = 8 * a.itemsize
    plain = a.view(f"u{a.itemsize}")
    top = _top(np.where(a < 0, ~plain, plain) if form.kind.signed else plain)
    position = np.where(top < 0, -1, bits - 1 - top if "shiftamt" in form.words else top)
    return position.astype(np.int64) & 0xFFFFFFFF


def _mask_of(count: Any, bits: int) -> Any:
    """So many of the lowest bits; beyond the width, all."""
    one, many = _U64(1), count.astype(_U64)
    whole = np.where(many >= 64, ~_U64(0), (one << np.minimum(many, _U64(63))) - one)
    return whole & _U64((1 << bits) - 1)


def _field(bits: int, first: Any, count: Any) -> tuple[Any, Any]:
    """Position and length: of 8 bits each; the H100 uses all bits in the forms of 64."""
    mask = 255 if bits == 32 else 0xFFFFFFFF
    return first.astype(np.int64) & mask, count.astype(np.int64) & mask


def _extracted(form: Form, a: Any, b: Any, c: Any) -> Any:
    bits, plain = form.kind.bits, a.view(f"u{a.itemsize}").astype(_U64)
    first, count = _field(bits, b, c)
    inside = _mask_of(np.clip(bits - first, 0, count), bits)
    value = (plain >> np.minimum(first, 63).astype(_U64)) & inside
    if not form.kind.signed:
        return value
    last = np.minimum(first + count - 1, bits - 1)
    sign = (count > 0) & (plain >> np.maximum(last, 0).astype(_U64) & _U64(1) == 1)
    return np.where(sign, value | ~inside, value)


def _inserted(form: Form, a: Any, b: Any, c: Any, e: Any) -> Any:
    bits = form.kind.bits
    first, count = _field(bits, c, e)
    by = np.minimum(first, 63).astype(_U64)
    mask = np.where(first < bits, _mask_of(count, bits) << by, _U64(0))
    return (b.astype(_U64) & ~mask) | (a.astype(_U64) << by & mask)


def _funnel(form: Form, a: Any, b: Any, c: Any) -> Any:
    pool = b.astype(_U64) << _U64(32) | a.astype(_U64)
    by = (np.minimum(c, 32) if "clamp" in form.words else c & np.uint32(31)).astype(_U64)
    return pool << by >> _U64(32) if "l" in form.words else pool >> by


def _parts(words: Any, kind: str, bits: int) -> Any:
    """The signed or unsigned parts of words, the lowest first."""
    parts = np.ascontiguousarray(words).view(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    return parts.reshape(len(words), -1).astype(np.int64)


def _dot(form: Form, a: Any, b: Any, c: Any) -> Any:
    *half, left, right = form.words
    x, y = _parts(a, left, 8 * (1 + len(half))), _parts(b, right, 8)
    if half:
        y = y[:, 2:] if half == ["hi"] else y[:, :2]
    return (x * y).sum(1) + c


def _bit_mask(form: Form, a: Any, b: Any) -> Any:
    first, count = (np.minimum(v, 32) if "clamp" in form.words else v & 31 for v in (a, b))
    return _mask_of(count, 32) << first.astype(_U64)


def _sign_extended(form: Form, a: Any, b: Any) -> Any:
    count = np.minimum(b, 32) if "clamp" in form.words else b & 31
    mask, value = _mask_of(count, 32), a.view(np.uint32).astype(_U64)
    sign = value >> np.maximum(count.astype(np.int64) - 1, 0).astype(_U64) & _U64(1) == 1
    negative = form.kind.signed & sign & (count > 0)
    return np.where(negative, value | ~mask, value & mask)


def _nth_set(_: Any, mask: Any, base: Any, offset: Any) -> Any:
    """``fns``: the n-th set bit from a base on, upwards or downwards; none from beyond bit 31."""

    def one(bits: int, first: int, n: int) -> int:
        if n == -(2**31):  # seen on an H200
            return 0
        if first > 31:
            return 0xFFFFFFFF
        if n == 0:
            return first if bits >> first & 1 else 0xFFFFFFFF
        order = range(first, 32) if n > 0 else range(first, -1, -1)
        places = [place for place in order if bits >> place & 1]
        return places[abs(n) - 1] if len(places) >= abs(n) else 0xFFFFFFFF

    return np.array([one(*map(int, three)) for three in zip(mask, base, offset, strict=True)])


_BY_PART: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    "absdiff": lambda a, b: np.abs(a - b), "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}  # fmt: skip


def _joined(parts: Any, bits: int) -> Any:
    return np.ascontiguousarray(parts.astype(f"u{bits // 8}")).view(np.uint32)[:, 0]


def _halves_of_words(form: Form, a: Any, b: Any) -> Any:
    kind = form.name[0]
    results = _BY_PART[form.opcode](*(_parts(v, kind, 16) for v in (a, b)))
    low = -(2**15) if kind == "s" else 0
    return _joined(np.clip(results, low, low + 65535) if "sat" in form.words else results, 16)


def _video(form: Form, a: Any, b: Any, c: Any) -> Any:
    """``vadd2`` ... ``vmax4``: each part by itself; ``.add`` sums them up with c."""
    operation, bits = form.opcode[1:-1], 32 // int(form.opcode[-1])
    to, left, right, *more = form.words
    results = _BY_PART[operation](_parts(a, left, bits), _parts(b, right, bits))
    if more == ["add"]:
        return results.sum(1) + c
    if more == ["sat"]:
        low = -(1 << bits - 1) if to[0] == "s" else 0
        results = np.clip(results, low, low + (1 << bits) - 1)
    return _joined(results, bits)


def _saturated_sum(form: Form, a: Any, b: Any) -> Any:
    total = _BY_PART[form.opcode](a.astype(np.int64), b.astype(np.int64))
    return np.clip(total, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Form:
    """The words of an instruction, and the type that the last one names."""

    opcode: str
    words: tuple[str, ...]
    name: str
    kind: Type


#: Forms of modifiers, and the types of the result and of the operands: ``T`` is the last
#: modifier's own, and a number or a float is that type.
_SIMPLE: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
    "popc": [("b32|b64", "u32 T", _ones)],
    "clz": [("b32|b64", "u32 T", lambda f, a: f.kind.bits - 1 - _top(a))],
    "brev": [("b32|b64", "T T", _turned)],
    "bfind": [(r"(shiftamt\.)?[us](32|64)", "u32 T", _highest)],
    "bfe": [("[us](32|64)", "T T u32 u32", _extracted)],
    "bfi": [("b(32|64)", "T T T u32 u32", _inserted)],
    "shf": [(r"[lr]\.(wrap|clamp)\.b32", "T T T u32", _funnel)],
    "dp4a": [(r"[us]32\.[us]32", "T u32 u32 T", _dot)],
    "dp2a": [(r"(lo|hi)\.[us]32\.[us]32", "T u32 u32 T", _dot)],
    "bmsk": [(r"(clamp|wrap)\.b32", "T T T", _bit_mask)],
    "szext": [(r"(clamp|wrap)\.[us]32", "T T u32", _sign_extended)],
    "fns": [("b32", "T T u32 s32", _nth_set)],
    "sad": [
        ("[us](16|32|64)", "T T T T", lambda _, a, b, c: np.where(a < b, b - a, a - b) + c)
    ],
    "cnot": [("b(16|32|64)", "T T", lambda _, a: a == 0)],
    **{
        name: [(r"(sat\.)?[us]16x2", "u32 u32 u32", _halves_of_words),
               (r"sat\.s32", "T T T", _saturated_sum)]
        for name in ("add", "sub", "min", "max")
    },
    **{
        f"v{name}{count}": [(r"[us]32\.[us]32\.[us]32(\.sat|\.add)?", "u32 u32 u32 u32", _video)]
        for name in _BY_PART for count in (2, 4)
    },
}  # fmt: skip
_HALF_WORDS = ("u16x2", "s16x2")


def _table(d: Decoder, i: Instruction) -> Step:
    """An instruction of the table above."""
    packed = ".".join(i.modifiers)
    forms = [form for form in _SIMPLE[i.opcode] if re.fullmatch(form[0], packed)]
    if not forms:
        raise d.unknown(i)
    _, types, function = forms[0]
    name = i.modifiers[-1]
    own = type_named(name) or typed("u32")
    to, *kinds = (own if word == "T" else typed(word) for word in types.split())
    if len(i.operands) != len(kinds) + 1:
        raise d.unknown(i, f"{len(i.operands)} operands")
    out = d.out(i, i.operands[0], to)
    sources = [(k.view, d.source(i, s, k)) for k, s in zip(kinds, i.operands[1:], strict=True)]
    form = Form(i.opcode, i.modifiers, name, own)

    def run(w: Warp, m: Mask) -> None:
        row = w.views[to.view][out]
        value = function(form, *(w.views[view][s] for view, s in sources))
        put(row, np.asarray(value).astype(row.dtype), m)

    return run


#: Halves by the bits that hold them, what ``set`` makes of each, and its "true" that is a number.
_HALVES = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
_WHOLE = ("u16", "s16", "u32", "s32")
_SET_FROM = {
    "f16": ("f16", *_WHOLE), "bf16": ("bf16", *_WHOLE), "f16x2": ("f16x2",), "bf16x2": ("bf16x2",)
}  # fmt: skip
_TRUE = {
    "f32": np.float32(1), "f16": np.uint32(0x3C00), "f16x2": np.uint32(0x3C00),
    "bf16": np.uint32(0x3F80), "bf16x2": np.uint32(0x3F80),
}  # fmt: skip


def _set(d: Decoder, i: Instruction) -> Step:
    """``set.cmp{.ftz}.to.from``: all ones, or 1.0, where the comparison holds, else zero."""
    name, source, target = i.modifiers[0], i.modifiers[-1], "".join(i.modifiers[-2:-1])
    kind = typed(_HALVES[source]) if source in _HALVES else d.type(i)
    to = typed(_HALVES[target]) if target in _HALVES else d.type(i, -2)
    right = to.bits == 32 and target not in _HALVES
    if source in _SET_FROM:
        right = target in _SET_FROM[source]
    floats = source in _HALVES or kind.name[0] == "f"
    function = (_COMPARE_FLOATS if floats else _COMPARE).get(name)
    if function is None or not right or set(i.modifiers[1:-2]) - {"ftz"}:
        raise d.unknown(i)
    out = d.out(i, i.operands[0], to)
    a, b = (d.source(i, s, kind) for s in i.operands[1:3])
    read = _read_as(source, ftz=i.has("ftz")) or (lambda v: v)
    one: Any = _TRUE.get(target, np.uint32(0xFFFFFFFF))
    packed = source.endswith("x2")

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[kind.view]
        row = w.views[to.view][out]
        if packed:
            parts = zip(_halves_of(rows[a]), _halves_of(rows[b]), strict=True)
            low, high = (np.where(function(read(x), read(y)), one, 0) for x, y in parts)
            value = low | high << 16
        else:
            value = np.where(function(read(rows[a]), read(rows[b])), one, 0)
        put(row, value.astype(row.dtype), m)

    return run


def _which_space(d: Decoder, i: Instruction) -> Step:
    """``isspacep``: whether a generic address is of a state space."""
    space = i.modifiers[0].partition("::")[0]
    if len(i.modifiers) != 1 or space not in ("global", "const", "local", "shared", "param"):
        raise d.unknown(i)
    out = d.out(i, i.operands[0], typed("pred"))
    a = d.source(i, i.operands[1], typed("u64"))
    own = SHARED_WINDOW + (1 << RANK_SHIFT) if i.has("shared::cta") else FUNCTIONS
    windows = {"local": (LOCAL_WINDOW, SHARED_WINDOW), "shared": (SHARED_WINDOW, own),
               "param": (PARAMETERS, 2 * PARAMETERS)}  # fmt: skip
    first, end = (np.uint64(v) for v in windows.get(space, (0, LOCAL_WINDOW)))

    def run(w: Warp, m: Mask) -> None:
        at = w.views[U64][a]
        put(w.views[PRED][out], (at >= first) & (at < end), m)

    return run


def _map_to_block(d: Decoder, i: Instruction) -> Step:
    """``mapa`` and ``getctarank``: shared memory of a block of the cluster, and whose it is.

    Raises:
        PtxError: the form is unknown.
    """
    rank = i.opcode == "getctarank"
    if i.modifiers not in (("shared::cluster", "u32"), ("shared::cluster", "u64"), ("u64",)) and (
        not rank or i.modifiers != ("u32",)
    ):
        raise d.unknown(i)
    kind = d.type(i)
    wide = "u32" if i.has("shared::cluster") else "u64"
    out = d.out(i, i.operands[0], typed("u32") if rank else kind)
    a = d.source(i, i.operands[1], typed(wide if rank else kind.name))
    block = -1 if rank else d.source(i, i.operands[2], typed("u32"))

    def run(w: Warp, m: Mask) -> None:
        if rank:
            ranks = (w.views[typed(wide).view][a] >> RANK_SHIFT & 0xFF).astype(np.int64)
            put(w.views[U32][out], np.where(ranks, ranks - 1, w.block.rank), m)
            return
        ranks, count = w.views[U32][block].astype(np.int64), len(w.block.cluster.blocks)
        if (ranks[w.lanes(m)] >= count).any():
            raise Fault(f"mapa to block {ranks[w.lanes(m)].max()} of a cluster of {count}")
        rows = w.views[kind.view]
        places = np.where(ranks == w.block.rank, 0, ranks + 1) << RANK_SHIFT
        plain = rows[a] & ~rows.dtype.type(0xFF << RANK_SHIFT)
        put(rows[out], plain | places.astype(rows.dtype), m)

    return run


#: Emitters by opcode.
INTEGER: dict[str, Emitter] = {
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _multiply_integers,
    "mad": lambda d, i: (_carry if i.has("cc") else _multiply_integers)(d, i),
    "mul24": _multiply_integers,
    "mad24": _multiply_integers,
    **dict.fromkeys(("addc", "subc", "madc"), _carry),
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
    "set": _set,
    "isspacep": _which_space,
    "mapa": _map_to_block,
    "getctarank": _map_to_block,
}
INTEGER |= {name: _table for name in _SIMPLE if name not in INTEGER}

# ------------------------------------------------------------------------------------- extremes


#: Conversions of types of 16 bits to float32, exactly, and back.
HALVES = {"bf16": (from_bf16, to_bf16), "f16": (from_f16, to_f16)}


def lesser(a: Any, b: Any) -> Any:
    """The lesser number, the number of a number and a NaN; -0 is less than +0."""
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def greater(a: Any, b: Any) -> Any:
    """The greater number, the number of a number and a NaN; +0 is greater than -0."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))
