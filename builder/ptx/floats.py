"""Instructions on floating-point numbers: arithmetic in all formats and roundings, conversions.

PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Mixed
Precision Floating Point Instructions" and "Data Movement and Conversion Instructions: cvt".
Functions with ``.approx`` are computed exactly here and rounded once, which is within the error
that the ISA allows a GPU, but not the GPU's own bits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
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
from builder.ptx.machine import (
    E2M3,
    E3M2,
    SMALLEST_NORMAL,
    flush,
    from_bf16,
    from_e2m1,
    from_e4m3,
    from_e5m2,
    from_f16,
    from_ue8m0,
    one_nan,
    saturated,
    some,
    to_bf16,
    to_e2m1,
    to_e4m3,
    to_e5m2,
    to_f16,
    to_six_bits,
    to_ue8m0,
)
from builder.ptx.registers import greater, lesser, typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp
    from builder.ptx.source import Instruction

# ---------------------------------------------------------------------------------------- rounding


#: The next number for a direction that lies below the exact value, above it, or nearer to zero.
_MODES = ("rn", "rz", "rm", "rp")


def odd(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 or halves in float64, rounded to odd.

    Another rounding, to at most 51 bits, is then the only one.  The product is exact in float64.
    """
    product = a.astype(np.float64) * np.asarray(b, np.float64)
    return odd_sum(product, np.asarray(c, np.float64))


def odd_sum(product: Any, addend: Any) -> Any:
    """The sum of float64 values rounded to odd."""
    total = product + addend
    # what the addition rounded away (Knuth's two-sum); with it the second rounding is right, by
    # odd bits
    part = total - product
    residue = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (residue != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (residue > 0) == (total > 0)
    return np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


def directed(values: Any, mode: str, residue: Any = 0, kind: Any = np.float32) -> Any:
    """float64 values as float32 or float16, rounded once.

    ``residue`` is the sign of what rounding took from the values themselves, where they are
    numbers of the result.
    """
    near = values.astype(kind)
    if mode == "rn":
        return near
    with np.errstate(all="ignore"):
        off = np.sign(values - near.astype(np.float64))
    off = np.where(off == 0, residue, off)
    return _moved(near, off, mode)


def _moved(near: Any, off: Any, mode: str) -> Any:
    """The neighbour of the nearest number, if the exact value lies on the side ``off`` of it."""
    infinity = near.dtype.type(np.inf)
    down = (off < 0) & (mode == "rm" or (mode == "rz") & (near > 0))
    up = (off > 0) & (mode == "rp" or (mode == "rz") & (near < 0))
    return np.where(
        down, np.nextafter(near, -infinity), np.where(up, np.nextafter(near, infinity), near)
    )


def _as_odd_f32(values: Any) -> Any:
    """float64 values as float32, rounded to odd."""
    near = directed(values, "rz")
    bits = near.view(np.uint32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != values)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


def narrowed(values: Any, name: str, mode: str = "rn") -> Any:
    """float64 values in another format, rounded once: float32, float64, or the bits of a half."""
    match name:
        case "f64":
            return values
        case "f32":
            return directed(values, mode)
        case "f16":
            half = directed(values, mode, kind=np.float16).view(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FFF), half)
        case "bf16" if mode == "rn":
            return to_bf16(_as_odd_f32(values)).astype(np.uint16)
        case "bf16":
            bits = directed(values, mode).view(np.uint32)
            away = ((bits & np.uint32(0xFFFF)) != 0) & np.isfinite(values)
            away &= np.signbit(values) if mode == "rm" else ~np.signbit(values) & (mode == "rp")
            cut = ((bits >> np.uint32(16)) + away).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FFF), cut)
        case _:
            return _tf32(values, mode)


def _tf32(values: Any, mode: str) -> Any:
    """float64 values as float32 whose last 13 bits are zero; ``rna``: ties away from zero."""
    bits = (directed(values, "rz") if mode == "rz" else _as_odd_f32(values)).view(np.uint32)
    if mode == "rna":
        bits = bits + np.uint32(0x1000)
    elif mode == "rn":
        bits = bits + (np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)))
    bits = np.where(np.isinf(values), values.astype(np.float32).view(np.uint32), bits)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), bits) & np.uint32(0xFFFFE000)


# ------------------------------------------------------------------- operations of the four formats


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once to nearest even.

    The sum in float64 may be rounded too: that shows where it lies half-way between two of float32,
    or where these are subnormal and so lie elsewhere.
    """
    total = np.multiply(a, b, dtype=np.float64) + c
    if some(total.view(np.int64) & _BELOW == _HALF) or some(
        (np.abs(total) < _NORMAL) & (total != 0)
    ):
        return odd(a, b, c).astype(np.float32)
    return total.astype(np.float32)


#: The bits of float64 that float32 has not, half of its last one, and its smallest normal number.
_BELOW, _HALF, _NORMAL = np.int64(2**29 - 1), np.int64(2**28), 2.0**-126
#: The number of 24 bits below that, and the middle between the two, which is rounded up.
_BELOW_NORMAL, _MIDDLE = _NORMAL - 2.0**-150, _NORMAL - 2.0**-151


def _quotient(a: Any, b: Any) -> tuple[Any, Any]:
    """a / b in float64, and the sign of what it lost where it is a number of float32."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    quotient = x / y
    rest = x - quotient * y
    return quotient, np.where(np.isfinite(rest), np.sign(rest) * np.sign(y), 0)


