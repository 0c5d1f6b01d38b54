"""Matrices of a warp: moves between shared memory and registers, and products.

PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".  A product of floats is exact, its
sum with C is rounded once: tensor cores cut products off before they add them, so that a value may
be off by a few units of its largest addend (docs/verification.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.accesses import memory_of, read_rows, read_shared, write_rows, write_shared
from builder.ptx.decoder import F32, U16, U32, Decoder, Emitter, Mask, Step, type_named
from builder.ptx.floats import fused_doubles, narrowed
from builder.ptx.machine import (
    E2M1,
    E2M1_PAIRS,
    E2M3,
    E3M2,
    LANES,
    UE4M3,
    Fault,
    from_bf16,
    from_e4m3,
    from_e5m2,
    from_f16,
    from_ue8m0,
    one_nan,
)
from builder.ptx.registers import typed
from builder.ptx.source import Instruction, Number, Vector
from builder.ptx.warps import whole_warp

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp

# --------------------------------------------------------------------- moves: ldmatrix, stmatrix


def _rows(indices: list[int]) -> Any:
    """An index of several registers at once: a slice, if they are adjacent, to get a view."""
    first, count = indices[0], len(indices)
    if indices == [*range(first, first + count)]:
        return slice(first, first + count)
    return np.array(indices)


_MATRICES = {"x1": 1, "x2": 2, "x4": 4}


def _matrix_form(d: Decoder, i: Instruction, registers: Any) -> int:
    """The number of 8x8 matrices of 16 bits; other forms are errors."""
    words = set(i.modifiers) - {"sync", "aligned", "m8n8", "shared", "shared::cta", "b16"}
    count = _MATRICES.get(next(iter(words - {"trans"}), ""), 0)
    if len(words - {"trans"}) != 1 or not count or len(d.parts(registers)) != count:
        raise d.unknown(i)
    return count


def _load_matrix(d: Decoder, i: Instruction) -> Step:
    """``ldmatrix``: lanes 8k to 8k+7 give the rows of matrix k; lane T gets columns 2(T%4) and the
    next of row T/4; ``.trans`` swaps row and column."""
    if not i.has("m8n8"):
        return _load_bytes(d, i)
    count = _matrix_form(d, i, i.operands[0])
    kind = type_named("b32")
    assert kind is not None
    outs = _rows([d.out(i, one, kind) for one in d.parts(i.operands[0])])
    address, line, trans = d.address(i, i.operands[1]), i.line, i.has("trans")

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        rows = read_shared(w, w.block, None, address(w)[: 8 * count], 16, line)
        matrices = rows.view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        words = matrices.reshape(count, 64).view(np.uint32)
        w.files[U32][outs] = words

    return run


def _bytes_of(rows: Any, bits: int) -> Any:
    """Rows of 16 values of 8, 6 or 4 bits, in 16 bytes with padding behind, each as a byte."""
    if bits == 8:
        return rows
    flags = np.unpackbits(rows, axis=1, bitorder="little")[:, : 16 * bits]
    return np.packbits(flags.reshape(-1, 16, bits), axis=2, bitorder="little")[:, :, 0]


def _load_bytes(d: Decoder, i: Instruction) -> Step:
    """``ldmatrix`` of bytes, also of values of 6 and 4 bits, which become the low bits of bytes.

    ``m8n16``: lane T gets columns 4(T%4) to +3 of row T/4.  ``m16n16.trans``: rows 4(T%4) to +3 of
    columns T/4 and T/4+8, in two registers.
    """
    form = re.fullmatch(
        r"sync\.aligned\.(m8n16|m16n16)\.x([124])(\.trans)?\.shared(?:::cta)?\."
        r"(?:b8|b8x16\.b([64])x16_p(?:32|64))",
        ".".join(i.modifiers),
    )
    if form is None or (form[1] == "m16n16") != bool(form[3]) or (form[3] and form[2] == "4"):
        raise d.unknown(i)
    tall, count, bits = form[1] == "m16n16", int(form[2]), int(form[4] or 8)
    outs = [d.out(i, one, typed("b32")) for one in d.parts(i.operands[0])]
    if len(outs) != count * (2 if tall else 1) or (bits == 8 and not tall):
        raise d.unknown(i)
    address, line, each = d.address(i, i.operands[1]), i.line, 16 if tall else 8

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        rows = read_shared(w, w.block, None, address(w)[: each * count], 16, line)
        values = _bytes_of(rows, bits).reshape(count, each, 16)
        if tall:  # by matrix: the register, the lane's column and group of rows, and the row in it
            values = values.reshape(count, 4, 4, 2, 8).transpose(0, 3, 4, 1, 2)
        words = np.ascontiguousarray(values).reshape(len(outs), LANES, 4).view(np.uint32)
        w.files[U32][outs] = words[:, :, 0]

    return run


def _transpose(d: Decoder, i: Instruction) -> Step:
    """``movmatrix``: the transpose of 8x8 values of 16 bits, of which each lane has two."""
    if i.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise d.unknown(i)
    kind = typed("b32")
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        words = w.files[U32]
        values = words[a].view(np.uint16).reshape(8, 8).T
        words[out] = np.ascontiguousarray(values).reshape(-1).view(np.uint32)

    return run


def _store_matrix(d: Decoder, i: Instruction) -> Step:
    """``stmatrix``: the inverse of ``ldmatrix``."""
    count = _matrix_form(d, i, i.operands[1])
    kind = type_named("b32")
    assert kind is not None
    sources = _rows([d.source(i, one, kind) for one in d.parts(i.operands[1])])
    address, line, trans = d.address(i, i.operands[0]), i.line, i.has("trans")

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        values = w.files[U32][sources].view(np.uint16)
        matrices = values.reshape(count, 8, 8)
        if trans:
            matrices = matrices.transpose(0, 2, 1)
        data = np.ascontiguousarray(matrices).reshape(8 * count, 8).view(np.uint8)
        write_shared(w, w.block, None, address(w)[: 8 * count], data, line)

    return run


# ------------------------------------------------------------------------------- block-scaled MMA

_FP4 = {"sync", "aligned", "m16n8k64", "row", "col", "block_scale", "f32", "e2m1"}
#: The modifiers of the products of FP4, whose order differs between compilers; and how many scales
#: a row has.  ``2X`` is all that ``mxf4`` has, and may be left out there.
_SCALED = {
    frozenset((*_FP4, "kind::mxf4nvf4", "scale_vec::4X", "ue4m3")): 4,
    frozenset((*_FP4, "kind::mxf4nvf4", "scale_vec::2X", "ue8m0")): 2,
    frozenset((*_FP4, "kind::mxf4", "scale_vec::2X", "ue8m0")): 2,
    frozenset((*_FP4, "kind::mxf4", "ue8m0")): 2,
}
#: Lanes with the scales of A's rows and B's columns, by thread-id: "Block scaling".
_A_SCALES = [np.array([(row % 8) * 4 + row // 8 + 2 * t for row in range(16)]) for t in range(2)]
_B_SCALES = [np.arange(8) * 4 + t for t in range(4)]
#: The most cached fragments and products: many products use the same ones, and every
#: schedule repeats them.  Our choice: 80 MB.
_FRAGMENTS, _PRODUCTS = 4096, 16384


class Decoded:
    """A cache of decoded values by their bits."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[bytes, Any] = {}

    def of(self, key: bytes, make: Callable[[], Any]) -> Any:
        """The decoded value of these bits, from the cache if possible."""
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= self._most:
                self._values.clear()
            value = self._values[key] = make()
        return value


