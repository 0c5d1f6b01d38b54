"""Chains of instructions that share the carry flag; and small results with ``.ftz``.

The flag of a difference is the carry of ``a + ~b + 1``, which ``addc`` reads as it is: an H200
divides numbers of 128 bits by it.
"""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from tests.unit.ptxworld import run

Step = tuple[str, bool, bool, str, list[int]]


def chain(chance: random.Random) -> list[Step]:
    """Steps: an operation, whether it reads and writes the flag, its part, and its sources."""
    steps: list[Step] = []
    for number in range(chance.randrange(2, 5)):
        name = chance.choice(["add", "sub", "mad.lo", "mad.hi"])
        opcode, _, part = name.partition(".")
        sources = [chance.randrange(4 + number) for _ in range(3 if part else 2)]
        steps.append((opcode, number > 0, chance.random() < 0.9 or number == 0, part, sources))
    return steps


def text(steps: list[Step], bits: int) -> str:
    register = "%r" if bits == 32 else "%rd"
    first, lines = (1, []) if bits == 32 else (4, ["cvt.u64.u32 %rd4, %r1;"])
    for number in (2, 3, 4) if bits == 64 else ():  # inputs with high parts
        lines.append(f"mul.lo.u64 %rd{number + 3}, %rd{number + 2}, 0x9E3779B97F4A7C15;")
    for number, (opcode, reads, writes, part, sources) in enumerate(steps):
        name = opcode + ("c" if reads else "") + (f".{part}" if part else "")
        name += f"{'.cc' if writes else ''}.u{bits}"
        operands = ", ".join(f"{register}{first + s}" for s in (4 + number, *sources))
        lines.append(f"{name} {operands};")
    last = f"{register}{first + 3 + len(steps)}"
    end = f"mov.b32 %r5, {last};" if bits == 32 else f"mov.b64 {{%r5, %r6}}, {last};"
    return " ".join([*lines, end])


def last_value(steps: list[Step], values: list[int], bits: int) -> int:
    """What the last step leaves."""
    mask, flag, values = (1 << bits) - 1, 0, [*values]
    for opcode, reads, writes, part, sources in steps:
        a, b, *c = (values[s] for s in sources)
        if part:
            a, b = (a * b >> (bits if part == "hi" else 0)) & mask, c[0]
        b = ~b & mask if opcode == "sub" else b
        total = a + b + (flag if reads else opcode == "sub")
        values.append(total & mask)
        flag = total >> bits if writes else flag
    return values[-1]


EDGES = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("seed", range(12))
def test_chains_of_instructions_with_the_carry_flag(seed: int, bits: int) -> None:
    chance = random.Random(seed)
    steps = chain(chance)
    given = np.array(
        [[chance.choice([*EDGES, chance.getrandbits(32)]) for _ in range(4)] for _ in range(32)]
    )
    out = run(text(steps, bits), given).out
    for row, got in zip(given.tolist(), out.tolist(), strict=True):
        values = row
        if bits == 64:
            values = [row[0]]
            for _ in range(3):
                values.append(values[-1] * 0x9E3779B97F4A7C15 & 2**64 - 1)
        wanted = last_value(steps, values, bits)
        assert got[0] | (got[1] << 32 if bits == 64 else 0) == wanted, text(steps, bits)


#: The remainder is in %rd6 and %rd7, the dividend and then the quotient in %rd4 and %rd5.
DIVIDE = """
mov.b64 %rd4, {%r1, %r2}; mov.b64 %rd5, {%r2, %r1}; mov.b64 %rd8, {%r3, %r4};
mov.b64 %rd9, {%r4, 0};
mov.u64 %rd6, 0; mov.u64 %rd7, 0; mov.u32 %r9, 0;
NEXT:
add.cc.u64 %rd4, %rd4, %rd4; addc.cc.u64 %rd5, %rd5, %rd5;
addc.cc.u64 %rd6, %rd6, %rd6; addc.u64 %rd7, %rd7, %rd7;
sub.cc.u64 %rd10, %rd6, %rd8; subc.cc.u64 %rd11, %rd7, %rd9; addc.u64 %rd12, 0, 0;
setp.ne.u64 %p1, %rd12, 0;
@%p1 mov.u64 %rd6, %rd10; @%p1 mov.u64 %rd7, %rd11; or.b64 %rd4, %rd4, %rd12;
add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 128; @%p2 bra NEXT;
mov.b64 {%r5, %r6}, %rd4; mov.b64 {%r7, %r8}, %rd5;
"""


