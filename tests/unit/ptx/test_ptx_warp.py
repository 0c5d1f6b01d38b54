"""What lanes of a warp do together: shuffles, votes, matrices, and who has to be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from builder.ptx.machine import (
    E2M1,
    UE4M3,
    Fault,
    PtxError,
    from_e4m3,
    from_e5m2,
    to_bf16,
    to_f16,
)
from tests.unit.ptxworld import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LANES = np.arange(32)
MMA = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
    ".f32.e2m1.e2m1.f32.ue4m3"
)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("idx.b32 %r5|%p1, %r0, 5, 31, -1", [5] * 32),
        # segments of 8: bits 8 to 12 of c
        ("idx.b32 %r5|%p1, %r0, 3, 0x181f, -1", [n // 8 * 8 + 3 for n in range(32)]),
        ("up.b32 %r5|%p1, %r0, 2, 0, -1", [max(n - 2, n if n < 2 else 0) for n in range(32)]),
        ("down.b32 %r5|%p1, %r0, 4, 31, -1", [n + 4 if n < 28 else n for n in range(32)]),
        ("bfly.b32 %r5|%p1, %r0, 1, 31, -1", [n ^ 1 for n in range(32)]),
        ("bfly.b32 %r5|%p1, %r0, 16, 0x101f, -1", [n ^ 16 if n >= 16 else n for n in range(32)]),
    ],
)
def test_shuffles(form: str, wanted: list[int]) -> None:
    out = run(f"shfl.sync.{form}; selp.b32 %r6, 1, 0, %p1;").out
    assert out[:, 0].tolist() == wanted
    moved = [source != lane for lane, source in enumerate(wanted)]
    if form.startswith(("up", "down")):
        assert out[:, 1].tolist() == [int(m) for m in moved], "the flag: whether it was in range"


def test_votes_and_the_elected_lane() -> None:
    body = (
        "setp.gt.u32 %p1, %r0, 29; vote.sync.ballot.b32 %r5, %p1, -1;"
        "vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;"
        "vote.sync.uni.pred %p4, !%p3, -1;"
        "selp.b32 %r6, 1, 0, %p2; @%p3 add.s32 %r6, %r6, 2; @%p4 add.s32 %r6, %r6, 4;"
        "elect.sync %r7|%p5, -1; selp.b32 %r8, 1, 0, %p5;"
    )
    out = run(body).out
    assert set(out[:, 0]) == {0xC0000000}
    assert set(out[:, 1]) == {5}
    assert out[:, 3].tolist() == [1] + [0] * 31
    assert run("activemask.b32 %r5;", threads=20).out[0, 0] == 0xFFFFF
    headers = "setp.gt.u32 %p1, %r0, 29; vote.ballot.sync.b32 %r5, %p1, -1;"  # of CUDA have this
    assert run(headers).out[0, 0] == 0xC0000000


def test_halves_of_a_warp_vote_in_one_instruction_each_by_its_mask() -> None:
    body = (
        "setp.lt.u32 %p1, %r0, 16; selp.b32 %r6, 0xffff, 0xffff0000, %p1;"
        "setp.eq.u32 %p2, %r0, 3; vote.sync.ballot.b32 %r5, %p2, %r6;"
        "vote.sync.any.pred %p3, %p2, %r6; selp.b32 %r6, 1, 0, %p3;"
    )
    out = run(body).out
    assert out[:, 0].tolist() == [8] * 16 + [0] * 16
    assert out[:, 1].tolist() == [1] * 16 + [0] * 16


STORE = "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row(trans: str) -> None:
    """Four 8x8 matrices of 16-bit numbers, row k at 16*k bytes, counted through."""
    words = np.arange(256, dtype=np.uint16).view(np.uint32).reshape(32, 4)
    body = (
        f"{STORE} st.shared.v4.b32 [%r9], {{%r1, %r2, %r3, %r4}}; bar.sync 0;"
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r9];"
    )
    out = run(body, words).out
    for lane in LANES:
        row, column = lane // 4, 2 * (lane % 4)
        first, second = 8 * row + column, 8 * row + column + 1
        if trans:
            first, second = 8 * column + row, 8 * (column + 1) + row
        wanted = [(64 * m + first) | (64 * m + second) << 16 for m in range(4)]
        assert out[lane].tolist() == wanted


#: Shared memory gets the words of the input, 16 bytes of each lane.
ROWS = (
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"
    "st.shared.v4.b32 [%r9], {%r1, %r2, %r3, %r4}; bar.sync 0;"
)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_ldmatrix_of_bytes(bits: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, (32, 16), np.uint8)
    whole = [int.from_bytes(row.tobytes(), "little") for row in source]
    values = np.array([[row >> bits * n & (1 << bits) - 1 for n in range(16)] for row in whole])
    kind = "b8" if bits == 8 else f"b8x16.b{bits}x16_p{ {6: 32, 4: 64}[bits] }"
    load = f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.{kind} {{%r5, %r6, %r7, %r8}}, [%r9];"
    out = np.ascontiguousarray(run(ROWS + load, source.view(np.uint32)).out).view(np.uint8)
    for lane, one in np.ndindex(32, 16):
        matrix, column, row = one // 8, lane // 4 + one // 4 % 2 * 8, 4 * (lane % 4) + one % 4
        assert out[lane, one] == values[16 * matrix + row, column]
    load = f"ldmatrix.sync.aligned.m8n16.x4.shared.{kind} {{%r5, %r6, %r7, %r8}}, [%r9];"
    if bits == 8:
        with pytest.raises(PtxError, match="unknown instruction"):
            run(ROWS + load)
        return
    out = np.ascontiguousarray(run(ROWS + load, source.view(np.uint32)).out).view(np.uint8)
    for lane, one in np.ndindex(32, 16):
        row, column = 8 * (one // 4) + lane // 4, 4 * (lane % 4) + one % 4
        assert out[lane, one] == values[row, column]


def test_movmatrix_transposes() -> None:
    values = np.arange(64, dtype=np.uint16)
    words = np.zeros((32, 4), np.uint32)
    words[:, 0] = values.view(np.uint32)
    out = run("movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r1;", words).out[:, 0]
    assert (np.ascontiguousarray(out).view(np.uint16) == values.reshape(8, 8).T.reshape(-1)).all()
    with pytest.raises(Fault, match="by a part of a warp"):
        run("setp.lt.u32 %p1, %r0, 7; @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r1;")


def test_stmatrix_is_the_inverse_of_ldmatrix() -> None:
    words = np.arange(128, dtype=np.uint32).reshape(32, 4) * 3 + 1
    body = (
        f"{STORE} stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r9], {{%r1, %r2, %r3, %r4}};"
        "bar.sync 0; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r9];"
    )
    assert (run(body, words).out == words).all()
    two = (
        f"{STORE} stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r9], {{%r1, %r2}};"
        "bar.sync 0; ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5, %r6}, [%r9];"
    )
    assert (run(two, words).out[:, :2] == words[:, :2]).all()


# ----------------------------------------------------------------------------------- block scaling


def reference(a: Any, b: Any, c: Any, scale_a: Any, scale_b: Any) -> Any:
    """D by the ISA's figures, element by element: no layout of the executor's is used."""
    left, right = np.zeros((16, 64)), np.zeros((64, 8))
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(32):  # a0 to a31
            row = group if i % 16 < 8 else group + 8
            column = thread * 8 + i % 8 + (32 if i >= 16 else 0)
            code = int(a[lane, i // 8]) >> (4 * (i % 8)) & 15
            # the scale of this row and 16 columns: bytes of lane 4*(row % 8) + row // 8
            byte = int(scale_a[4 * (row % 8) + row // 8]) >> (8 * (column // 16)) & 255
            left[row, column] = E2M1[code] * UE4M3[byte]
        for i in range(16):  # b0 to b15
            row = thread * 8 + i % 8 + (32 if i >= 8 else 0)
            code = int(b[lane, i // 8]) >> (4 * (i % 8)) & 15
            byte = int(scale_b[4 * group]) >> (8 * (row // 16)) & 255
            right[row, group] = E2M1[code] * UE4M3[byte]
    exact = left @ right
    out = np.zeros((32, 4), np.float32)
    for lane in range(32):
        for i in range(4):
            place = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            out[lane, i] = exact[place] + c[lane, i]
    return out


@pytest.mark.parametrize(
    ("operation", "given", "found"),
    [
        ("add.s32", range(-3, 29), 400),
        ("add.u32", [0xFFFFFFFF, 2, *[0] * 30], 1),
        ("min.s32", range(-3, 29), 0xFFFFFFFD),
        ("min.u32", range(-3, 29), 0),
        ("max.s32", range(-3, 29), 28),
        ("max.u32", range(-3, 29), 0xFFFFFFFF),
        ("and.b32", [0xF0, 0x3C, *[0xFF] * 30], 0x30),
        ("or.b32", [0xF0, 0x0C, *[0] * 30], 0xFC),
        ("xor.b32", [0xF0, 0x3C, *[0] * 30], 0xCC),
    ],
)
def test_one_value_of_all_lanes(operation: str, given: Sequence[int], found: int) -> None:
    """PTX ISA, "redux.sync": each lane named gets it, and those alone are counted."""
    rows = [[value] for value in given]
    assert set(run(f"redux.sync.{operation} %r5, %r1, -1;", rows).out[:, 0]) == {found}
    some = "setp.lt.u32 %p1, %r0, 2; @%p1 redux.sync.add.s32 %r5, %r1, 3;"
    out = run(f"mov.b32 %r5, 9; {some}", [[4], [5], *[[6]] * 30]).out[:, 0]
    assert out.tolist() == [9, 9, *[9] * 30]
    with pytest.raises(
        Fault, match=r"redux\.sync\.add\.s32 of lanes 0xffffffff by lanes 0x00000003"
    ):
        run(some.replace("3;", "-1;"))


ONE, TWO, MINUS_THREE, NAN = 0x3F800000, 0x40000000, 0xC0400000, 0x7FC12345


@pytest.mark.parametrize(
    ("operation", "given", "found"),
    [
        ("min", [ONE, MINUS_THREE, *[TWO] * 30], MINUS_THREE),
        ("max", [ONE, MINUS_THREE, *[TWO] * 30], TWO),
        ("max.abs", [ONE, MINUS_THREE, *[TWO] * 30], MINUS_THREE ^ 1 << 31),
        ("min", [0x80000000, *[0] * 31], 0x80000000),
        ("max", [0x80000000, *[0] * 31], 0),
        ("min", [NAN, *[TWO] * 31], TWO),
        ("min", [NAN] * 32, 0x7FFFFFFF),
        ("min.NaN", [NAN, *[TWO] * 31], 0x7FFFFFFF),
        ("max.abs.NaN", [NAN, *[TWO] * 31], 0x7FFFFFFF),
    ],
)
def test_the_extreme_of_all_lanes(operation: str, given: Sequence[int], found: int) -> None:
    """PTX ISA, "redux.sync", for f32: of sm_100a, which is not to be had here."""
    rows = [[value] for value in given]
    assert set(run(f"redux.sync.{operation}.f32 %r5, %r1, -1;", rows).out[:, 0]) == {found}


@pytest.mark.parametrize("one", ["redux.sync.add.b32", "redux.sync.add.f32", "redux.add.s32"])
def test_unknown_reductions_are_named(one: str) -> None:
    with pytest.raises(PtxError, match=f"unknown instruction {one}"):
        run(f"{one} %r5, %r1, -1;")


def mma_body(form: str = MMA, selectors: str = "{0, 0}") -> str:
    """A from the input, B and scales from the lane's number by way of a hash."""
    return (
        "mul.lo.s32 %r20, %r0, 0x9E3779B1; xor.b32 %r21, %r20, 0x5bd1e995;"
        "and.b32 %r22, %r20, 0x0f0f0f0f; add.s32 %r22, %r22, 0x30303030;"
        "and.b32 %r23, %r21, 0x07070707; add.s32 %r23, %r23, 0x38383838;"
        "cvt.rn.f32.u32 %f1, %r0; mov.f32 %f2, 0f40000000; mov.b32 %r24, %f1; mov.b32 %r25, %f2;"
        f"{form} {{%r5, %r6, %r7, %r8}}, {{%r1, %r2, %r3, %r4}}, {{%r20, %r21}},"
        f" {{%r24, %r25, %r24, %r25}}, %r22, {selectors}, %r23, {{0, 0}};"
    )