_FRAGMENTS_OF_A, _FRAGMENTS_OF_B = Decoded(_FRAGMENTS), Decoded(_FRAGMENTS)
_KNOWN_PRODUCTS = Decoded(_PRODUCTS)


def _scaled(values: Any, scales: Any) -> Any:
    """Rows of 64 values times their scales: bytes [rows, 4] are E4M3, [rows, 2] powers of two."""
    factors = UE4M3[scales] if scales.shape[1] == 4 else from_ue8m0(scales)
    blocks = values.reshape(*scales.shape, 64 // scales.shape[1])
    return (blocks * factors[:, :, None]).reshape(-1, 64)


def scaled_a(codes: Any, scales: Any) -> Any:
    """A, 16x64: register v1+2*v2 of lane 4*t1+t0 holds row t1+8*v1, columns 8*t0+v0+32*v2."""
    values = E2M1_PAIRS[codes.view(np.uint8)].reshape(2, 2, 8, 4, 8)
    return _scaled(np.ascontiguousarray(values.transpose(1, 2, 0, 3, 4)), scales)


def scaled_b(codes: Any, scales: Any) -> Any:
    """B, 64x8: register v1 of lane 4*t1+t0 holds column t1, rows 8*t0+v0+32*v1."""
    values = E2M1_PAIRS[codes.view(np.uint8)].reshape(2, 8, 4, 8)
    scaled = _scaled(np.ascontiguousarray(values.transpose(1, 0, 2, 3)), scales)
    return np.ascontiguousarray(scaled.T)


def scaled_product(left: Any, scales_a: Any, right: Any, scales_b: Any) -> Any:
    """A x B by lanes: register v1*2+v0 of lane 4*t1+t0 is row t1+8*v1, column 2*t0+v0."""
    key_a = left.tobytes() + scales_a.tobytes()
    key_b = right.tobytes() + scales_b.tobytes()

    def make() -> Any:
        a = _FRAGMENTS_OF_A.of(key_a, lambda: scaled_a(left, scales_a))
        b = _FRAGMENTS_OF_B.of(key_b, lambda: scaled_b(right, scales_b))
        return (a @ b).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)

    return _KNOWN_PRODUCTS.of(key_a + key_b, make)


