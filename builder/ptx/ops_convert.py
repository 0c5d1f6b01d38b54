"""Conversions between number formats.

PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import F32, U16, U32, Decoder, Mask, Step, put, type_named
from builder.ptx.formats import (
    finite_bf16,
    flush,
    from_bf16,
    from_e2m1,
    from_e4m3,
    from_f16,
    saturated,
    to_bf16,
    to_e2m1,
    to_e4m3,
    to_f16,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp
    from builder.ptx.source import Instruction

_FLOAT = type_named("f32")


def _convert(d: Decoder, i: Instruction) -> Step:
    """``cvt{.rnd}{.ftz}{.sat}.to.from d, a``; two sources give two packed values."""
    packed = ".".join(i.modifiers)
    if packed in _PACKED:
        return _packed(d, i, *_PACKED[packed])
    if packed in _UNPACKED:
        return _unpacked(d, i, *_UNPACKED[packed])
    if packed in ("f64.f32", "rn.f32.f64"):
        return _double(d, i)
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
    assert _FLOAT is not None
    kind = type_named("b32" if bits * count == 32 else "b16")
    assert kind is not None
    if len(i.operands) != count + 1:
        raise d.unknown(i, f"{len(i.operands)} operands")
    out = d.out(i, i.operands[0], kind)
    sources = [d.source(i, s, _FLOAT) for s in i.operands[1:]]
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


def _double(d: Decoder, i: Instruction) -> Step:
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
    assert _FLOAT is not None
    assert half is not None
    if len(i.modifiers) != 2:
        raise d.unknown(i)
    out, a = d.out(i, i.operands[0], _FLOAT), d.source(i, i.operands[1], half)

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