def _root(a: Any) -> tuple[Any, Any]:
    x = a.astype(np.float64)
    root = np.sqrt(x)
    rest = x - root * root
    return root, np.where(np.isfinite(rest), np.sign(rest), 0)


def _zero_down(result: Any, exact: Any, *parts: Any) -> Any:
    """A sum of exactly zero, rounded downwards, is -0 unless all parts are positive."""
    positive = ~np.logical_or.reduce([np.signbit(p) for p in parts])
    return np.where((exact == 0) & ~positive, result.dtype.type(-0.0), result)


def _once(function: Any) -> Any:
    """Compute in float64, round once."""
    return lambda *values: function(*(v.astype(np.float64) for v in values)).astype(np.float32)


@dataclass(frozen=True)
class _Operation:
    """An operation: of float32 or float64 to nearest, in float64 with what is lost, and exactly."""

    count: int
    nearest: Callable[..., Any]
    wide: Callable[..., tuple[Any, Any]] | None = None
    exact: Callable[..., Fraction] | None = None
    #: the parts that are summed
    parts: Callable[..., tuple[Any, ...]] | None = None


_ONE = np.ones(1, np.float32)
_OPERATIONS: dict[str, _Operation] = {
    "add": _Operation(2, np.add, lambda a, b: (odd(a, _ONE, b), 0), lambda a, b: a + b,
                      lambda a, b: (a, b)),
    "sub": _Operation(2, np.subtract, lambda a, b: (odd(a, _ONE, -b), 0), lambda a, b: a - b,
                      lambda a, b: (a, -b)),
    "mul": _Operation(2, np.multiply, lambda a, b: (a.astype(np.float64) * b, 0),
                      lambda a, b: a * b),
    "fma": _Operation(3, _fused, lambda a, b, c: (odd(a, b, c), 0), lambda a, b, c: a * b + c,
                      lambda a, b, c: (a * b, c)),
    "div": _Operation(2, _once(np.divide), _quotient, lambda a, b: a / b),
    "rcp": _Operation(1, _once(np.reciprocal), lambda a: _quotient(np.ones_like(a), a),
                      lambda a: 1 / a),
    "sqrt": _Operation(1, _once(np.sqrt), _root),
    "rsqrt": _Operation(1, _once(lambda v: 1 / np.sqrt(v))),
    "ex2": _Operation(1, _once(np.exp2)),
    "lg2": _Operation(1, _once(np.log2)),
    "sin": _Operation(1, _once(np.sin)),
    "cos": _Operation(1, _once(np.cos)),
    "tanh": _Operation(1, _once(np.tanh)),
    "min": _Operation(2, lesser),
    "max": _Operation(2, greater),
    "abs": _Operation(1, np.abs),
    "neg": _Operation(1, np.negative),
}  # fmt: skip
_OPERATIONS["mad"] = _OPERATIONS["fma"]
_ROUND, _FTZ = r"(r[nzmp]\.)?", r"(ftz\.)?"
_LIMITS = rf"{_FTZ}(NaN\.)?(xorsign\.abs\.)?"
#: By opcode: patterns of the modifiers before the type, each with its types.
_SUMS = [
    (rf"{_ROUND}{_FTZ}(sat\.)?", "f32"), (_ROUND, "f64"), (rf"{_ROUND}{_FTZ}", "f32x2"),
    (rf"(rn\.)?{_FTZ}(sat\.)?", "f16 f16x2"), (r"(rn\.)?", "bf16 bf16x2"),
]  # fmt: skip
_EXTREMES = [(_LIMITS, "f32 f16 f16x2 bf16 bf16x2"), ("", "f64")]
_SIGNS = [(_FTZ, "f32 f16 f16x2"), ("", "f64 bf16 bf16x2")]
_APPROXIMATE = [(rf"approx\.{_FTZ}", "f32")]
_FORMS: dict[str, list[tuple[str, str]]] = {
    "add": _SUMS, "sub": _SUMS, "mul": _SUMS,
    "fma": [
        (rf"r[nzmp]\.{_FTZ}(sat\.)?", "f32"), (r"r[nzmp]\.", "f64"),
        (rf"r[nzmp]\.{_FTZ}", "f32x2"), (rf"rn\.{_FTZ}(sat\.|relu\.)?", "f16 f16x2"),
        (r"rn\.(relu\.)?", "bf16 bf16x2"),
        (r"rn\.oob\.(relu\.)?", "f16 f16x2 bf16 bf16x2")],
    "mad": [(rf"r[nzmp]\.{_FTZ}(sat\.)?", "f32"), (r"r[nzmp]\.", "f64")],
    "div": [(rf"(r[nzmp]|approx|full)\.{_FTZ}", "f32"), (r"r[nzmp]\.", "f64")],
    "rcp": [(rf"(r[nzmp]|approx)\.{_FTZ}", "f32"), (r"r[nzmp]\.|approx\.ftz\.", "f64")],
    "sqrt": [(rf"(r[nzmp]|approx)\.{_FTZ}", "f32"), (r"r[nzmp]\.", "f64")],
    "rsqrt": [*_APPROXIMATE, (r"approx\.(ftz\.)?", "f64")],
    "lg2": _APPROXIMATE, "sin": _APPROXIMATE, "cos": _APPROXIMATE,
    "ex2": [(rf"approx\.{_FTZ}", "f32 f16 f16x2 bf16 bf16x2")],
    "tanh": [(r"approx\.", "f32 f16 f16x2 bf16 bf16x2")],
    "min": _EXTREMES, "max": _EXTREMES, "abs": _SIGNS, "neg": _SIGNS,
}  # fmt: skip
#: The register and the view of a type, and numpy's type of its numbers.
_REGISTERS: dict[str, tuple[str, int, Any]] = {
    "f32": ("f32", F32, np.float32), "f64": ("f64", F64, np.float64),
    "f32x2": ("b64", U64, np.float32), "f16": ("b16", U16, np.uint16),
    "bf16": ("b16", U16, np.uint16), "f16x2": ("b32", U32, np.uint16),
    "bf16x2": ("b32", U32, np.uint16),
}  # fmt: skip
_DECODED = {"f16": from_f16, "bf16": from_bf16}
_ENCODED = {"f16": to_f16, "bf16": to_bf16}
_TINY_F16 = 2.0**-14
#: What a tensor map fills with, if it asks for NaN; ``fma.oob`` gives 0 for a product with it.
_OOB_NAN = 0x7FF7