def _fragments(d: Decoder, i: Instruction) -> tuple[Any, ...]:
    """The registers of D, A, B and C: 4, 4, 2 and 4; D and C are floats."""
    word, real = type_named("b32"), type_named("f32")
    assert word is not None
    assert real is not None
    outs = [d.out(i, one, real) for one in d.parts(i.operands[0])]
    left, right, added = (
        [d.source(i, one, kind) for one in d.parts(i.operands[n])]
        for n, kind in ((1, word), (2, word), (3, real))
    )
    if (len(outs), len(left), len(right), len(added)) != (4, 4, 2, 4):
        raise d.unknown(i, "fragments of other sizes")
    return tuple(map(_rows, (outs, left, right, added)))


def _multiply(d: Decoder, i: Instruction) -> Step:
    """``mma.m16n8k64`` of FP4 with ``block_scale``: D = (A x scales) (B x scales) + C.

    A scale is of 16 values along K or, with ``2X``, of 32.  With ``4X`` all four bytes of a scale
    register count, so its byte-id is 0; with ``2X`` it is 0 or 2.  thread-id selects the lanes of
    four with the scales.
    """
    if "block_scale" not in i.modifiers:
        return _multiply_plain(d, i)
    if i.has("kind::mxf8f6f4"):
        return _multiply_bytes(d, i)
    count = _SCALED.get(frozenset(i.modifiers), 0)
    if not count or i.modifiers.count("e2m1") != 2 or len(i.operands) != 8:
        raise d.unknown(i)
    word = type_named("b32")
    assert word is not None
    outs, left, right, added = _fragments(d, i)
    scale_a, scale_b = (d.source(i, d.parts(i.operands[n])[0], word) for n in (4, 6))
    chosen_a, chosen_b = (_selectors(d, i, i.operands[n]) for n in (5, 7))
    starts = {*range(0, 4, count)}

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        words, reals = w.files[U32], w.files[F32]
        (byte_a, thread_a), (byte_b, thread_b) = chosen_a(w), chosen_b(w)
        if {byte_a, byte_b} - starts or thread_a not in (0, 1) or not 0 <= thread_b < 4:
            raise Fault(f"scale selectors that scale_vec::{count}X does not have")
        bytes_a = words[scale_a].take(_A_SCALES[thread_a]).view(np.uint8).reshape(16, 4)
        bytes_b = words[scale_b].take(_B_SCALES[thread_b]).view(np.uint8).reshape(8, 4)
        scales_a = bytes_a[:, byte_a : byte_a + count]
        scales_b = bytes_b[:, byte_b : byte_b + count]
        product = scaled_product(words[left], scales_a, words[right], scales_b)
        reals[outs] = one_nan((product + reals[added]).astype(np.float32))

    return run


