"""Instructions of a whole warp: communication of its lanes, branches, barriers and matrices.

PTX ISA, "Control Flow Instructions", "Data Movement and Conversion Instructions: shfl", "Parallel
Synchronization and Communication Instructions: bar, barrier, vote, redux, activemask, elect" and
"Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.decoder import (
    F32,
    PRED,
    U16,
    U32,
    Decoder,
    Emitter,
    Mask,
    Step,
    Target,
    type_named,
)
from builder.ptx.machine import E2M1_PAIRS, EXIT, LANES, UE4M3, Fault, from_bf16, from_f16, one_nan
from builder.ptx.races import BLOCK, GRID
from builder.ptx.registers import typed
from builder.ptx.source import Instruction, Name, Negated, Number, Pair, Vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.block import Warp

# ---------------------------------------------------------------- matrices: ldmatrix, stmatrix, mma


def whole_warp(i: Instruction, m: Mask) -> None:
    """``.aligned``: all threads of the warp execute the same instruction."""
    if m is not True:
        raise Fault(f"{i.name} by a part of a warp ({int(np.count_nonzero(m))} lanes)")


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
    count = _matrix_form(d, i, i.operands[0])
    kind = type_named("b32")
    assert kind is not None
    outs = _rows([d.out(i, one, kind) for one in d.parts(i.operands[0])])
    address, line, trans = d.address(i, i.operands[1]), i.line, i.has("trans")

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        rows = w.block.shared.load(address(w)[: 8 * count], 16, w.number, None, line)
        matrices = rows.view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        found = matrices.reshape(count, 64).view(np.uint32)
        w.files[U32][outs] = found

    return run


def _store_matrix(d: Decoder, i: Instruction) -> Step:
    """``stmatrix``: the inverse of ``ldmatrix``."""
    count = _matrix_form(d, i, i.operands[1])
    kind = type_named("b32")
    assert kind is not None
    sources = _rows([d.source(i, one, kind) for one in d.parts(i.operands[1])])
    address, line, trans = d.address(i, i.operands[0]), i.line, i.has("trans")

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        values = w.files[U32][sources].view(np.uint16)
        matrices = values.reshape(count, 8, 8)
        if trans:
            matrices = matrices.transpose(0, 2, 1)
        data = np.ascontiguousarray(matrices).reshape(8 * count, 8).view(np.uint8)
        w.block.shared.store(address(w)[: 8 * count], data, w.number, None, line)

    return run


# ------------------------------------------------------------------------------- block-scaled MMA

#: The modifiers of the supported form; their order differs between compilers.
_NVFP4 = {
    "sync", "aligned", "m16n8k64", "row", "col", "kind::mxf4nvf4", "block_scale",
    "scale_vec::4X", "f32", "e2m1", "ue4m3",
}  # fmt: skip
#: Lanes with the scales of A's rows and B's columns, by thread-id: "Block scaling".
_A_SCALES = [np.array([(row % 8) * 4 + row // 8 + 2 * t for row in range(16)]) for t in range(2)]
_B_SCALES = [np.arange(8) * 4 + t for t in range(4)]
#: The most cached fragments and products: many products use the same ones, and every
#: schedule repeats them.  Our choice: 80 MB.
_FRAGMENTS, _PRODUCTS = 4096, 16384


class Kept:
    """A cache of decoded values by their bits."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[bytes, Any] = {}

    def of(self, key: bytes, make: Callable[[], Any]) -> Any:
        """The decoded value of these bits, from the cache if possible."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[key] = make()
        return found


_A_KEPT, _B_KEPT, _PRODUCTS_KEPT = Kept(_FRAGMENTS), Kept(_FRAGMENTS), Kept(_PRODUCTS)


def scaled_a(codes: Any, scales: Any) -> Any:
    """A, 16x64: register v1+2*v2 of lane 4*t1+t0 holds row t1+8*v1, columns 8*t0+v0+32*v2."""
    values = E2M1_PAIRS[codes.view(np.uint8)].reshape(2, 2, 8, 4, 8)
    values = values.transpose(1, 2, 0, 3, 4).reshape(16, 4, 16)
    factors = UE4M3[scales.view(np.uint8).reshape(16, 4)]
    return (values * factors[:, :, None]).reshape(16, 64)


def scaled_b(codes: Any, scales: Any) -> Any:
    """B, 64x8: register v1 of lane 4*t1+t0 holds column t1, rows 8*t0+v0+32*v1."""
    values = E2M1_PAIRS[codes.view(np.uint8)].reshape(2, 8, 4, 8)
    values = values.transpose(1, 0, 2, 3).reshape(8, 4, 16)
    factors = UE4M3[scales.view(np.uint8).reshape(8, 4)]
    return np.ascontiguousarray((values * factors[:, :, None]).reshape(8, 64).T)


def scaled_product(left: Any, scales_a: Any, right: Any, scales_b: Any) -> Any:
    """A x B by lanes: register v1*2+v0 of lane 4*t1+t0 is row t1+8*v1, column 2*t0+v0."""
    key_a = left.tobytes() + scales_a.tobytes()
    key_b = right.tobytes() + scales_b.tobytes()

    def make() -> Any:
        a = _A_KEPT.of(key_a, lambda: scaled_a(left, scales_a))
        b = _B_KEPT.of(key_b, lambda: scaled_b(right, scales_b))
        return (a @ b).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)

    return _PRODUCTS_KEPT.of(key_a + key_b, make)


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
    """``mma.m16n8k64.kind::mxf4nvf4.block_scale.scale_vec::4X``: D = (A x scales) (B x scales) + C.

    Each scale is of 16 values along K; with ``4X`` all four bytes of a scale register count, so its
    byte-id is 0, and thread-id selects the lanes of four with the scales.
    """
    if i.modifiers[2:3] == ("m16n8k16",):
        return _multiply_halves(d, i)
    if set(i.modifiers) != _NVFP4 or i.modifiers.count("e2m1") != 2 or len(i.operands) != 8:
        raise d.unknown(i)
    word = type_named("b32")
    assert word is not None
    outs, left, right, added = _fragments(d, i)
    scale_a, scale_b = (d.source(i, d.parts(i.operands[n])[0], word) for n in (4, 6))
    chosen_a, chosen_b = (_selectors(d, i, i.operands[n]) for n in (5, 7))

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        words, reals = w.files[U32], w.files[F32]
        (byte_a, thread_a), (byte_b, thread_b) = chosen_a(w), chosen_b(w)
        if byte_a or byte_b or thread_a not in (0, 1) or not 0 <= thread_b < 4:
            raise Fault("scale selectors that scale_vec::4X does not have")
        scales_a = words[scale_a].take(_A_SCALES[thread_a])
        scales_b = words[scale_b].take(_B_SCALES[thread_b])
        product = scaled_product(words[left], scales_a, words[right], scales_b)
        reals[outs] = product + reals[added]

    return run


#: Types of 16 bits, as float32.
_FROM_HALF = {"f16": from_f16, "bf16": from_bf16}


def halves_a(words: Any, decode: Any) -> Any:
    """A, 16x16: register v1+2*v2 of lane 4*t1+t0 holds row t1+8*v1, columns 2*t0+v0+8*v2."""
    values = decode(words.view(np.uint16)).astype(np.float64).reshape(2, 2, 8, 4, 2)
    return np.ascontiguousarray(values.transpose(1, 2, 0, 3, 4)).reshape(16, 16)


def halves_b(words: Any, decode: Any) -> Any:
    """B, 16x8: register v1 of lane 4*t1+t0 holds column t1, rows 2*t0+v0+8*v1."""
    values = decode(words.view(np.uint16)).astype(np.float64).reshape(2, 8, 4, 2)
    return np.ascontiguousarray(values.transpose(0, 2, 3, 1)).reshape(16, 8)


def _multiply_halves(d: Decoder, i: Instruction) -> Step:
    """``mma.m16n8k16.row.col.f32.f16.f16.f32``, and of ``bf16``: D = A B + C.

    "Matrix Fragments for mma.m16n8k16 with floating point type".
    """
    form = ("sync", "aligned", "m16n8k16", "row", "col", "f32", i.modifiers[-2], i.modifiers[-2])
    decode = _FROM_HALF.get(i.modifiers[-2])
    if i.modifiers != (*form, "f32") or decode is None or len(i.operands) != 4:
        raise d.unknown(i)
    outs, left, right, added = _fragments(d, i)

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        words, reals = w.files[U32], w.files[F32]
        with np.errstate(all="ignore"):
            product = halves_a(words[left], decode) @ halves_b(words[right], decode)
            # register v1*2+v0 of lane 4*t1+t0 holds row t1+8*v1, column 2*t0+v0
            laid = product.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)
            reals[outs] = one_nan((laid + reals[added]).astype(np.float32))

    return run


def _selectors(d: Decoder, i: Instruction, operand: Any) -> Callable[[Warp], tuple[int, int]]:
    """``{byte-id, thread-id}``: constants, or registers of 16 bits."""
    half = type_named("u16")
    assert half is not None
    if not isinstance(operand, Vector) or len(operand.parts) != 2:
        raise d.unknown(i, "scale selectors")
    byte, thread = operand.parts
    if isinstance(byte, Number) and isinstance(thread, Number):
        known = byte.value, thread.value
        return lambda _w: known
    first, second = (d.source(i, one, half) for one in operand.parts)
    return lambda w: (int(w.views[U16][first][0]), int(w.views[U16][second][0]))


#: Emitters by opcode.
MATRIX: dict[str, Emitter] = {
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "mma": _multiply,
}


# --------------------------------------------------------------------- lanes, branches and barriers


_LANE = np.arange(LANES)
#: The mask of all lanes.
_ALL = 2**LANES - 1
_WORD, _FLAG = typed("b32"), typed("pred")


def _members(w: Warp, m: Mask, index: int, i: Instruction) -> Any:
    """The lanes that a ``.sync`` names: exactly these must be active."""
    lanes = w.lanes(m)
    named = int(w.views[U32][index][lanes[0]])
    here = int((1 << lanes).sum())
    if named & ~here or here & ~named:
        raise Fault(f"{i.name} of lanes {named:#010x} by lanes {here:#010x}")
    return lanes


def _branch(_d: Decoder, i: Instruction) -> Step:
    """``bra``: a guard makes it conditional."""
    target = i.target
    return lambda _w, _m: target


def _end(_d: Decoder, _i: Instruction) -> Step:
    """``ret`` of a kernel, and ``exit``: the thread ends."""
    return lambda _w, _m: EXIT


@lru_cache(maxsize=1024)
def _others(mode: str, by: bytes, control: bytes) -> tuple[Any, Any]:
    """The lane that each lane reads, and whether it exists; cached."""
    step = np.frombuffer(by, np.uint32).astype(np.int64) & 31
    given = np.frombuffer(control, np.uint32).astype(np.int64)
    segment, clamp = given >> 8 & 31, given & 31
    first = _LANE & segment
    last = first | clamp & ~segment
    if mode == "idx":
        other = first | step & ~segment
    elif mode == "up":
        other = _LANE - step
    else:
        other = _LANE + step if mode == "down" else _LANE ^ step
    valid = other >= last if mode == "up" else other <= last
    return np.where(valid, other, _LANE), valid


def _shuffle(d: Decoder, i: Instruction) -> Step:
    """``shfl.sync``: the value of another lane of the segment; if there is none, the own value."""
    if len(i.modifiers) != 3 or i.modifiers[0] != "sync" or i.modifiers[2] != "b32":
        raise d.unknown(i)
    mode = i.modifiers[1]
    if mode not in ("idx", "up", "down", "bfly"):
        raise d.unknown(i)
    to = i.operands[0]
    out = d.out(i, to.first if isinstance(to, Pair) else to, _WORD)
    flag = d.out(i, to.second, _FLAG) if isinstance(to, Pair) else -1
    a, b, c, members = (d.source(i, one, _WORD) for one in i.operands[1:5])

    def run(w: Warp, m: Mask) -> None:
        words = w.views[U32]
        source, valid = _others(mode, words[b].tobytes(), words[c].tobytes())
        if m is True and words[members][0] == _ALL:
            words[out][...] = words[a][source]
            if flag >= 0:
                w.views[PRED][flag][...] = valid
            return
        lanes = _members(w, m, members, i)
        if not np.isin(source[lanes], lanes).all():
            raise Fault(f"{i.name} reads a lane that does not take part")
        words[out][lanes] = words[a][source][lanes]
        if flag >= 0:
            w.views[PRED][flag][lanes] = valid[lanes]

    return run


def _vote(d: Decoder, i: Instruction) -> Step:
    """``vote.sync``: whether a predicate holds in all, any, all or none; or in which lanes."""
    if i.modifiers[:1] != ("sync",) or i.modifiers[1:] not in (
        ("all", "pred"), ("any", "pred"), ("uni", "pred"), ("ballot", "b32"),
    ):  # fmt: skip
        raise d.unknown(i)
    mode, given = i.modifiers[1], i.operands[1]
    negated = isinstance(given, Negated)
    a = d.source(i, given.name if isinstance(given, Negated) else given, _FLAG)
    out = d.out(i, i.operands[0], _WORD if mode == "ballot" else _FLAG)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        holds = w.views[PRED][a][lanes] ^ negated
        if mode == "ballot":
            w.views[U32][out][lanes] = int((1 << lanes[holds]).sum())
            return
        uniform = holds.all() or not holds.any()
        value = {"all": holds.all(), "any": holds.any(), "uni": uniform}[mode]
        w.views[PRED][out][lanes] = value

    return run


#: The reductions of ``redux.sync``, by operation and type; integers wrap.
_REDUCED: dict[tuple[str, str], Any] = {
    ("add", "u32"): np.add, ("add", "s32"): np.add,
    ("min", "u32"): np.minimum, ("max", "u32"): np.maximum,
    ("min", "s32"): np.minimum, ("max", "s32"): np.maximum,
    ("and", "b32"): np.bitwise_and, ("or", "b32"): np.bitwise_or, ("xor", "b32"): np.bitwise_xor,
}  # fmt: skip


def _reduce(d: Decoder, i: Instruction) -> Step:
    """``redux.sync``: a value combined from all named lanes, for each of them."""
    if i.modifiers[:1] != ("sync",) or i.modifiers[1:] not in _REDUCED:
        raise d.unknown(i)
    function, kind = _REDUCED[i.modifiers[1], i.modifiers[2]], d.type(i)
    out, a = d.out(i, i.operands[0], kind), d.source(i, i.operands[1], kind)
    members = d.source(i, i.operands[2], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        row = w.views[kind.view]
        row[out][lanes] = function.reduce(row[a][lanes], dtype=row[a].dtype)

    return run


def _elect(d: Decoder, i: Instruction) -> Step:
    """``elect.sync``: one of the named lanes; here the lowest."""
    to = i.operands[0]
    if i.modifiers != ("sync",) or not isinstance(to, Pair):
        raise d.unknown(i)
    out = d.out(i, to.first, _WORD) if to.first != Name("_") else -1
    flag, members = d.out(i, to.second, _FLAG), d.source(i, i.operands[1], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = _members(w, m, members, i)
        w.views[PRED][flag][lanes] = lanes == lanes[0]
        if out >= 0:
            w.views[U32][out][lanes] = lanes[0]

    return run


def _active(d: Decoder, i: Instruction) -> Step:
    """``activemask``: the active lanes."""
    if i.modifiers != ("b32",):
        raise d.unknown(i)
    out = d.out(i, i.operands[0], _WORD)

    def run(w: Warp, m: Mask) -> None:
        lanes = w.lanes(m)
        w.views[U32][out][lanes] = int((1 << lanes).sum())

    return run


def _barrier(d: Decoder, i: Instruction) -> Step:
    """``bar.sync``, ``barrier.sync`` wait, ``bar.arrive`` does not; ``bar.warp.sync``: a warp's."""
    words = [m for m in i.modifiers if m not in ("cta", "aligned")]
    if words == ["warp", "sync"]:
        members = d.source(i, i.operands[0], _WORD)

        def together(w: Warp, m: Mask) -> None:
            lanes = _members(w, m, members, i)
            if w.block.races:
                w.block.races.barrier([(w.number, lanes)], [(w.number, lanes)])

        return together
    if words not in (["sync"], ["arrive"]):
        raise d.unknown(i)
    number = d.source(i, i.operands[0], _WORD)
    threads = d.source(i, i.operands[1], _WORD) if len(i.operands) > 1 else -1
    waits = words == ["sync"]

    def run(w: Warp, m: Mask) -> None:
        whole_warp(i, m)
        which = int(w.views[U32][number][0])
        if which > 15:
            raise Fault(f"barrier {which}: a block has 16")
        count = int(w.views[U32][threads][0]) if threads >= 0 else None
        w.block.meet(w, which, count, wait=waits)

    return run