#: The same modifiers in other orders: of the CuTe DSL 4.4.2, and from 4.5 on.
ORDERS = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
)


def test_the_block_scaled_mma_matches_its_definition() -> None:
    a = np.random.default_rng(1).integers(0, 2**32, (32, 4), dtype=np.uint32)
    found = run(mma_body(), a).out.view(np.float32)
    first = (LANES.astype(np.uint64) * 0x9E3779B1).astype(np.uint32)
    second = first ^ np.uint32(0x5BD1E995)
    scale_a = (first & np.uint32(0x0F0F0F0F)) + np.uint32(0x30303030)
    scale_b = (second & np.uint32(0x07070707)) + np.uint32(0x38383838)
    two = np.full(32, 2.0, np.float32)
    c = np.stack([LANES, two, LANES, two], 1)
    wanted = reference(a, np.stack([first, second], 1), c, scale_a, scale_b)
    assert (found == wanted).all()
    for other in ORDERS:  # as other writers of PTX have them
        assert (run(mma_body(other), a).out.view(np.float32) == wanted).all()


def test_invalid_selectors_of_4x() -> None:
    with pytest.raises(Fault, match="scale selectors"):
        run(mma_body(selectors="{1, 0}"))
    with pytest.raises(Fault, match="scale selectors"):
        run(mma_body(selectors="{0, 2}"))