def _selectors(d: Decoder, i: Instruction, operand: Any) -> Callable[[Warp], tuple[int, int]]:
    """``{byte-id, thread-id}``: constants, or registers of 16 bits."""
    half = type_named("u16")
    assert half is not None
    if not isinstance(operand, Vector) or len(operand.parts) != 2:
        raise d.unknown(i, "scale selectors")
    byte, thread = operand.parts
    if isinstance(byte, Number) and isinstance(thread, Number):
        constants = byte.value, thread.value
        return lambda _w: constants
    first, second = (d.source(i, one, half) for one in operand.parts)
    return lambda w: (int(w.views[U16][first][0]), int(w.views[U16][second][0]))


# ------------------------------------------------------------------------------- other products


def _e5m2(bits: Any) -> Any:
    return from_e5m2(bits.view(np.uint8))


def _e4m3(bits: Any) -> Any:
    return from_e4m3(bits.view(np.uint8))


def _tf32(bits: Any) -> Any:
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _nibbles(kind: str) -> Callable[[Any], Any]:
    def values(bits: Any) -> Any:
        parts = np.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1).astype(np.int64)
        return parts - (parts >> 3 << 4) if kind == "s4" else parts

    return values


def _e2m1(bits: Any) -> Any:
    """E2M1 in the middle of a byte, as ``mma`` of ``kind::f8f6f4`` wants it."""
    return E2M1[bits >> 2 & 15]


@dataclass(frozen=True)
class _Element:
    """A type of the elements of A and B: its bits, numpy's type of these, and their values."""

    bits: int
    storage: str
    values: Callable[[Any], Any]


_ELEMENTS = {
    "f16": _Element(16, "u2", from_f16), "bf16": _Element(16, "u2", from_bf16),
    "tf32": _Element(32, "u4", _tf32), "e4m3": _Element(8, "u1", _e4m3),
    "e5m2": _Element(8, "u1", _e5m2), "s8": _Element(8, "i1", lambda v: v),
    "u8": _Element(8, "u1", lambda v: v), "s4": _Element(4, "u1", _nibbles("s4")),
    "u4": _Element(4, "u1", _nibbles("u4")), "f64": _Element(64, "f8", lambda v: v),
    "e2m1": _Element(8, "u1", _e2m1), "e2m3": _Element(8, "u1", lambda v: E2M3[v & 63]),
    "e3m2": _Element(8, "u1", lambda v: E3M2[v & 63]),
}  # fmt: skip
#: What a byte of ``kind::f8f6f4`` and ``kind::mxf8f6f4`` may be.
_BYTES = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
#: By types of D, A, B and C: the shapes.
_SHAPES = {
    **{f"f32.{t}.{t}.f32": "m16n8k8 m16n8k16" for t in ("f16", "bf16")},
    "f16.f16.f16.f16": "m16n8k8 m16n8k16",
    "f32.tf32.tf32.f32": "m16n8k4 m16n8k8",
    **{f"{c}.{a}.{b}.{c}": "m16n8k16 m16n8k32" for a in ("e4m3", "e5m2")
       for b in ("e4m3", "e5m2") for c in ("f32", "f16")},
    **{f"s32.{a}.{b}.s32": "m8n8k16 m16n8k16 m16n8k32" for a in ("s8", "u8") for b in ("s8", "u8")},
    **{f"s32.{a}.{b}.s32": "m8n8k32 m16n8k32 m16n8k64" for a in ("s4", "u4") for b in ("s4", "u4")},
    "f64.f64.f64.f64": "m8n8k4 m16n8k4 m16n8k8 m16n8k16",
}  # fmt: skip


