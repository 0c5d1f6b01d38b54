"""Integer, logic, floating-point and conversion instructions, one by one, from the ISA's text."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from builder.ptx import machine
from builder.ptx.machine import PtxError
from tests.unit.ptxworld import one, run


def bits(value: float) -> int:
    """A float32's bits."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


M1 = 0xFFFFFFFF
#: The halves of %r1; its low byte; %r1 and %r2 as float64; %rd7 as float32.
HALF = "mov.b32 {%rs1, %rs2}, %r1;"
BYTE = "{ .reg .b8 b; cvt.u8.u32 b, %r1;"
WIDE = "cvt.f64.f32 %rd5, %r1; cvt.f64.f32 %rd6, %r2;"
NARROW = "cvt.rn.f32.f64 %r5, %rd7;"


@pytest.mark.parametrize(
    ("body", "given", "wanted"),
    [
        # Integer Arithmetic Instructions
        ("add.s32 %r5, %r1, %r2;", (M1, 2), 1),
        ("sub.u32 %r5, %r1, %r2;", (1, 2), M1),
        ("mul.lo.s32 %r5, %r1, %r2;", (0x10001, 0x10001), 0x20001),
        ("mul.hi.u32 %r5, %r1, %r2;", (M1, M1), M1 - 1),
        ("mul.hi.s32 %r5, %r1, %r2;", (M1, M1), 0),
        ("mul.wide.u32 %rd5, %r1, %r2; mov.b64 {_, %r5}, %rd5;", (M1, M1), M1 - 1),
        ("mul.wide.s32 %rd5, %r1, %r2; mov.b64 {_, %r5}, %rd5;", (M1, 5), M1),
        ("mad.lo.s32 %r5, %r1, %r2, %r3;", (3, 5, M1), 14),
        ("div.u32 %r5, %r1, %r2;", (7, 2), 3),
        ("div.s32 %r5, %r1, %r2;", (-7, 2), M1 - 2),
        ("rem.s32 %r5, %r1, %r2;", (-7, 2), M1),
        ("neg.s32 %r5, %r1;", (5,), M1 - 4),
        # the NaN of elements outside of a tensor, of either sign; as an H200 gives them
        ("fma.rn.oob.f16x2 %r5, %r1, %r2, %r3;", (0x3C007FF7, 0x3C003C00, 0x40004000), 0x42000000),
        ("fma.rn.oob.bf16x2 %r5, %r1, %r2, %r3;", (0x3F803F80, 0xFFF73F80, 0x40004000), 0x00004040),
        ("fma.rn.oob.f16x2 %r5, %r1, %r2, %r3;", (0x3C003C00, 0x3C003C00, 0x7FF74000), 0x7FFF4200),
        ("fma.rn.oob.f16x2 %r5, %r1, %r2, %r3;", (0x7FF77FFF, 0, 0), 0x00007FFF),
        ("fma.rn.oob.relu.bf16x2 %r5, %r1, %r2, %r3;", (0x3F807FF7, 0xBF803F80, 0), 0),
        ("abs.s32 %r5, %r1;", (-5,), 5),
        ("min.s32 %r5, %r1, %r2;", (-1, 1), M1),
        ("min.u32 %r5, %r1, %r2;", (-1, 1), 1),
        ("max.s32 %r5, %r1, %r2;", (-1, 1), 1),
        # Logic and Shift Instructions: amounts are clamped to the width
        ("and.b32 %r5, %r1, %r2;", (12, 10), 8),
        ("or.b32 %r5, %r1, %r2;", (12, 10), 14),
        ("xor.b32 %r5, %r1, %r2;", (12, 10), 6),
        ("not.b32 %r5, %r1;", (0,), M1),
        ("shl.b32 %r5, %r1, %r2;", (3, 31), 0x80000000),
        ("shl.b32 %r5, %r1, %r2;", (3, 32), 0),
        ("shl.b32 %r5, %r1, %r2;", (3, M1), 0),
        ("shr.u32 %r5, %r1, %r2;", (M1, 31), 1),
        ("shr.u32 %r5, %r1, %r2;", (M1, 32), 0),
        ("shr.s32 %r5, %r1, %r2;", (0x80000000, 31), M1),
        ("shr.s32 %r5, %r1, %r2;", (0x80000000, 99), M1),
        ("shr.s32 %r5, %r1, 4;", (0x7FFFFFFF,), 0x7FFFFFF),
        # the ISA's examples of tables: a & b & c, a | b | c, a & b & ~c, (a & b | c) ^ a
        ("lop3.b32 %r5, %r1, %r2, %r3, 0x80;", (0xF0, 0xCC, 0xAA), 0x80),
        ("lop3.b32 %r5, %r1, %r2, %r3, 0xFE;", (0xF0, 0xCC, 0xAA), 0xFE),
        ("lop3.b32 %r5, %r1, %r2, %r3, 0x40;", (0xF0, 0xCC, 0xAA), 0x40),
        ("lop3.b32 %r5, %r1, %r2, %r3, 0x1A;", (0xF0, 0xCC, 0xAA), 0x1A),
        # prmt: bytes b7..b0 of {b, a}; bit 3 of a selector repeats the sign
        ("prmt.b32 %r5, %r1, %r2, 0x7531;", (0x33221100, 0x77665544), 0x77553311),
        ("prmt.b32 %r5, %r1, %r2, 0x0123;", (0x33221100, 0), 0x00112233),
        ("prmt.b32 %r5, %r1, %r2, 0xba98;", (0x8000FF7F, 0), 0xFF00FF00),
        # Comparison and Selection
        ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (-1, 1), 1),
        ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (-1, 1), 2),
        ("setp.hi.u32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (-1, 1), 1),
        ("setp.eq.s32 %p2, %r3, 0; setp.ge.and.s32 %p1, %r1, %r2, %p2; selp.b32 %r5, 1, 2, %p1;",
         (5, 5, 0), 1),
        ("setp.eq.s32 %p2, %r3, 0; setp.ge.and.s32 %p1, %r1, %r2, !%p2; selp.b32 %r5, 1, 2, %p1;",
         (5, 5, 0), 2),
        ("setp.ne.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (math.nan, 1.0), 2),
        ("setp.eq.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (0.0, -0.0), 1),
        # of NaN: only those that end in u hold, nan asks for it, num that there is none
        ("setp.neu.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (math.nan, 1.0), 1),
        ("setp.neu.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (0.0, -0.0), 2),
        ("setp.equ.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (1.0, math.nan), 1),
        ("setp.ltu.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (2.0, 1.0), 2),
        ("setp.geu.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (math.nan, 1.0), 1),
        ("setp.nan.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (1.0, math.nan), 1),
        ("setp.num.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (1.0, math.nan), 2),
        ("setp.gt.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (2.0**-130, 0.0), 1),
        ("setp.gt.ftz.f32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", (2.0**-130, 0.0), 2),
        ("setp.eq.s32 %p2, %r3, 0; setp.neu.and.f32 %p1, %r1, %r2, !%p2; selp.b32 %r5, 1, 2, %p1;",
         (math.nan, 1.0, 0), 2),
        # values, not bits: -1 < 1, 0 = -0, a NaN is not less
        (f"{HALF} setp.lt.bf16 %p1, %rs1, %rs2; selp.b32 %r5, 1, 2, %p1;", (0x3F80BF80,), 1),
        (f"{HALF} setp.lt.bf16 %p1, %rs1, %rs2; selp.b32 %r5, 1, 2, %p1;", (0x80000000,), 2),
        (f"{HALF} setp.lt.bf16 %p1, %rs1, %rs2; selp.b32 %r5, 1, 2, %p1;", (0x3F80FFC0,), 2),
        (f"{HALF} setp.eq.f16 %p1, %rs1, %rs2; selp.b32 %r5, 1, 2, %p1;", (0x80000000,), 1),
        ("mov.pred %p1, 1; not.pred %p2, %p1; xor.pred %p3, %p1, %p2; selp.b32 %r5, 1, 2, %p3;",
         (), 1),
        # mov packs and unpacks, the low part first
        ("mov.b64 %rd5, {%r1, %r2}; mov.b64 {%r6, %r5}, %rd5;", (1, 2), 2),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r5, {%rs2, %rs1};", (0x12345678,), 0x56781234),
        ("mov.u32 %r5, %ntid.x;", (), 32),
        ("mov.u32 %r5, %nctaid.y;", (), 1),
        # cvt: cut, extended by the source's sign, and by the destination's in a wider register
        ("cvt.u16.u32 %rs1, %r1; cvt.u32.u16 %r5, %rs1;", (0x12345678,), 0x5678),
        ("cvt.u16.u32 %rs1, %r1; cvt.s32.s16 %r5, %rs1;", (0x8000,), 0xFFFF8000),
        ("cvt.s8.s32 %rs1, %r1; cvt.u32.u16 %r5, %rs1;", (0x80,), 0xFF80),
        ("cvt.s8.s32 %rs1, %r1; cvt.s16.s8 %rs2, %rs1; cvt.u32.u16 %r5, %rs2;", (0x17F,), 0x7F),
        ("cvt.s64.s32 %rd5, %r1; mov.b64 {_, %r5}, %rd5;", (-1,), M1),
        ("cvt.u64.u32 %rd5, %r1; mov.b64 {_, %r5}, %rd5;", (-1,), 0),
        # of a source register that is wider than the type the low part, as in vLLM's Marlin
        ("mov.b64 %rd5, {%r1, %r2}; cvt.s64.s32 %rd5, %rd5; mov.b64 {_, %r5}, %rd5;", (-5, 7), M1),
        ("mov.b64 %rd5, {%r1, %r2}; cvt.u64.u16 %rd5, %rd5; mov.b64 {%r5, _}, %rd5;",
         (0x12345678, 7), 0x5678),
        ("cvt.rn.f32.s32 %r5, %r1;", (-3,), bits(-3.0)),
        ("cvt.rn.f32.u32 %r5, %r1;", (-1,), bits(2.0**32)),
        ("cvt.rzi.s32.f32 %r5, %r1;", (-2.75,), M1 - 1),
        ("cvt.rni.s32.f32 %r5, %r1;", (2.5,), 2),
        ("cvt.rmi.s32.f32 %r5, %r1;", (-2.25,), M1 - 2),
        ("cvt.rzi.s32.f32 %r5, %r1;", (1e20,), 0x7FFFFFFF),
        ("cvt.rzi.s32.f32 %r5, %r1;", (math.nan,), 0),
        ("cvt.rzi.u32.f32 %r5, %r1;", (-5.0,), 0),
        # E4M3 to f16: 1 and -448; the smallest subnormal and NaN
        ("mov.b32 {%rs1, _}, %r1; cvt.rn.f16x2.e4m3x2 %r5, %rs1;", (0xFE38,), 0xDF003C00),
        ("mov.b32 {%rs1, _}, %r1; cvt.rn.f16x2.e4m3x2 %r5, %rs1;", (0xFF01,), 0x7FFF1800),
        # E2M1 to f16: the low code is the low half: 6 and -0.5; 0.5 and -0
        (f"{BYTE} cvt.rn.f16x2.e2m1x2 %r5, b; }}", (0x97,), 0xB8004600),
        (f"{BYTE} cvt.rn.f16x2.e2m1x2 %r5, b; }}", (0x12381,), 0x80003800),
        # the same to bf16
        ("mov.b32 {%rs1, _}, %r1; cvt.rn.bf16x2.e4m3x2 %r5, %rs1;", (0xFE38,), 0xC3E03F80),
        ("mov.b32 {%rs1, _}, %r1; cvt.rn.bf16x2.e4m3x2 %r5, %rs1;", (0xFF01,), 0x7FFF3B00),
        (f"{BYTE} cvt.rn.bf16x2.e2m1x2 %r5, b; }}", (0x97,), 0xBF0040C0),
        (f"{BYTE} cvt.rn.bf16x2.e2m1x2 %r5, b; }}", (0x12381,), 0x80003F00),
        # pairs of bfloat16, each rounded once: 1.5 * 2, and a tie to the even 1 + 2**-6
        ("mul.rn.bf16x2 %r5, %r1, %r2;", (0x3FC03F83, 0x40003F83), 0x40403F86),
        ("mul.bf16x2 %r5, %r1, %r2;", (0x7F80FFC0, 0x00003F80), 0x7FFF7FFF),
        ("add.rn.bf16x2 %r5, %r1, %r2;", (0x43803F80, 0x3F803F80), 0x43804000),
        ("sub.bf16x2 %r5, %r1, %r2;", (0x43803F80, 0x3F803F80), 0x437F0000),
        # one bfloat16: the other half of the register stays; a tie to the even 1 + 2**-6; -0
        (f"{HALF} mul.bf16 %rs1, %rs1, %rs2; mov.b32 %r5, {{%rs1, %rs2}};", (0x40003FC0,),
         0x40004040),
        (f"{HALF} mul.rn.bf16 %rs1, %rs1, %rs1; mov.b32 %r5, {{%rs1, %rs2}};", (0x00003F83,),
         0x3F86),
        (f"{HALF} mul.bf16 %rs1, %rs1, %rs2; mov.b32 %r5, {{%rs1, %rs2}};", (0x80003F80,),
         0x80008000),
        # of 16 and of 32 bits: 1 + 2**-8 is kept, as bfloat16 it would be 1; infinity and NaN
        (f"{HALF} add.rn.f32.bf16 %r5, %rs1, %r2;", (0x00003B80, bits(1.0)), bits(1 + 2.0**-8)),
        (f"{HALF} add.f32.bf16 %r5, %rs2, %r2;", (0x7F800000, bits(-math.inf)), 0x7FFFFFFF),
        (f"{HALF} add.f32.f16 %r5, %rs1, %r2;", (0x00000001, bits(1.0)), bits(1.0)),
        (f"{HALF} add.f32.f16 %r5, %rs1, %r2;", (0x0000C000, bits(0.5)), bits(-1.5)),
        # and of float16: 1.5 * 2, the smallest subnormal halved, and beyond the largest
        ("mul.f16x2 %r5, %r1, %r2;", (0x3E000001, 0x40003800), 0x42000000),
        ("mul.rn.f16x2 %r5, %r1, %r2;", (0x7BFF7E00, 0x40003C00), 0x7C007FFF),
        ("add.f16x2 %r5, %r1, %r2;", (0x3C003C00, 0x10001400), 0x3C003C01),
    ],
)  # fmt: skip
def test_one_instruction(body: str, given: tuple[float, ...], wanted: int) -> None:
    assert one(body, *given) == wanted, hex(one(body, *given))


@pytest.mark.parametrize(
    ("body", "given", "wanted"),
    [
        ("add.f32 %r5, %r1, %r2;", (1.5, 2.0), 3.5),
        ("sub.f32 %r5, %r1, %r2;", (1.5, 2.0), -0.5),
        ("mul.f32 %r5, %r1, %r2;", (1.5, -2.0), -3.0),
        ("mul.ftz.f32 %r5, %r1, %r2;", (2.0**-120, 2.0**-20), 0.0),
        ("mul.f32 %r5, %r1, %r2;", (2.0**-120, 2.0**-20), 2.0**-140),
        # a product that float32 cannot hold, and a sum that shows its last bit
        ("fma.rn.f32 %r5, %r1, %r2, %r3;", (1 + 2.0**-12, 1 - 2.0**-12, -1.0), -(2.0**-24)),
        # twice rounded, through float64, this would be one unit more
        ("fma.rn.f32 %r5, %r1, %r2, %r3;", (1 + 2.0**-23, 2.0**-24, 1.0), 1 + 2.0**-23),
        ("fma.rn.f32 %r5, %r1, %r2, %r3;", (1 - 2.0**-24, 2.0**-24, 1.0), 1.0),
        # downwards, of what lies between: below 1, below 0, and the largest number
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (2.0**-30, -(2.0**-30), 1.0), 1 - 2.0**-24),
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (2.0**-30, 2.0**-30, 1.0), 1.0),
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (-(2.0**-100), 2.0**-100, 0.0), -(2.0**-149)),
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (2.0**100, 2.0**100, 0.0), 2.0**128 - 2.0**104),
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (-(2.0**100), 2.0**100, 0.0), -math.inf),
        # a sum of zero is -0 downwards, +0 to nearest
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (1.0, 2.0, -2.0), -0.0),
        ("fma.rn.f32 %r5, %r1, %r2, %r3;", (1.0, 2.0, -2.0), 0.0),
        ("fma.rm.f32 %r5, %r1, %r2, %r3;", (0.0, 1.0, 0.0), 0.0),
        # within 0 and 1, NaN being 0
        ("cvt.sat.f32.f32 %r5, %r1;", (0.75,), 0.75),
        ("cvt.sat.f32.f32 %r5, %r1;", (1.5,), 1.0),
        ("cvt.sat.f32.f32 %r5, %r1;", (-1.5,), 0.0),
        ("cvt.sat.f32.f32 %r5, %r1;", (-0.0,), 0.0),
        ("cvt.sat.f32.f32 %r5, %r1;", (math.nan,), 0.0),
        # in float64: a product, a quotient and a sum of which float32 would have lost bits
        (f"{WIDE} mul.rn.f64 %rd7, %rd5, %rd6; sub.f64 %rd7, %rd7, %rd5; {NARROW}",
         (1 + 2.0**-20, 1 + 2.0**-20), 2.0**-20 + 2.0**-40),
        (f"{WIDE} div.rn.f64 %rd7, %rd5, %rd6; mul.rn.f64 %rd7, %rd7, %rd7; {NARROW}",
         (2.0**-100, 2.0**60), 0.0),
        (f"{WIDE} div.rn.f64 %rd7, %rd5, %rd6; mul.rn.f64 %rd7, %rd7, %rd6; {NARROW}",
         (2.0**-100, 2.0**60), 2.0**-100),
        (f"{WIDE} add.rn.f64 %rd7, %rd5, %rd6; sub.rn.f64 %rd7, %rd7, %rd6; {NARROW}",
         (2.0**-30, 1.0), 2.0**-30),
        ("max.f32 %r5, %r1, %r2;", (math.nan, 2.0), 2.0),
        ("min.f32 %r5, %r1, %r2;", (-1.0, 2.0), -1.0),
        ("abs.f32 %r5, %r1;", (-1.5,), 1.5),
        ("neg.f32 %r5, %r1;", (-1.5,), 1.5),
        ("rcp.approx.ftz.f32 %r5, %r1;", (4.0,), 0.25),
        ("rcp.approx.ftz.f32 %r5, %r1;", (0.0,), math.inf),
        ("rcp.approx.ftz.f32 %r5, %r1;", (2.0**-130,), math.inf),
        ("ex2.approx.f32 %r5, %r1;", (-140.0,), 2.0**-140),
        ("ex2.approx.ftz.f32 %r5, %r1;", (-140.0,), 0.0),
        ("sqrt.rn.f32 %r5, %r1;", (2.25,), 1.5),
        ("div.rn.f32 %r5, %r1, %r2;", (1.0, 3.0), float(np.float32(1) / np.float32(3))),
        ("selp.f32 %r5, 0f3F800000, %r1, %p0;", (2.0,), 2.0),
        ("cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r5, %rs1;", (1 + 2.0**-8,), 1.0),
        ("cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r5, %rs1;", (1 + 3 * 2.0**-8,), 1 + 2.0**-6),
        ("cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r5, %rs1;", (70000.0,), math.inf),
    ],
)  # fmt: skip
def test_one_float(body: str, given: tuple[float, ...], wanted: float) -> None:
    found = one(body, *given)
    assert found == bits(wanted), struct.unpack("<f", struct.pack("<I", found))[0]


def test_pairs_of_floats() -> None:
    """``.f32x2``: the halves of 64 bits, each as the instruction of one float has it."""
    packed = "mov.b64 %rd5, {{%r1, %r2}}; mov.b64 %rd6, {{%r2, %r3}}; {} mov.b64 {{{}}}, %rd7;"

    def both(instruction: str, *given: float) -> tuple[int, int]:
        low, high = (one(packed.format(instruction, to), *given) for to in ("%r5, _", "_, %r5"))
        return low, high

    assert both("add.rn.f32x2 %rd7, %rd5, %rd6;", 1.5, 2.0, 4.0) == (bits(3.5), bits(6.0))
    assert both("sub.f32x2 %rd7, %rd5, %rd6;", 1.5, 2.0, 4.0) == (bits(-0.5), bits(-2.0))
    assert both("mul.f32x2 %rd7, %rd5, %rd6;", 1.5, -2.0, 4.0) == (bits(-3.0), bits(-8.0))
    assert both("fma.rn.f32x2 %rd7, %rd5, %rd6, %rd5;", 1.5, 2.0, 4.0) == (bits(4.5), bits(10.0))
    tiny = (2.0**-120, 2.0**-20, math.nan)
    assert both("mul.rn.ftz.f32x2 %rd7, %rd5, %rd6;", *tiny) == (0, 0x7FFFFFFF)
    assert both("mul.f32x2 %rd7, %rd5, %rd6;", *tiny) == (bits(2.0**-140), 0x7FFFFFFF)


@pytest.mark.parametrize(
    "body",
    [
        "max.f32x2 %rd5, %rd5, %rd5;",
        "mul.sat.f32x2 %rd5, %rd5, %rd5;",
        "fma.rz.bf16x2 %r5, %r1, %r2, %r3;",
        "mul.ftz.bf16x2 %r5, %r1, %r2;",
        "mul.ftz.bf16 %rs1, %rs1, %rs2;",
        "fma.bf16 %rs1, %rs1, %rs2, %rs2;",
        "add.rz.f32.bf16 %r5, %rs1, %r2;",
        "mul.f32.bf16 %r5, %rs1, %r2;",
        "mul.rz.f16x2 %r5, %r1, %r2;",
        "cvt.rz.f16x2.e4m3x2 %r5, %rs1;",
        "cvt.rz.f16x2.e5m2x2 %r5, %rs1;",
        "setp.lo.f32 %p1, %r1, %r2;",
        "setp.neu.s32 %p1, %r1, %r2;",
        "setp.lt.ftz.bf16 %p1, %rs1, %rs2;",
        "fma.f32 %r5, %r1, %r2, %r3;",
        "mul.ftz.f64 %rd5, %rd5, %rd5;",
        "div.f64 %rd5, %rd5, %rd5;",
        "fma.f64 %rd5, %rd5, %rd5, %rd5;",
        "cvt.rna.f32.f64 %r5, %rd5;",
        "cvt.sat.s32.f32 %r5, %r1;",
        "ld.global.shared.b32 %r5, [%r1];",
        "st.shared.local.b32 [%r1], %r2;",
    ],
)
def test_unknown_forms_are_named(body: str) -> None:
    with pytest.raises(PtxError, match=rf"unknown instruction {body.split(maxsplit=1)[0]}"):
        one(body)


def test_the_first_of_two_sources_is_the_upper_half() -> None:
    assert one("cvt.rn.bf16x2.f32 %r5, %r1, %r2;", 1.0, 2.0) == 0x3F804000
    assert one("cvt.rn.satfinite.bf16x2.f32 %r5, %r1, %r2;", math.inf, 2.0) == 0x7F7F4000
    pair = "{kind} %rs1, %r1, %r2; cvt.u32.u16 %r5, %rs1;"
    assert one(pair.format(kind="cvt.rn.satfinite.e4m3x2.f32"), 1.0, -448.0) == 0x38FE
    byte = "{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %r1, %r2; mov.b32 %r5, {b, b, b, b}; }"
    assert one(byte, 6.0, -0.5) == 0x79797979


def test_e2m1_rounds_to_the_nearest_and_ties_to_even() -> None:
    """Every tie and its neighbours; beyond 6 it is 6, NaN is 6 and positive."""
    given = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 1e9, -0.0, math.nan, -math.inf]
    wanted = [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 7, 15]
    assert machine.to_e2m1(np.array(given, np.float32)).tolist() == wanted
    near = np.nextafter(np.array(given[:7], np.float32), np.float32(9))
    assert machine.to_e2m1(near).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_every_e4m3_code_survives_a_round_trip() -> None:
    values = machine.UE4M3[:127].astype(np.float32)
    assert machine.to_e4m3(values).tolist() == list(range(127))
    assert machine.to_e4m3(-values).tolist() == [128 + code for code in range(127)]
    odd = np.array([math.nan, 449.0, 1e9, 2.0**-10, 3 * 2.0**-10, -(2.0**-20)], np.float32)
    assert machine.to_e4m3(odd).tolist() == [0x7F, 0x7E, 0x7E, 0, 2, 0x80]
    assert values[0x7E] == 448
    assert values[1] == 2.0**-9


def test_bf16_against_the_definition() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    found = machine.from_bf16(machine.to_bf16(values)).astype(np.float64)
    exact = values.astype(np.float64)
    inside = np.isfinite(found)
    low = machine.from_bf16(values.view(np.uint32) >> np.uint32(16)).astype(np.float64)
    high = machine.from_bf16((values.view(np.uint32) >> np.uint32(16)) + 1).astype(np.float64)
    best = np.minimum(np.abs(low - exact), np.abs(high - exact))
    assert (np.abs(found - exact)[inside] <= best[inside]).all()


def test_only_lanes_under_a_guard_change() -> None:
    body = (
        "and.b32 %r9, %r0, 1; setp.eq.s32 %p1, %r9, 0; mov.b32 %r5, 7; mov.b32 %r6, 7;"
        "@%p1 mov.b32 %r5, %r0; @!%p1 add.s32 %r6, %r6, 1;"
    )
    out = run(body).out
    assert out[:, 0].tolist() == [n if n % 2 == 0 else 7 for n in range(32)]
    assert out[:, 1].tolist() == [7 if n % 2 == 0 else 8 for n in range(32)]


def test_diverged_lanes_reconverge() -> None:
    """A loop of as many rounds as the lane's number, then one instruction for all."""
    body = (
        "mov.b32 %r5, 0; mov.b32 %r9, %r0;"
        "LOOP: setp.eq.s32 %p1, %r9, 0; @%p1 bra OUT; add.s32 %r5, %r5, 2; sub.s32 %r9, %r9, 1;"
        "bra.uni LOOP; OUT: shfl.sync.idx.b32 %r6, %r5, 31, 31, -1;"
    )
    out = run(body).out
    assert out[:, 0].tolist() == [2 * n for n in range(32)]
    assert out[:, 1].tolist() == [62] * 32


def test_every_e2m1_code_is_its_value_in_either_half() -> None:
    for code in range(16):
        byte = code | (code ^ 15) << 4
        both = one(f"{BYTE} cvt.rn.f16x2.e2m1x2 %r5, b; }}", byte)
        halves = np.array([both], np.uint32).view(np.float16).astype(np.float64)
        assert halves.tolist() == [machine.E2M1[code], machine.E2M1[code ^ 15]]
        assert (np.signbit(halves) == [code > 7, code < 8]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_downwards_against_exact_fractions() -> None:
    """``fma.rm``: the largest float32 that is not above the exact result."""
    rng = np.random.default_rng(5)
    given = rng.integers(0, 2**32, (256, 3), dtype=np.uint64).astype(np.uint32).view(np.float32)
    given[128:, 2] = -(given[128:, 0] * given[128:, 1])  # sums in which much cancels
    given = np.ascontiguousarray(given[np.isfinite(given).all(axis=1)])
    found = run("fma.rm.f32 %r5, %r1, %r2, %r3;", given, threads=len(given)).floats()
    compared = 0
    for (a, b, c), result in zip(given, found, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        above = np.nextafter(result, np.float32(np.inf))
        if np.isfinite(result) and np.isfinite(above):
            assert Fraction(float(result)) <= exact < Fraction(float(above))
            compared += 1
    assert compared > 60


def test_a_number_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(PtxError, match=r"unknown instruction add\.f32: 1 is not of type f32"):
        one("add.f32 %r5, %r1, 1;")


def fraction(value: int) -> Fraction:
    """A float32 by its bits, exactly."""
    return Fraction(float(np.array([value], np.uint32).view(np.float32)[0]))


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        # half-way between two of float32, and a little more, which float64 has no bit for
        (0x3F800800, 0x3F800800, 0x17800000),
        (0x3F800800, 0x3F800800, 0x97800000),
        (0xBF800800, 0x3F800800, 0x17800000),
        # the same between two subnormal ones: (1 + 2^-11)(1 - 2^-11 + 2^-22) = 1 + 2^-33
        (0x1A001000, 0x19FFE004, 0x00400000),
        (0x1A001000, 0x19FFE004, 0x80400000),
        (0x3F800800, 0x3F800800, 0),
    ],
)
def test_fma_is_rounded_once(a: int, b: int, c: int) -> None:
    exact = fraction(a) * fraction(b) + fraction(c)
    found = one("fma.rn.f32 %r5, %r1, %r2, %r3;", a, b, c)
    near = min((found - 1, found, found + 1), key=lambda bits: abs(fraction(bits) - exact))
    assert found == near
    assert abs(fraction(found) - exact) <= abs(fraction(found + 1) - fraction(found)) / 2


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("f16.f16", 0x3C00), ("u16.f16", 0xFFFF), ("s32.f16", 0xFFFFFFFF), ("bf16.bf16", 0x3F80),
     ("u32.bf16", 0xFFFFFFFF)],
)  # fmt: skip
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_a_comparison_of_halves_gives_a_half_or_a_mask(form: str, wanted: int, ftz: str) -> None:
    """PTX ISA, "Half Precision Comparison Instructions: set"."""
    if ftz and "bf16" in form:
        return
    wide = form.split(".", maxsplit=1)[0] in ("s32", "u32")
    out = "%r5" if wide else "%rs3"
    widened = "" if wide else "cvt.u32.u16 %r5, %rs3;"
    body = f"cvt.u16.u32 %rs1, %r1; cvt.u16.u32 %rs2, %r2; set.eq{ftz}.{form} {out}, %rs1, %rs2;"
    assert one(body + widened, 0x4000, 0x4000) == wanted
    assert one(body + widened, 0x8000, 0) == wanted, "zeros are equal"
    assert one(body + widened, 0x4000, 0x4001) == 0
    assert one(body + widened, 0x7FFF, 0x7FFF) == 0, "NaN equals nothing"
    assert one(body + widened, 1, 2) == (wanted if ftz else 0), "subnormal numbers"