def _arithmetic(d: Decoder, i: Instruction) -> Step:
    """``op{.rnd}{.ftz}{.sat}.type d, a, b, c``, of one number or of two in one register."""
    operation, name = _OPERATIONS[i.opcode], i.modifiers[-1]
    if i.modifiers[-2:-1] == ("f32",) and name in _DECODED:
        return _mixed(d, i)
    words = "".join(f"{word}." for word in i.modifiers[:-1])
    patterns = (p for p, names in _FORMS[i.opcode] if name in names.split())
    if not any(re.fullmatch(pattern, words) for pattern in patterns):
        raise d.unknown(i)
    register, view, numbers = _REGISTERS[name]
    kind = typed(register)
    function = _function(i.opcode, name.removesuffix("x2"), frozenset(i.modifiers[:-1]))
    if i.opcode in ("min", "max") and name == "f32" and len(i.operands) == 4:
        function = _of_three(function)
    elif len(i.operands) != operation.count + 1:
        raise d.unknown(i, f"{len(i.operands)} operands")
    out, *sources = (d.out(i, i.operands[0], kind), *(d.source(i, s, kind) for s in i.operands[1:]))

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[view]
        result = function(*(rows[s].view(numbers) for s in sources))
        put(rows[out], result.astype(numbers).view(rows[out].dtype), m)

    return run