def _trap(_d: Decoder, _i: Instruction) -> Step:
    """``trap``: the kernel aborts."""

    def run(_w: Warp, _m: Mask) -> Target:
        raise Fault("the kernel executed trap")

    return run


def _nothing(_d: Decoder, i: Instruction) -> Step:
    """Instructions that change no value.

    ``prefetch``, ``setmaxnreg``, ``griddepcontrol`` and ``nanosleep``.
    """
    sleeps = i.opcode == "nanosleep"

    def run(w: Warp, _m: Mask) -> None:
        w.yielded |= sleeps

    return run


def _fence_initialised(w: Warp, _m: Mask) -> None:
    """``fence.mbarrier_init``."""
    if w.block.races:
        w.block.races.fence_initialised(w.number)


def _fence(d: Decoder, i: Instruction) -> Step:
    """``fence.proxy.async`` makes earlier writes visible to the asynchronous proxy."""
    if i.modifiers[:2] != ("proxy", "async"):
        if i.modifiers[:1] == ("proxy",) and i.modifiers[:2] != ("proxy", "tensormap::generic"):
            raise d.unknown(i)
        return _fence_initialised if i.modifiers[:1] == ("mbarrier_init",) else _order(d, i)
    if i.modifiers[2:] not in ((), ("shared::cta",), ("global",)):
        raise d.unknown(i)
    spaces = {(): (0, 1), ("global",): (1,)}.get(i.modifiers[2:], (0,))

    def run(w: Warp, m: Mask) -> None:
        if w.block.races:
            w.block.races.fence_proxy(w.number, None if m is True else w.lanes(m), spaces)

    return run


def _order(_d: Decoder, i: Instruction) -> Step:
    """``fence.sc``, ``fence.acq_rel`` and ``membar``, which order memory at a scope."""
    if i.opcode == "fence" and i.modifiers[:1] == ("proxy",):
        return lambda _w, _m: None
    scope = BLOCK if i.has("cta") else GRID

    def run(w: Warp, m: Mask) -> None:
        if w.block.races:
            w.block.races.fence(w.number, None if m is True else w.lanes(m), scope)

    return run


#: Emitters by opcode.
WARP: dict[str, Emitter] = {
    "bra": _branch,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "shfl": _shuffle,
    "vote": _vote,
    "elect": _elect,
    "redux": _reduce,
    "activemask": _active,
    "bar": _barrier,
    "barrier": _barrier,
    "fence": _fence,
    "membar": _order,
    **dict.fromkeys(
        (
            "prefetch",
            "prefetchu",
            "setmaxnreg",
            "griddepcontrol",
            "nanosleep",
            "applypriority",
        ),
        _nothing,
    ),
}
