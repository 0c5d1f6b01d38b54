"""Moves, comparisons, selection and addresses.

PTX ISA, "Comparison and Selection Instructions" and "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import LOCAL_WINDOW, SHARED_WINDOW
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
from builder.ptx.errors import Fault
from builder.ptx.formats import flush, from_bf16, from_f16
from builder.ptx.source import Address, Instruction, Name, Negated, Number, Vector

if TYPE_CHECKING:
    from builder.ptx.block import Warp

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
    return lambda a, b: function(a, b) | _nan(a, b)


def _nan(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


_SIGNED = ("eq", "ne", "lt", "le", "gt", "ge")
#: Comparisons of floats.  One with NaN is false, unless its name has a ``u``.
_COMPARE_FLOATS: dict[str, Any] = {
    **{name: _COMPARE[name] for name in _SIGNED},
    **{f"{name}u": _or_nan(_COMPARE[name]) for name in _SIGNED},
    "ne": lambda a, b: (a < b) | (a > b),
    "nan": _nan,
    "num": lambda a, b: ~_nan(a, b),
}
#: Types of 16 bits that are compared by their values.
_HALVES = {"bf16": from_bf16, "f16": from_f16}


def _compare(d: Decoder, i: Instruction) -> Step:
    """``setp.cmp{.bool}{.ftz}.type p, a, b{, c}``; ``.ftz`` of float32 only."""
    words = list(i.modifiers[:-1])
    half = _HALVES.get(i.modifiers[-1]) if i.modifiers else None
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