MXF8 = (
    "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col"
    ".f32.{a}.{b}.f32.ue8m0"
)


def mxf8_body(kinds: tuple[str, str] = ("e4m3", "e4m3"), by: str = "{1, 1}, %r23, {2, 3}") -> str:
    """A block-scaled product of bytes below 2, of scales from 2^-3 to 2^4."""
    form = MXF8.format(a=kinds[0], b=kinds[1])
    return (
        "mul.lo.u32 %r20, %r0, 0x9e3779b1; and.b32 %r20, %r20, 0xbfbfbfbf; xor.b32 %r21, %r20, %r1;"
        "and.b32 %r21, %r21, 0xbfbfbfbf;"
        "and.b32 %r22, %r1, 0x07070707; add.s32 %r22, %r22, 0x7c7c7c7c;"
        "and.b32 %r23, %r2, 0x07070707; add.s32 %r23, %r23, 0x7c7c7c7c;"
        "and.b32 %r1, %r1, 0xbfbfbfbf; and.b32 %r2, %r2, 0xbfbfbfbf;"
        "and.b32 %r3, %r3, 0xbfbfbfbf; and.b32 %r4, %r4, 0xbfbfbfbf;"
        "cvt.rn.f32.u32 %f1, %r0; mov.b32 %r24, %f1;"
        f"{form} {{%r5, %r6, %r7, %r8}}, {{%r1, %r2, %r3, %r4}}, {{%r20, %r21}},"
        f" {{%r24, %r24, %r24, %r24}}, %r22, {by};"
    )