def _of_three(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c: function(function(a, b), c)


def _function(opcode: str, name: str, words: frozenset[str]) -> Callable[..., Any]:
    """An operation on arrays of one format."""
    mode = next((one for one in _MODES if one in words), "rn")
    if name == "f64":
        return double(opcode, mode, approximate={"approx", "ftz"} <= words)
    if name != "f32":
        return _of_halves(opcode, name, words)
    operation, ftz = _OPERATIONS[opcode], "ftz" in words
    wide = operation.wide

    def of(*operands: Any) -> Any:
        values = [flush(v) for v in operands] if ftz else operands
        if mode == "rn" or wide is None:
            result = operation.nearest(*values)
        else:
            exact, residue = wide(*values)
            result = directed(exact, mode, residue)
            if mode == "rm" and operation.parts:
                result = _zero_down(result, exact, *operation.parts(*values))
        if ftz:
            result = _flushed(result, wide(*values)[0], mode) if wide else flush(result)
        if "approx" in words and opcode == "div":
            huge = (np.abs(values[1]) > 2.0**126) & np.isfinite(values[1])
            result = np.where(huge, values[0] * np.copysign(np.float32(0), values[1]), result)
        result = _limited(result, values, opcode, words)
        return one_nan(saturated(result) if "sat" in words else result)

    return of


def _flushed(result: Any, exact: Any, mode: str) -> Any:
    """Results that are subnormal once they are rounded to 24 bits are zero.

    Just below the smallest normal number, what is rounded up to it stays.
    """
    up = (exact < 0) if mode == "rm" else (exact > 0) if mode == "rp" else False
    least = np.where(up, np.nextafter(_BELOW_NORMAL, 1), _MIDDLE if mode == "rn" else _NORMAL)
    small = (np.abs(exact) < least) & ~np.isnan(exact)
    return np.where(small, np.copysign(np.float32(0), result), result) if some(small) else result


def _limited(result: Any, values: Any, opcode: str, words: frozenset[str]) -> Any:
    """``.NaN`` and ``.xorsign.abs`` of ``min`` and ``max``."""
    if opcode not in ("min", "max") or not {"NaN", "xorsign"} & words:
        return result
    a, b = values
    if "xorsign" in words:
        size = (lesser if opcode == "min" else greater)(np.abs(a), np.abs(b))
        result = np.where(np.signbit(a) ^ np.signbit(b), -size, size)
    return np.where(np.isnan(a) | np.isnan(b), np.nan, result) if "NaN" in words else result


def _signed(values: Any, bits: Any) -> Any:
    return np.copysign(values, np.where(bits >> np.uint16(15), np.float32(-1), np.float32(1)))


def _out_of_bounds(bits: Any) -> Any:
    """Whether a 16-bit number is the NaN of elements outside of a tensor, of either sign.

    Recorded on an H200, with all patterns: the same for float16 and bfloat16.
    """
    return (bits & np.uint16(0x7FFF)) == _OOB_NAN


def _of_halves(opcode: str, name: str, words: frozenset[str]) -> Callable[..., Any]:
    """An operation on bits of 16-bit numbers.

    The sum or product of two has, rounded to float32, all bits that rounding needs.
    """
    operation, decode, encode = _OPERATIONS[opcode], _DECODED[name], _ENCODED[name]
    if opcode in ("abs", "neg") and "ftz" not in words:
        sign = np.uint16(0x8000)
        absolute, one_nan_only = opcode == "abs", np.uint16(0x7FFF)
        return lambda a: np.where(
            np.isnan(decode(a)), one_nan_only, a & ~sign if absolute else a ^ sign
        )
    tiny = _TINY_F16 if name == "f16" else float(SMALLEST_NORMAL)

    def zeroed(values: Any) -> Any:
        return np.where(np.abs(values) < tiny, np.copysign(values.dtype.type(0), values), values)

    def of(*operands: Any) -> Any:
        values = [decode(v) for v in operands]
        if "ftz" in words and name == "f16":
            values = [zeroed(v) for v in values]
        if opcode == "fma":
            bits = narrowed(odd(*values), name)
        else:
            if "xorsign" in words:  # decoding loses the sign of a NaN
                values = [_signed(v, bits) for v, bits in zip(values, operands, strict=True)]
            result = _limited(operation.nearest(*values), values, opcode, words)
            bits = encode(result.astype(np.float32)).astype(np.uint16)
        if "oob" in words:
            bits = np.where(_out_of_bounds(operands[0]) | _out_of_bounds(operands[1]), 0, bits)
            bits = bits.astype(np.uint16)
        if not words & {"sat", "relu", "ftz"}:
            return bits
        decoded = decode(bits)
        decoded = zeroed(decoded) if "ftz" in words else decoded
        decoded = saturated(decoded) if "sat" in words else decoded
        decoded = _positive(decoded) if "relu" in words else decoded
        return encode(decoded).astype(np.uint16)

    return of


# ---------------------------------------------------------------------------------------- float64


#: The bit that makes a NaN quiet, and the NaN that an operation makes.
_QUIET, _NEW_NAN = np.uint64(1 << 51), np.uint64(0xFFF8000000000000)


def double(opcode: str, mode: str, *, approximate: bool = False) -> Callable[..., Any]:
    """An operation on float64, rounded once; subnormal numbers are kept."""
    operation = _OPERATIONS[opcode]
    nearest: Any = {"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt,
                    "rsqrt": lambda v: 1 / np.sqrt(v), "fma": fused_doubles,
                    "mad": fused_doubles}.get(opcode, operation.nearest)  # fmt: skip
    if opcode in ("abs", "neg"):
        sign = np.uint64(1 << 63)
        absolute = opcode == "abs"

        def bits(v: Any) -> Any:
            return v & ~sign if absolute else v ^ sign

        return lambda a: np.where(
            np.isnan(a), _quiet(a).view(np.uint64), bits(a.view(np.uint64))
        ).view(np.float64)

    def of(*values: Any) -> Any:
        result = nearest(*values)
        if mode != "rn":
            result = _exactly(opcode, mode, values, result)
        result = _with_nans(result, values, opcode)
        if approximate:  # the upper half of the bits
            result = (result.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64)
        return result

    return of


def _quiet(values: Any) -> Any:
    return (values.view(np.uint64) | _QUIET).view(np.float64)


def _with_nans(result: Any, values: Any, opcode: str) -> Any:
    """The NaN of an operation: an operand that is one, made quiet.

    Recorded on an H100: the last, of a quotient the first, and of ``fma`` b before c before a.
    """
    nan = np.isnan(result)
    if not some(nan):
        return result
    bits = np.where(nan, _NEW_NAN, result.view(np.uint64))
    if opcode in ("fma", "mad"):
        values = (values[0], values[2], values[1])
    for value in values[::-1] if opcode == "div" else values:
        bits = np.where(nan & np.isnan(value), value.view(np.uint64) | _QUIET, bits)
    return bits.view(np.float64)


def fused_doubles(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once to nearest even."""
    product = a * b
    safe = _moderate(a) & _moderate(b) & (_moderate(c) | (c == 0)) & (np.abs(product) > 2.0**-900)
    # Dekker's product, and Boldo's and Melquiond's sum of three (rounded to odd)
    (a1, a0), (b1, b0) = _halved(a), _halved(b)
    low = a0 * b0 - (((product - a1 * b1) - a0 * b1) - a1 * b0)
    high, part = _two_sum(c, low)
    total, rest = _two_sum(product, high)
    result = total + odd_sum(rest, part)
    if some(~safe):
        result = np.where(safe, result, _exactly("fma", "rn", (a, b, c), product + c))
    return result


def _moderate(values: Any) -> Any:
    size = np.abs(values)
    return (size > 2.0**-400) & (size < 2.0**400)


def _halved(values: Any) -> tuple[Any, Any]:
    scaled = values * 134217729.0
    high = scaled - (scaled - values)
    return high, values - high


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _exactly(opcode: str, mode: str, values: Any, plain: Any) -> Any:
    """Lane by lane with fractions; where an operand or the result is not finite, as it is."""
    results = plain.copy()
    exact = _OPERATIONS[opcode].exact
    for lane in range(len(plain)):
        operands = [float(v[lane]) for v in values]
        if not all(map(math.isfinite, operands)):
            continue
        if opcode == "sqrt" and operands[0] >= 0:
            near = math.sqrt(operands[0])
            off = (Fraction(operands[0]) > Fraction(near) ** 2) - (
                Fraction(operands[0]) < Fraction(near) ** 2
            )
        elif exact is None or opcode == "sqrt" or (opcode in ("div", "rcp") and operands[-1] == 0):
            continue
        else:
            value = exact(*map(Fraction, operands))
            near, off = _nearest_double(value)
            if value == 0:  # with the sign of the plain sum or product
                near = float(plain[lane])
                if mode == "rm" and _OPERATIONS[opcode].parts and near == 0:
                    near = _signed_zero(opcode, operands)
        results[lane] = _moved(np.array([near]), np.array([off]), mode)[0]
    return results


def _signed_zero(opcode: str, operands: list[float]) -> float:
    parts = _OPERATIONS[opcode].parts
    assert parts is not None
    return 0.0 if all(math.copysign(1, part) > 0 for part in parts(*operands)) else -0.0


def _nearest_double(value: Fraction) -> tuple[float, int]:
    """The nearest float64, and the sign of what is missing."""
    try:
        near = float(value)
    except OverflowError:
        near = math.inf if value > 0 else -math.inf
    if math.isinf(near):
        return near, -1 if near > 0 else 1
    return near, (value > Fraction(near)) - (value < Fraction(near))


# ------------------------------------------------------------------------------- other instructions


def _mixed(d: Decoder, i: Instruction) -> Step:
    """``add``, ``sub`` and ``fma`` of float32 with ``.f16`` or ``.bf16``: the first operands have
    16 bits, and become float32 exactly."""
    half, real = typed("b16"), typed("f32")
    count = {"add": 1, "sub": 1, "fma": 2}.get(i.opcode, 0)
    if not set(i.modifiers[:-2]) <= {"rn"} or not count or len(i.operands) != count + 2:
        raise d.unknown(i)
    widen, function = _DECODED[i.modifiers[-1]], _OPERATIONS[i.opcode].nearest
    out = d.out(i, i.operands[0], real)
    halves = [d.source(i, s, half) for s in i.operands[1:-1]]
    last = d.source(i, i.operands[-1], real)

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[F32]
        put(rows[out], one_nan(function(*(widen(w.views[U16][s]) for s in halves), rows[last])), m)

    return run


def _copy_sign(d: Decoder, i: Instruction) -> Step:
    """``copysign``: b with the sign of a."""
    kind = d.type(i)
    if len(i.modifiers) != 1 or kind.name[0] != "f":
        raise d.unknown(i)
    bits = typed(f"b{kind.bits}")
    out, *sources = (d.out(i, i.operands[0], kind), *(d.source(i, s, kind) for s in i.operands[1:]))

    def run(w: Warp, m: Mask) -> None:
        rows = w.views[bits.view]
        a, b = (rows[s] for s in sources)
        sign = a.dtype.type(1 << kind.bits - 1)
        put(rows[out], a & sign | b & ~sign, m)

    return run


_CLASSES: dict[str, Callable[[Any], Any]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda v: ~np.isnan(v),
    "notanumber": np.isnan,
    "normal": lambda v: np.isfinite(v) & ((np.abs(v) >= np.finfo(v.dtype).tiny) | (v == 0)),
    "subnormal": lambda v: (v != 0) & (np.abs(v) < np.finfo(v.dtype).tiny),
}


def _classify(d: Decoder, i: Instruction) -> Step:
    """``testp``: whether a number is of a class."""
    function, kind, flag = _CLASSES[i.modifiers[0]], d.type(i), typed("pred")
    out, a = d.out(i, i.operands[0], flag), d.source(i, i.operands[1], kind)

    def run(w: Warp, m: Mask) -> None:
        put(w.views[flag.view][out], function(w.views[kind.view][a]), m)

    return run


#: Emitters by opcode, of those whose type is a float.
FLOAT: dict[str, Emitter] = {
    **dict.fromkeys(_FORMS, _arithmetic), "copysign": _copy_sign, "testp": _classify,
}  # fmt: skip


# --------------------------------------------------------------------------------- conversions: cvt


_F32 = type_named("f32")


def _convert(d: Decoder, i: Instruction) -> Step:
    """``cvt{.rnd}{.ftz}{.sat}.to.from d, a``; two sources give two packed values."""
    packed = ".".join(i.modifiers)
    if packed in _PACKED:
        return _packed(d, i, *_PACKED[packed])
    if packed in _OF_HALVES:
        return _from_halves(d, i, *_OF_HALVES[packed])
    if i.modifiers[:1] == ("pack",):
        return _pack_integers(d, i)
    if packed in _UNPACKED:
        return _unpacked(d, i, *_UNPACKED[packed])
    return _numeric(d, i)


def _positive(values: Any) -> Any:
    """``.relu``: negative values, and -0, are zero."""
    return np.where(values <= 0, np.float32(0), values)


def _relu(function: Any) -> Any:
    return lambda values: function(_positive(values))


def _cut(name: str) -> Any:
    return lambda values: narrowed(values.astype(np.float64), name, "rz")


#: The largest finite values, as float32.
_LARGEST = {"f16": np.float32(65504), "bf16": from_bf16(np.array([0x7F7F], np.uint16))[0]}


def _finite(name: str, function: Any) -> Any:
    """``.satfinite``: beyond the largest value it is that."""
    return lambda values: function(np.clip(values, -_LARGEST[name], _LARGEST[name]))


def _six(table: Any) -> Any:
    return lambda values: to_six_bits(values, table)


def _powers(mode: str, *, finite: bool) -> Any:
    return lambda values: to_ue8m0(values, up=mode == "rp", finite=finite)


#: By modifiers: how one value is converted, and the bits that it takes.  Of two sources the first
#: goes into the upper half.
_PACKED: dict[str, tuple[Callable[[Any], Any], int, int]] = {}
#: Encodings of eight, six and four bits, which take sources of float32, and their bits.
_SMALL = {"e4m3": (to_e4m3, 8), "e5m2": (to_e5m2, 8), "e2m1": (to_e2m1, 4),
          "e2m3": (_six(E2M3), 8), "e3m2": (_six(E3M2), 8)}  # fmt: skip
for _name, (_encode, _count) in _SMALL.items():
    _PACKED[f"rn.satfinite.{_name}x2.f32"] = (_encode, _count, 2)
    _PACKED[f"rn.satfinite.relu.{_name}x2.f32"] = (_relu(_encode), _count, 2)
for _name, _round in ((t, r) for t in _ENCODED for r in ("rn", "rz")):
    _encode = _ENCODED[_name] if _round == "rn" else _cut(_name)
    _forms = {"": _encode, "relu.": _relu(_encode), "satfinite.": _finite(_name, _encode),
              "relu.satfinite.": _relu(_finite(_name, _encode))}  # fmt: skip
    for _words, _form in _forms.items():
        _PACKED[f"{_round}.{_words}{_name}x2.f32"] = (_form, 16, 2)
        if _words:
            _PACKED[f"{_round}.{_words}{_name}.f32"] = (_form, 16, 1)
for _round in ("rz", "rp"):
    _PACKED[f"{_round}.ue8m0x2.f32"] = (_powers(_round, finite=False), 8, 2)
    _PACKED[f"{_round}.satfinite.ue8m0x2.f32"] = (_powers(_round, finite=True), 8, 2)
#: Conversions of both halves of a word: their types, and how each is converted.
_OF_HALVES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{f"rn.satfinite.{t}x2.f16x2": ("f16", _SMALL[t][0]) for t in ("e4m3", "e5m2")},
    **{f"rn.satfinite.relu.{t}x2.f16x2": ("f16", _relu(_SMALL[t][0])) for t in ("e4m3", "e5m2")},
    **{f"{r}.ue8m0x2.bf16x2": ("bf16", _powers(r, finite=False)) for r in ("rz", "rp")},
    **{f"{r}.satfinite.ue8m0x2.bf16x2": ("bf16", _powers(r, finite=True)) for r in ("rz", "rp")},
}


def _from_halves(d: Decoder, i: Instruction, name: str, function: Callable[[Any], Any]) -> Step:
    """Two halves of a word to two bytes."""
    half, word = type_named("b16"), type_named("b32")
    assert half is not None
    assert word is not None
    out, a = d.out(i, i.operands[0], half), d.source(i, i.operands[1], word)
    read = _DECODED[name]

    def run(w: Warp, m: Mask) -> None:
        words = w.views[U32][a]
        low, high = (
            function(read(part)) for part in (words & np.uint32(0xFFFF), words >> np.uint32(16))
        )
        put(w.views[U16][out], low | high << 8, m)

    return run


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


def _single(table: Any) -> Any:
    """Values of six bits, by byte, as float32."""
    return table[_BYTES & 63].astype(np.float32)


#: By modifiers: the half-precision bits of a byte's one value or two, and the bits of the source.
_UNPACKED: dict[str, tuple[Any, str]] = {
    "rn.f16x2.e4m3x2": (_halves(from_e4m3(_BYTES)), "b16"),
    "rn.f16x2.e2m1x2": (_halves(from_e2m1(_BYTES)).view(np.uint32), "b8"),
    "rn.f16x2.e5m2x2": (_halves(from_e5m2(_BYTES)), "b16"),
    "rn.relu.f16x2.e4m3x2": (_halves(np.maximum(from_e4m3(_BYTES), 0)), "b16"),
    "rn.relu.f16x2.e5m2x2": (_halves(np.maximum(from_e5m2(_BYTES), 0)), "b16"),
    "rn.bf16x2.e4m3x2": (_bf16_halves(from_e4m3(_BYTES)), "b16"),
    "rn.bf16x2.e5m2x2": (_bf16_halves(from_e5m2(_BYTES)), "b16"),
    "rn.bf16x2.e2m1x2": (_bf16_halves(from_e2m1(_BYTES)).view(np.uint32), "b8"),
    "rn.relu.f16x2.e2m1x2": (_halves(_positive(from_e2m1(_BYTES))).view(np.uint32), "b8"),
    "rn.relu.bf16x2.e2m1x2": (_bf16_halves(_positive(from_e2m1(_BYTES))).view(np.uint32), "b8"),
    "rn.f16x2.e2m3x2": (_halves(_single(E2M3)), "b16"),
    "rn.f16x2.e3m2x2": (_halves(_single(E3M2)), "b16"),
    "rn.relu.f16x2.e2m3x2": (_halves(_positive(_single(E2M3))), "b16"),
    "rn.relu.f16x2.e3m2x2": (_halves(_positive(_single(E3M2))), "b16"),
    "rn.bf16x2.ue8m0x2": (_bf16_halves(from_ue8m0(_BYTES).astype(np.float32)), "b16"),
}


def _pack_integers(d: Decoder, i: Instruction) -> Step:
    """``cvt.pack.sat.to.s32{.b32} d, a, b{, c}``: b, limited, in the lowest part, a above it.

    c is above both of 8 bits.
    """
    form = re.fullmatch(r"pack\.sat\.([us])(8|16)\.s32(\.b32)?", ".".join(i.modifiers))
    if (
        form is None
        or len(i.operands) != 3 + bool(form[3])
        or (form[2] == "8") is not bool(form[3])
    ):
        raise d.unknown(i)
    word, bits = type_named("b32"), int(form[2])
    assert word is not None
    out, *sources = (d.source(i, one, word) for one in i.operands)
    limits = np.iinfo(f"{'i' if form[1] == 's' else 'u'}{bits // 8}")
    mask = np.uint32((1 << bits) - 1)

    def run(w: Warp, m: Mask) -> None:
        words = w.views[U32]
        a, b = (
            np.clip(words[s].view(np.int32).astype(np.int64), limits.min, limits.max)
            .astype(np.uint32) & mask
            for s in sources[:2]
        )  # fmt: skip
        value = b | a << np.uint32(bits)
        if len(sources) > 2:
            value = value | words[sources[2]] << np.uint32(2 * bits)
        put(words[out], value, m)

    return run


def _unpacked(d: Decoder, i: Instruction, table: Any, packed: str) -> Step:
    """``cvt.rn`` of ``e4m3x2`` or ``e2m1x2`` to two halves: exact; the low part goes to the low."""
    source, word = type_named(packed), type_named("b32")
    assert source is not None
    assert word is not None
    out, a = d.out(i, i.operands[0], word), d.source(i, i.operands[1], source)
    kind = np.dtype(f"u{source.bytes}")

    def run(w: Warp, m: Mask) -> None:
        codes = w.views[U16][a].astype(kind).view(np.uint8)
        put(w.views[U32][out], table[codes].view(np.uint32), m)

    return run


#: Rounding to an integer.
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOATS = {"f16": "b16", "bf16": "b16", "f32": "f32", "f64": "f64", "tf32": "b32"}


def _allowed(to: str, source: str) -> str:
    """The pattern of the modifiers before the types."""
    if to not in _FLOATS:
        return r"((r[nzmp]i)\.)(ftz\.)?(sat\.)?" if source in _FLOATS else r"(sat\.)?"
    if source not in _FLOATS:
        return r"(r[nzmp]\.)?(sat\.)?"
    if to == "tf32":
        return r"(rna\.|(rn|rz)\.(relu\.)?)(satfinite\.)?"
    if to == source:
        return r"(r[nzmp]i?\.)?(ftz\.)?(sat\.)?"
    return r"(r[nzmp]\.)?(ftz\.)?(sat\.)?"


def _numeric(d: Decoder, i: Instruction) -> Step:
    """Numbers of any two types.

    Integers are truncated or sign-extended by the source's type; a destination register that is
    wider than the type is extended by the destination's type.  Floats become integers with the
    named rounding; values that are too large become the limit.  NaN is zero; of 64 bits, on either
    side, it is the highest bit alone (recorded on an H100).
    """
    if len(i.modifiers) < 2:
        raise d.unknown(i)
    *words, to, source = i.modifiers
    if not re.fullmatch(_allowed(to, source), "".join(f"{word}." for word in words)):
        raise d.unknown(i)
    read = _reader(d, i, source, ftz="ftz" in words)
    mode = next((word for word in words if word[:2] in _MODES or word == "rna"), "rn")
    if to in _FLOATS:
        return _to_float(d, i, read, mode, frozenset(words))
    kind, register = d.type(i, -2), d.register(i, i.operands[0])
    destination = typed(f"{kind.name[0]}{register.width}")
    wide = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")
    limits, whole = np.iinfo(wide), _WHOLE.get(mode)
    limited = "sat" in words
    none = np.array(1 << kind.bits - 1 if 64 in (kind.bits, _bits(source)) else 0, np.uint64)
    none = none.astype(wide)

    def run(w: Warp, m: Mask) -> None:
        value = read(w)
        if whole is not None:
            nan = np.isnan(value)
            value = _limited_to(whole(np.where(nan, 0, value)), limits)
            value = np.where(nan, none, value)
        elif limited:
            value = _limited_to(value, limits)
        put(w.views[destination.view][register.index], value.astype(wide), m)

    return run


def _limited_to(values: Any, limits: Any) -> Any:
    """Integers within limits, of floats whose type may not have the limits."""
    if values.dtype.kind == "f":
        inside = (values > limits.min) & (values < float(limits.max))
        high = np.where(values > 0, limits.max, limits.min)
        kind = np.int64 if limits.min < 0 else np.uint64
        return np.where(inside, np.where(inside, values, 0).astype(kind), high.astype(kind))
    least = max(limits.min, np.iinfo(values.dtype).min)
    most = min(limits.max, np.iinfo(values.dtype).max)
    return np.clip(values, least, most)


def _bits(name: str) -> int:
    return typed(_FLOATS.get(name, name)).bits


def _reader(d: Decoder, i: Instruction, name: str, *, ftz: bool) -> Callable[[Warp], Any]:
    """The value of the source: integers of its type, or float64, exactly.

    Of an integer's register that is wider than the type, the low part ("Operand Size Exceeding
    Instruction-Type Size").
    """
    kind = typed(_FLOATS.get(name, name))
    narrow = np.dtype(f"{'i' if kind.signed else 'u'}{kind.bytes}")
    slot = d.slots.get(getattr(i.operands[1], "text", ""))
    if name[0] in "us" and slot and slot.width > max(kind.bits, 16):
        wide = typed(f"b{slot.width}")
        return lambda w: w.views[wide.view][slot.index].astype(narrow)
    a, view = d.source(i, i.operands[1], kind), kind.view
    if name == "f16":
        return lambda w: _quieted(w.views[view][a].view(np.float16).astype(np.float64))
    if name == "bf16":
        return lambda w: from_bf16(w.views[view][a]).astype(np.float64)
    if name in _FLOATS:
        prepare = (lambda v: one_nan(flush(v))) if ftz and name == "f32" else lambda v: v
        return lambda w: prepare(w.views[view][a]).astype(np.float64)
    if kind.name[0] not in "us":
        raise d.unknown(i)
    return lambda w: w.views[view][a].astype(narrow)


def _quieted(values: Any) -> Any:
    nan = np.isnan(values)
    return np.where(nan, _quiet(values), values) if some(nan) else values


def _narrow_nan(values: Any, name: str) -> Any:
    """The bits of a half for a NaN of float64: its sign and its first bits."""
    bits, fraction = _quiet(values).view(np.uint64), 10 if name == "f16" else 7
    exponent = 0x7C00 if name == "f16" else 0x7F80
    first = (bits >> np.uint64(52 - fraction)).astype(np.uint16) & np.uint16((1 << fraction) - 1)
    return (
        (bits >> np.uint64(48)).astype(np.uint16) & np.uint16(0x8000) | np.uint16(exponent) | first
    )


def _to_float(
    d: Decoder, i: Instruction, read: Callable[[Warp], Any], mode: str, words: frozenset[str]
) -> Step:
    name, whole = i.modifiers[-2], _WHOLE.get(mode)
    kind = typed(_FLOATS[name])
    out, ftz = d.out(i, i.operands[0], kind), "ftz" in words and name == "f32"
    source = i.modifiers[-1]
    if (name, source) == ("f32", "bf16") and not words:
        return _widened(d, i)
    kept = d.source(i, i.operands[1], typed("b32")) if words == {"rna"} else None

    def run(w: Warp, m: Mask) -> None:
        value = read(w)
        if value.dtype.kind != "f":
            value = _float_of(value, name, mode)
        elif whole is not None:
            value = whole(value)
        value = _positive(value) if "relu" in words else value
        if "sat" in words:
            value = np.where(value > 0, np.minimum(value, 1), 0.0)
        if value.dtype == np.float64:
            wide, value = value, narrowed(value, name, "rn" if whole is not None else mode)
            value = _flushed(value, wide, mode) if ftz else value
            if source == "f64" and name in _DECODED and some(nan := np.isnan(wide)):
                value = np.where(nan, _narrow_nan(wide, name), value)
        value = flush(value) if ftz else value
        if name == "f32" and source != "f64":
            value = one_nan(value)
        if kept is not None:  # a NaN keeps its bits, as on an H200; it may become an infinity
            bits = w.views[U32][kept]
            value = np.where(np.isnan(bits.view(np.float32)), bits & np.uint32(0xFFFFE000), value)
        row = w.views[kind.view][out]
        put(row, value.astype(row.dtype), m)

    return run


def _widened(d: Decoder, i: Instruction) -> Step:
    """``cvt.f32.bf16``: the bits are those of the upper half."""
    out, a = d.out(i, i.operands[0], typed("b32")), d.source(i, i.operands[1], typed("b16"))

    def run(w: Warp, m: Mask) -> None:
        put(w.views[U32][out], w.views[U16][a].astype(np.uint32) << np.uint32(16), m)

    return run


def _float_of(values: Any, name: str, mode: str) -> Any:
    """Integers as float64 that rounds to the wanted format as they do."""
    if values.itemsize < 8:
        return values.astype(np.float64)
    if mode == "rn" and name in ("f32", "f64"):
        return values.astype(np.float32 if name == "f32" else np.float64)
    low = (values & values.dtype.type(0xFFFFFFFF)).astype(np.float64)
    high = (values >> values.dtype.type(32)).astype(np.float64) * 2.0**32
    if name != "f64":
        return odd_sum(high, low)
    total, residue = _two_sum(high, low)
    return _moved(total, np.sign(residue), mode)


#: Emitters by opcode.
CONVERT: dict[str, Emitter] = {"cvt": _convert}