def left(words: Any, element: _Element, rows: int, depth: int) -> Any:
    """A by the registers of the lanes: register r of lane 4*g+t holds row g+8*(r % (rows/8)),
    and of the columns a group of four lanes' elements."""
    values = element.values(
        np.ascontiguousarray(words).view(element.storage).reshape(*words.shape, -1)
    )
    each = values.shape[-1]
    laid = values.reshape(depth // (4 * each), rows // 8, 8, 4, each)
    return np.ascontiguousarray(laid.transpose(1, 2, 0, 3, 4)).reshape(rows, depth)


def right(words: Any, element: _Element, depth: int) -> Any:
    """B by the registers of the lanes: lane 4*g+t holds column g."""
    return np.ascontiguousarray(left(words, element, 8, depth).T)


#: The modifiers of the block-scaled product of bytes, besides the types of A and B.
_MXF8 = {
    "sync", "aligned", "m16n8k32", "row", "col", "kind::mxf8f6f4", "block_scale", "scale_vec::1X",
    "f32", "ue8m0",
}  # fmt: skip


def _multiply_bytes(d: Decoder, i: Instruction) -> Step:
    """``mma.m16n8k32.kind::mxf8f6f4.block_scale.scale_vec::1X``, of 8, 6 and 4 bits.

    A row of A and a column of B have one scale each, of all 32 values: byte-id selects the byte of
    the register, thread-id the lanes of four, as with NVFP4.
    """
    types = [word for word in i.modifiers if word in _BYTES]
    if set(i.modifiers) - set(types) != _MXF8 or len(types) != 2 or len(i.operands) != 8:
        raise d.unknown(i)
    x, y = (_ELEMENTS[one] for one in types)
    outs, a, b, added = _fragments(d, i)
    scale_a, scale_b = (d.source(i, d.parts(i.operands[n])[0], typed("b32")) for n in (4, 6))
    chosen_a, chosen_b = (_selectors(d, i, i.operands[n]) for n in (5, 7))

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        words, reals = w.files[U32], w.files[F32]
        (byte_a, thread_a), (byte_b, thread_b) = chosen_a(w), chosen_b(w)
        if not (0 <= byte_a < 4 and 0 <= byte_b < 4 and thread_a in (0, 1) and 0 <= thread_b < 4):
            raise Fault("scale selectors that scale_vec::1X does not have")
        codes_a = words[scale_a].take(_A_SCALES[thread_a]) >> np.uint32(8 * byte_a)
        codes_b = words[scale_b].take(_B_SCALES[thread_b]) >> np.uint32(8 * byte_b)
        rows = left(words[a], x, 16, 32).astype(np.float64)
        columns = right(words[b], y, 32).astype(np.float64)
        rows = rows * from_ue8m0(codes_a & np.uint32(255))[:, None]
        total = rows @ (columns * from_ue8m0(codes_b & np.uint32(255))[None, :])
        by_lane = total.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)
        reals[outs] = one_nan((by_lane + reals[added]).astype(np.float32))

    return run


def _rounded(total: Any, kind: str) -> Any:
    if kind == "f16":
        return narrowed(total, "f16")
    return one_nan(total.astype(np.float32)) if kind == "f32" else total


def product(a: Any, b: Any, c: Any, kind: str, *, limited: bool = False) -> Any:
    """A B + C in a type."""
    if kind == "s32":
        total = a.astype(np.int64) @ b.astype(np.int64) + c
        return np.clip(total, -(2**31), 2**31 - 1) if limited else total
    if kind == "f64":  # one fused step for each column of A, in their order
        for step in range(a.shape[1]):
            x, y = np.broadcast_arrays(a[:, step, None], b[None, step, :])
            c = fused_doubles(x.ravel(), y.ravel(), np.ascontiguousarray(c).ravel()).reshape(
                c.shape
            )
        return c
    with np.errstate(all="ignore"):
        return _rounded(a.astype(np.float64) @ b.astype(np.float64) + c, kind)


_MMA = re.compile(
    r"sync\.aligned\.(?:kind::f8f6f4\.)?(m\d+n8k\d+)\.row\.col\.(satfinite\.)?(\w+\.(\w+)\.(\w+)\.\w+)"
    r"(\.satfinite)?"  # not in the PTX ISA, but ptxas takes it, and vLLM's Marlin has it there
)
#: Products of bytes that are not all E4M3 or E5M2.
_MIXED = {f"{c}.{a}.{b}.{c}" for a in _BYTES for b in _BYTES for c in ("f32", "f16")
          if {a, b} - {"e4m3", "e5m2"}}  # fmt: skip
#: The registers and numpy's types of C and D.
_SUMS = {"f32": ("f32", np.float32), "f16": ("b32", np.uint16), "s32": ("s32", np.int32),
         "f64": ("f64", np.float64)}  # fmt: skip