def mxf8_wanted(words: Any, values: Sequence[Any], *, scaled: bool = True) -> Any:
    """Value by value, from the tables of fragments and of scales."""
    below = np.uint32(0xBFBFBFBF)
    first = (LANES.astype(np.uint64) * 0x9E3779B1).astype(np.uint32) & below
    b = np.stack([first, (first ^ words[:, 0]) & below], 1).view(np.uint8).reshape(32, 2, 4)
    a = (words & below).view(np.uint8).reshape(32, 4, 4)
    powers = [
        ((words[:, n] & np.uint32(0x07070707)) + np.uint32(0x7C7C7C7C))
        .view(np.uint8)
        .reshape(32, 4)
        for n in (0, 1)
    ]
    found = np.zeros((32, 4), np.float32)
    for lane in range(32):
        for r in range(4):
            row, column = lane // 4 + 8 * (r >> 1), 2 * (lane % 4) + (r & 1)
            total = 0.0
            for k in range(32):
                t, upper, byte = k % 16 // 4, k // 16, k % 4
                left = a[4 * (row % 8) + t, row // 8 + 2 * upper, byte]
                right = b[4 * column + t, upper, byte]
                total += values[0](left) * values[1](right)
            scale = int(powers[0][4 * (row % 8) + row // 8 + 2, 1]) - 127
            scale += int(powers[1][4 * column + 3, 2]) - 127
            found[lane, r] = np.float32(total * 2.0 ** (scale if scaled else 0) + lane)
    return found


def small_float(exponents: int, fractions: int, code: int) -> float:
    """A number without infinity and NaN, of the OCP Microscaling Formats: sign first."""
    bias, exponent = (1 << exponents - 1) - 1, code >> fractions & (1 << exponents) - 1
    fraction, sign = code & (1 << fractions) - 1, code >> exponents + fractions & 1
    size = (fraction / (1 << fractions) + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return -size if sign else size


#: The value of a byte in ``kind::f8f6f4``; four bits are in its middle.
DECODE: dict[str, Callable[[int], float]] = {
    "e4m3": lambda code: float(from_e4m3(np.array([code], np.uint8))[0]),
    "e5m2": lambda code: float(from_e5m2(np.array([code], np.uint8))[0]),
    "e2m1": lambda code: small_float(2, 1, int(code) >> 2 & 15),
    "e2m3": lambda code: small_float(2, 3, int(code) & 63),
    "e3m2": lambda code: small_float(3, 2, int(code) & 63),
}


def test_small_floats_are_those_of_the_format() -> None:
    assert [small_float(2, 1, code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (small_float(2, 3, 31), small_float(2, 3, 1)) == (7.5, 0.125)
    assert (small_float(3, 2, 31), small_float(3, 2, 1), small_float(3, 2, 32)) == (28, 0.0625, 0)


@pytest.mark.parametrize(
    "kinds",
    [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e2m1", "e4m3"), ("e2m3", "e3m2")],
)
def test_the_block_scaled_product_of_bytes(kinds: tuple[str, str]) -> None:
    words = np.random.default_rng(2).integers(0, 2**32, (32, 4), dtype=np.uint32)
    values = [DECODE[one] for one in kinds]
    for fast in (True, False):
        found = run(mxf8_body(kinds), words, fast=fast).out.view(np.float32)
        assert (found == mxf8_wanted(words, values)).all()


@pytest.mark.parametrize("form", ["satfinite.s32.s8.s8.s32", "s32.s8.s8.s32.satfinite"])
def test_a_product_of_bytes_that_is_limited(form: str) -> None:
    """From the tables of fragments; the second place of the word is that of vLLM's Marlin."""
    words = np.random.default_rng(6).integers(0, 2**32, (32, 4), dtype=np.uint32)
    most = 2**31 - 1
    body = (
        f"mov.b32 %r20, {most}; mma.sync.aligned.m16n8k32.row.col.{form} {{%r5, %r6, %r7, %r8}},"
        " {%r1, %r2, %r3, %r4}, {%r1, %r3}, {%r20, %r20, %r20, %r20};"
    )
    found = run(body, words).out.view(np.int32)
    parts = words.view(np.int8).reshape(8, 4, 2, 2, 4).astype(int)  # g, t, columns, rows, byte
    a = parts.transpose(3, 0, 2, 1, 4).reshape(16, 32)
    b = parts[:, :, :, 0].transpose(0, 2, 1, 3).reshape(8, 32)
    exact = (a @ b.T + most).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    assert (exact > most).any(), "else nothing is limited"
    assert (found == np.minimum(exact, most)).all()
    wrapped = run(body.replace(".satfinite", "").replace("satfinite.", ""), words).out
    assert (wrapped == (exact & 0xFFFFFFFF).astype(np.uint32)).all()
    with pytest.raises(PtxError, match="unknown instruction mma"):  # floats cannot be limited
        run(body.replace("s32", "f32").replace("s8", "e4m3").replace("%r5, %r6", "%f5, %f6"))


def test_invalid_selectors_of_1x() -> None:
    with pytest.raises(Fault, match="scale selectors"):
        run(mxf8_body(by="{1, 2}, %r23, {2, 3}"))
    with pytest.raises(PtxError, match="unknown instruction mma"):
        run(mxf8_body(("e2m2", "e4m3")))


@pytest.mark.parametrize("kinds", [("e2m1", "e2m1"), ("e3m2", "e5m2"), ("e4m3", "e2m3")])
def test_the_product_of_small_floats_without_scales(kinds: tuple[str, str]) -> None:
    words = np.random.default_rng(3).integers(0, 2**32, (32, 4), dtype=np.uint32)
    form = f"kind::f8f6f4.m16n8k32.row.col.f32.{kinds[0]}.{kinds[1]}.f32"
    body = mxf8_body().rpartition("mma")[0] + (
        f"mma.sync.aligned.{form} {{%r5, %r6, %r7, %r8}}, {{%r1, %r2, %r3, %r4}}, {{%r20, %r21}},"
        " {%r24, %r24, %r24, %r24};"
    )
    found = run(body, words).out.view(np.float32)
    assert (found == mxf8_wanted(words, [DECODE[one] for one in kinds], scaled=False)).all()
    with pytest.raises(PtxError, match="unknown instruction mma"):
        run(body.replace("kind::f8f6f4.", "").replace("e5m2", "e3m2"))


@pytest.mark.parametrize("kind", ["mxf4.block_scale", "mxf4nvf4.block_scale.scale_vec::2X"])
def test_fp4_with_a_power_of_two_for_each_32_values(kind: str) -> None:
    """Value by value, from the tables of fragments and of scales: byte 2 of A's, byte 0 of B's."""
    words = np.random.default_rng(4).integers(0, 2**32, (32, 4), dtype=np.uint32)
    body = mxf8_body().rpartition("mma")[0] + (
        f"mma.sync.aligned.kind::{kind}.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"
        " {%r5, %r6, %r7, %r8}, {%r1, %r2, %r3, %r4}, {%r20, %r21}, {%r24, %r24, %r24, %r24},"
        " %r22, {2, 1}, %r23, {0, 3};"
    )
    found = run(body, words).out.view(np.float32)
    below, seven = np.uint32(0xBFBFBFBF), np.uint32(0x07070707)
    first = (LANES.astype(np.uint64) * 0x9E3779B1).astype(np.uint32) & below
    b, a = np.stack([first, (first ^ words[:, 0]) & below], 1), words & below
    scales = (words[:, :2] & seven) + np.uint32(0x7C7C7C7C)
    powers = np.ascontiguousarray(scales).view(np.uint8).reshape(32, 2, 4).astype(int) - 127
    for lane in range(32):
        for r in range(4):
            row, column = lane // 4 + 8 * (r >> 1), 2 * (lane % 4) + (r & 1)
            total = float(lane)
            for k in range(64):
                t, upper, nibble = k % 32 // 8, k // 32, k % 8
                left = int(a[4 * (row % 8) + t, row // 8 + 2 * upper]) >> 4 * nibble & 15
                right = int(b[4 * column + t, upper]) >> 4 * nibble & 15
                power = powers[4 * (row % 8) + row // 8 + 2, 0, 2 + k // 32]
                power += powers[4 * column + 3, 1, k // 32]
                total += small_float(2, 1, left) * small_float(2, 1, right) * 2.0 ** int(power)
            assert found[lane, r] == np.float32(total)
    with pytest.raises(Fault, match="scale selectors that scale_vec::2X"):
        run(body.replace("{2, 1}", "{1, 1}"))


# ------------------------------------------------------------------------------ who has to be there


@pytest.mark.parametrize(
    "body",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r9];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r5};",
        mma_body().rpartition(";mma")[2].join(["mma", ""]),
    ],
)
def test_aligned_instructions_need_the_whole_warp(body: str) -> None:
    part = f"mov.b32 %r9, dynamic; setp.lt.u32 %p1, %r0, 31; @!%p1 bra OUT; {body} OUT:"
    with pytest.raises(Fault, match=r"by a part of a warp \(31 lanes\)") as caught:
        run(part)
    assert "PTX line 11" in str(caught.value)
    assert "warp 0" in str(caught.value)


def test_sync_instructions_need_the_lanes_that_they_name() -> None:
    body = "setp.lt.u32 %p1, %r0, 16; @!%p1 bra OUT; shfl.sync.idx.b32 %r5, %r0, 0, 31, {m}; OUT:"
    assert run(body.replace("{m}", "0xffff")).out[3, 0] == 0
    assert run(body.replace("{m}", "-1")).out[3, 0] == 0, "the other lanes have ended"
    apart = (
        "setp.lt.u32 %p1, %r0, 16; @!%p1 bra LOW; shfl.sync.idx.b32 %r5, %r0, 0, 31, -1; bra END;"
        "LOW: vote.sync.any.pred %p2, %p1, -1; END:"
    )
    with pytest.raises(Fault, match="of lanes 0xffffffff by lanes 0x0000ffff"):
        run(apart)
    undefined = run(body.replace("{m}", "0xffff").replace("%r0, 0, 31", "%r0, 20, 31"))
    assert undefined.out[3, 0] == 0xDEADBEEF, "a lane that takes no part"


def test_a_kernel_that_traps() -> None:
    with pytest.raises(Fault, match="PTX line 12, block 0,0,0, warp 0: the kernel executed trap"):
        run("\ntrap;")
    with pytest.raises(Fault, match="the kernel executed brkpt"):
        run("brkpt;")


def test_a_block_is_a_cluster_of_its_own() -> None:
    body = (
        "mov.b32 %r9, dynamic; mov.b32 %r10, 0; mapa.shared::cluster.u32 %r5, %r9, %r10;"
        "getctarank.shared::cluster.u32 %r6, %r9; sub.s32 %r5, %r5, %r9;"
        "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9], 32; bar.sync 0;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];"
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r9], 0; @!%p2 bra WAIT;"
    )
    assert run(body).out[:, :2].tolist() == [[0, 0]] * 32
    with pytest.raises(Fault, match="mapa to block 1 of a cluster of 1"):
        run(body.replace("mov.b32 %r10, 0;", "mov.b32 %r10, 1;"))


#: Lanes that have nothing to do come back to the top of the loop, which lies before what others do.
LOOP = (
    "mov.b32 %r9, 0; mov.b32 %r10, 0;"
    "TOP: {gather} setp.eq.u32 %p1, %r9, 3; @%p1 bra OUT; add.s32 %r9, %r9, 1;"
    "setp.lt.u32 %p2, %r0, 16; @%p2 bra TOP; add.s32 %r10, %r10, 1; bra TOP;"
    "OUT: mov.b32 %r6, %r10;"
)


@pytest.mark.parametrize(
    "gather",
    [
        "bar.sync 0;",
        "bar.warp.sync -1;",
        "shfl.sync.idx.b32 %r5, %r9, 0, 31, -1;",
        "vote.sync.any.pred %p3, %p2, -1;",
        "elect.sync _|%p3, -1;",
    ],
)
def test_lanes_wait_for_diverged_lanes(gather: str) -> None:
    """``.sync``: until all lanes that are named execute the same instruction."""
    assert run(LOOP.format(gather=gather)).out[:, 1].tolist() == [0] * 16 + [3] * 16


def test_no_lane_waits_for_exited_lanes() -> None:
    body = "setp.lt.u32 %p2, %r0, 16; @%p2 bra OUT; bar.sync 0; OUT: mov.b32 %r5, 1;"
    assert run(body, threads=64).out[:, 0].tolist() == [1] * 64
    with pytest.raises(Fault, match=r"bar\.sync by a part of a warp \(16 lanes\)"):
        run("setp.lt.u32 %p2, %r0, 16; @%p2 bra A; bar.sync 0; bra OUT; A: bar.sync 1; OUT:")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_the_mma_of_halves_has_the_fragments_of_the_isa(kind: str) -> None:
    """ "Matrix Fragments for mma.m16n8k16 with floating point type", element by element."""
    values = np.random.default_rng(3).integers(-8, 9, (32, 8)).astype(np.float32)
    halves = to_f16(values) if kind == "f16" else to_bf16(values)
    given = np.ascontiguousarray(halves.astype(np.uint16)).view(np.uint32)
    out = run(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r5, %r6, %r7, %r8}}, "
        "{%r1, %r2, %r3, %r4}, {%r3, %r1}, {0f3F800000, 0f3F800000, 0f3F800000, 0fC0000000};",
        given,
    ).out
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            a[row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)] = values[lane, i]
        for i, value in enumerate([*values[lane, 4:6], *values[lane, 0:2]]):
            b[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group] = value
    found = np.ascontiguousarray(out).view(np.float32)
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)
            assert found[lane, i] == (a @ b)[row, column] + (1, 1, 1, -2)[i]


@pytest.mark.parametrize(
    "form",
    [
        "m16n8k16.row.col.f16.f16.f16.f16",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k8.row.col.f32.f16.f16.f32",
        "m16n8k16.row.row.f32.f16.f16.f32",
    ],
)
def test_another_mma_is_not_known(form: str) -> None:
    registers = "{%r5, %r6, %r7, %r8}, {%r1, %r2, %r3, %r4}, {%r3, %r1}, {%r5, %r6, %r7, %r8}"
    with pytest.raises(PtxError, match="unknown instruction mma"):
        run(f"mma.sync.aligned.{form} {registers};")


def test_an_mma_by_a_part_of_a_warp_is_an_error() -> None:
    registers = "{%r5, %r6, %r7, %r8}, {%r1, %r2, %r3, %r4}, {%r3, %r1}, {%r5, %r6, %r7, %r8}"
    halves = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {registers};"
    with pytest.raises(Fault, match=r"by a part of a warp \(8 lanes\)"):
        run(f"setp.lt.u32 %p1, %r0, 8; @%p1 {halves}")