def test_a_division_of_128_bits() -> None:
    given = np.random.default_rng(4).integers(1, 2**32, (32, 4))
    given[::2, 3] = given[::2, 2] % 7
    out = run(DIVIDE, given).out
    for row, got in zip(given.tolist(), out.tolist(), strict=True):
        low, high = row[0] | row[1] << 32, row[1] | row[0] << 32
        divisor = row[2] | row[3] << 32 | row[3] << 64
        quotient = (low | high << 64) // divisor
        assert sum(word << 32 * n for n, word in enumerate(got)) == quotient


LEAST = Fraction(2) ** -126


def bits_of(value: Fraction) -> int:
    single = np.float32(float(value))
    assert Fraction(float(single)) == value
    return int(single.view(np.uint32))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("opcode", ["mul", "fma"])
def test_what_is_flushed_is_small_once_it_is_rounded(opcode: str, sign: int, mode: str) -> None:
    rows: list[list[int]] = []
    chance, wanted = random.Random(8), []
    while len(rows) < 96:
        x = Fraction(chance.choice([2**24 - 1, 2**24 - 2, chance.randrange(2**23, 2**24)]), 2**24)
        y = Fraction(min(int(2**24 / x) + chance.randrange(-3, 3), 2**25 - 2) // 2 * 2, 2**24)
        a, b = x * Fraction(2) ** -60, sign * y * Fraction(2) ** -66
        rows.append([bits_of(a), bits_of(b), 0, 0])
        wanted.append(rounded(a * b, mode))
    c = ", %f3" if opcode == "fma" else ""
    body = f"{opcode}.{mode}.ftz.f32 %f5, %f1, %f2{c};".join(MOVES)
    got = run(body, rows, threads=96).out[:, 0]
    assert [hex(one) for one in got.tolist()] == [hex(one) for one in wanted]
    zeros = sum(one & 0x7FFFFFFF == 0 for one in wanted)
    assert 0 < zeros < 96


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_a_double_that_becomes_small_is_flushed_after_rounding(mode: str) -> None:
    """An H200: of 4,000 values near 2^-126 none differs from this rule."""
    chance, rows, wanted = random.Random(5), [], []
    for _ in range(96):
        value = LEAST * (1 + Fraction(chance.randrange(-(2**6), 2**6), 2**30))
        bits = int(np.float64(float(value)).view(np.uint64))
        rows.append([bits & 0xFFFFFFFF, bits >> 32, 0, 0])
        wanted.append(rounded(value, mode))
    body = f"mov.b64 %rd4, {{%r1, %r2}}; cvt.{mode}.ftz.f32.f64 %r5, %rd4;"
    assert run(body, rows, threads=96).out[:, 0].tolist() == wanted
    assert 0 < sum(one == 0 for one in wanted) < 96


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0x7F800001, 0x7F800000), (0x7F801FFF, 0x7F800000), (0x7F802000, 0x7F802000),
        (0x7FBFFFFF, 0x7FBFE000), (0x7FC01000, 0x7FC00000), (0xFF800001, 0xFF800000),
        (0xFFFFFFFF, 0xFFFFE000),
    ],
)  # fmt: skip
def test_a_nan_in_tf32_keeps_its_first_bits(given: int, kept: int) -> None:
    """Recorded on an H200; one with low bits alone becomes an infinity."""
    assert run("cvt.rna.tf32.f32 %r5, %r1;", [[given]]).out[0, 0] == kept


MOVES = (
    "mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3; ",
    " mov.b32 %r5, %f5;",
)


def rounded(exact: Fraction, mode: str) -> int:
    """Bits of float32: of 24 bits with any exponent, and zero if that is below 2^-126."""
    size, negative = abs(exact), exact < 0
    unit = Fraction(2) ** -149
    while size < unit * 2**23:
        unit /= 2
    whole, rest = divmod(size, unit)
    nearest = 2 * rest > unit or (2 * rest == unit and whole % 2)
    away = {"rn": nearest, "rz": False, "rm": negative and rest, "rp": not negative and rest}[mode]
    size = (whole + bool(away)) * unit
    return (bits_of(size) if size >= LEAST else 0) | negative << 31