def _multiply_plain(d: Decoder, i: Instruction) -> Step:
    """``mma`` without scales: D = A B + C."""
    form = _MMA.fullmatch(".".join(i.modifiers))
    shapes = _SHAPES.get(form[3], "") if form else ""
    if form and form[3] in _MIXED and i.has("kind::f8f6f4"):
        shapes = "m16n8k32"
    if form is None or form[1] not in shapes.split() or len(i.operands) != 4:
        raise d.unknown(i)
    limited = bool(form[2] or form[6])
    if limited and not form[3].startswith("s32."):
        raise d.unknown(i)
    rows, depth = (int(n) for n in re.findall(r"[mk](\d+)", form[1]))
    kind, (x, y) = form[3].partition(".")[0], (_ELEMENTS[form[n]] for n in (4, 5))
    word = typed("f64" if x.bits == 64 else "b32")
    register, numbers = _SUMS[kind]
    sum_type = typed(register)
    outs = [d.out(i, one, sum_type) for one in d.parts(i.operands[0])]
    a, b, c = (
        [d.source(i, one, k) for one in d.parts(i.operands[n])]
        for n, k in ((1, word), (2, word), (3, sum_type))
    )
    each = max(32, x.bits)
    sums = rows * 8 * np.dtype(numbers).itemsize // (LANES * sum_type.bytes)
    sizes = (
        sums,
        rows * depth * x.bits // (LANES * each),
        8 * depth * y.bits // (LANES * each),
        sums,
    )
    if (len(outs), len(a), len(b), len(c)) != sizes:
        raise d.unknown(i, "fragments of other sizes")
    outs, a, b, c = map(_rows, (outs, a, b, c))

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        words, reals = w.files[word.view], w.files[sum_type.view]
        # register v1*2+v0 of lane 4*t1+t0 holds row t1+8*v1, column 2*t0+v0; two halves are one
        added = np.ascontiguousarray(reals[c]).view(numbers).reshape(rows // 8, -1, LANES)
        if kind == "f16":
            added = added.reshape(rows // 8, LANES, 2).transpose(0, 2, 1)
        laid = added.reshape(rows // 8, 2, 8, 4).transpose(0, 2, 3, 1).reshape(rows, 8)
        laid = from_f16(laid) if kind == "f16" else laid
        total = product(
            left(words[a], x, rows, depth), right(words[b], y, depth), laid, kind, limited=limited
        )  # fmt: skip
        by_lane = (
            total.reshape(rows // 8, 8, 4, 2).transpose(0, 3, 1, 2).reshape(rows // 8, 2, LANES)
        )
        if kind == "f16":
            pairs = np.ascontiguousarray(by_lane.transpose(0, 2, 1)).astype(np.uint16)
            reals[outs] = pairs.view(np.uint32).reshape(rows // 8, LANES)
        else:
            reals[outs] = by_lane.reshape(-1, LANES).astype(numbers)

    return run


# -------------------------------------------------------------------------------------------- wmma


_WMMA_MOVE = re.compile(
    r"(a|b|c|d)\.sync\.aligned\.(row|col)\.(m\d+n\d+k\d+)(?:\.(shared(?:::cta)?|global))?\.(\w+)"
)
_WMMA_MMA = re.compile(
    r"sync\.aligned\.(?:row|col)\.(?:row|col)\.(m\d+n\d+k\d+)\.(\w+)(?:\.(\w+)\.(\w+))?\.(\w+?)(\.satfinite)?"
)


def _sides(shape: str, which: str) -> tuple[int, int]:
    m, n, k = map(int, re.findall(r"\d+", shape))
    return {"a": (m, k), "b": (k, n)}.get(which, (m, n))


def _matrix_bits(kind: str) -> tuple[Any, str]:
    """numpy's type of an element in memory, and the type of its registers."""
    bits = {"f32": 32, "s32": 32, "f64": 64}.get(kind) or _ELEMENTS[kind].bits
    if bits < 8:
        raise KeyError(kind)
    return np.dtype(f"u{bits // 8}"), "b64" if bits == 64 else "b32"


def _move_matrix(d: Decoder, i: Instruction) -> Step:
    """``wmma.load`` and ``wmma.store``.

    Which lane has which elements is not specified: here they follow each other, and a fragment with
    room for two matrices has it twice.
    """
    stores = i.modifiers[0] == "store"
    form = _WMMA_MOVE.fullmatch(".".join(i.modifiers[1:]))
    if form is None:
        raise d.unknown(i)
    (rows, columns), (element, register) = _sides(form[3], form[1]), _matrix_bits(form[5])
    kind = typed(register)
    place, fragment = (i.operands[0], i.operands[1]) if stores else (i.operands[1], i.operands[0])
    registers = [d.source(i, one, kind) for one in d.parts(fragment)]
    stride = d.source(i, i.operands[2], typed("b32")) if len(i.operands) > 2 else -1
    space = memory_of(form[4])
    address, line = d.address(i, place, 32 if space == "shared" else 64), i.line
    d.shared_sizes.add(min(4, element.itemsize))
    down, across = np.divmod(np.arange(rows * columns), columns)
    first, second = (down, across) if form[2] == "row" else (across, down)
    least, count = columns if form[2] == "row" else rows, rows * columns

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        step = int(w.views[U32][stride][0]) if stride >= 0 else least
        base = np.int64(address(w)[0]) if space == "shared" else address(w)[0].astype(np.uint64)
        offsets = (first * step + second) * element.itemsize
        at = base + offsets.astype(base.dtype)
        words = w.files[kind.view]
        lanes = np.arange(count) % LANES
        if stores:
            data = np.ascontiguousarray(words[registers].T).view(element).reshape(-1)[:count]
            rows_of = data.view(np.uint8).reshape(count, -1)
            write_rows(w, space, lanes, at, rows_of, line)
            return
        data = read_rows(w, space, lanes, at, element.itemsize, line)
        whole = np.ascontiguousarray(data).view(element).reshape(-1)
        room = len(registers) * LANES * kind.bytes // element.itemsize
        laid = np.tile(whole, room // count).view(words.dtype).reshape(LANES, len(registers))
        words[registers] = laid.T

    return run


def _multiply_moved(d: Decoder, i: Instruction) -> Step:
    """``wmma.mma``: D = A B + C of fragments that ``wmma.load`` filled."""
    form = _WMMA_MMA.fullmatch(".".join(i.modifiers[1:]))
    if form is None:
        raise d.unknown(i)
    shape, to, x, y, c = form[1], form[2], form[3] or "f16", form[4] or "f16", form[5]
    kinds = (to, x, y, c)
    sides = [_sides(shape, which) for which in ("d", "a", "b", "c")]
    forms = [_matrix_bits(kind) for kind in kinds]
    registers = [
        [d.source(i, one, typed(register)) for one in d.parts(operand)]
        for operand, (_, register) in zip(i.operands, forms, strict=True)
    ]

    def matrix(w: Warp, n: int) -> Any:
        words = w.files[typed(forms[n][1]).view][registers[n]]
        raw = np.ascontiguousarray(words.T).view(forms[n][0]).reshape(-1)
        raw = raw[: sides[n][0] * sides[n][1]]
        if kinds[n] in ("f32", "s32"):
            return raw.view(np.float32 if kinds[n] == "f32" else np.int32).reshape(sides[n])
        element = _ELEMENTS[kinds[n]]
        return np.asarray(element.values(raw.view(element.storage))).reshape(sides[n])

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, w, m)
        total = product(matrix(w, 1), matrix(w, 2), matrix(w, 3), to, limited=bool(form[6]))
        numbers = _SUMS[to][1]
        words = w.files[typed(forms[0][1]).view]
        flat = np.ascontiguousarray(total.astype(numbers)).reshape(-1).view(words.dtype)
        words[registers[0]] = flat.reshape(LANES, len(registers[0])).T

    return run


def _warp_matrix(d: Decoder, i: Instruction) -> Step:
    """``wmma.load``, ``wmma.store`` and ``wmma.mma``."""
    return (_multiply_moved if i.modifiers[0] == "mma" else _move_matrix)(d, i)


#: Emitters by opcode.
MATRIX: dict[str, Emitter] = {
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "movmatrix": _transpose,
    "mma": _multiply,
    "wmma": _warp_matrix,
}
