"""Every instruction that the kernels need is implemented, and has a test of its own.

``golden/ptx_instructions.txt`` lists them by name with all modifiers, over the FlashInfer releases
that `b12x-full` supports and the package ``b12x``.  ``tests/wheels/kernels/test_numbers.py`` holds
launches of releases against it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from builder.ptx.machine import PtxError
from builder.ptx.memory import Region
from builder.ptx.program import EMITTERS
from builder.ptx.source import kernels_of
from tests.unit.ptx.test_ptx_device import RECORDED
from tests.unit.ptxworld import one, run, source

LIST = Path(__file__).parents[1] / "golden" / "ptx_instructions.txt"
NEEDED = LIST.read_text("utf-8").split()
M1 = 0xFFFFFFFF
F1, F2, NAN = 0x3F800000, 0x40000000, 0x7FC00000

#: %r1 in the low half of %rd5, %r2 in the high half; the halves of %r1.
PAIR = "mov.b64 %rd5, {%r1, %r2}; mov.b64 %rd6, {%r3, %r4}; "
HALVES = "mov.b32 {%rs1, %rs2}, %r1; "
WHOLE = " mov.b32 %r5, {%rs3, %rs3};"
HIGH = " mov.b64 {_, %r5}, %rd7;"
FLAG = " selp.b32 %r5, 1, 0, %p1;"
#: A thread's place in shared and in global memory.
SHARED = "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10; "
SPACE = "mov.u64 %rd8, 1048576; mul.wide.u32 %rd9, %r0, 16; add.s64 %rd8, %rd8, %rd9; "
EXTRA = 1 << 20
OWN = ".local .align 16 .b8 own[16]; "
POLICY = "createpolicy.fractional.L2::evict_last.b64 %rd7, 1.0; "

#: Floats of the first three words.
REALS = "mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3; "

BODIES: list[tuple[str, tuple[int, ...], int]] = [
    # Extremes of three numbers
    (REALS + "max.f32 %f4, %f1, %f2, %f3; mov.b32 %r5, %f4;", (F1, NAN, F2), F2),
    (REALS + "min.f32 %f4, %f3, %f2, %f1; mov.b32 %r5, %f4;", (F1, F2, F2), F1),
    (REALS + "max.NaN.f32 %f4, %f1, %f2, %f3; mov.b32 %r5, %f4;", (F1, NAN, F2), 0x7FFFFFFF),
    # Integer Arithmetic, Logic and Shift Instructions
    (HALVES + "add.s16 %rs3, %rs1, %rs2;" + WHOLE, (0x00017FFF,), 0x80008000),
    (HALVES + "sub.s16 %rs3, %rs1, %rs2;" + WHOLE, (0x00010000,), M1),
    (HALVES + "and.b16 %rs3, %rs1, %rs2;" + WHOLE, (0x00FF0F0F,), 0x000F000F),
    (HALVES + "or.b16 %rs3, %rs1, %rs2;" + WHOLE, (0x00F00F0F,), 0x0FFF0FFF),
    (HALVES + "shl.b16 %rs3, %rs1, 4;" + WHOLE, (0xFFF1,), 0xFF10FF10),
    (HALVES + "shr.s16 %rs3, %rs1, 4;" + WHOLE, (0x8010,), 0xF801F801),
    (HALVES + "shr.u16 %rs3, %rs1, 4;" + WHOLE, (0x8010,), 0x08010801),
    (HALVES + "mul.wide.s16 %r5, %rs1, %rs2;", (0x0003FFFF,), M1 - 2),
    (HALVES + "mul.wide.u16 %r5, %rs1, %rs2;", (0x0003FFFF,), 0x2FFFD),
    (PAIR + "and.b64 %rd7, %rd5, %rd6;" + HIGH, (0, 12, 0, 10), 8),
    (PAIR + "or.b64 %rd7, %rd5, %rd6;" + HIGH, (0, 12, 0, 10), 14),
    (PAIR + "shl.b64 %rd7, %rd5, 4;" + HIGH, (0xF0000000, 1), 0x1F),
    (PAIR + "shr.u64 %rd7, %rd5, 4;" + HIGH, (0, 0xF0), 0xF),
    (PAIR + "mad.lo.s64 %rd7, %rd5, %rd6, %rd5;" + HIGH, (0, 3, 5, 0), 18),
    ("mul.lo.u32 %r5, %r1, %r2;", (0x10001, 0x10001), 0x20001),
    ("max.u32 %r5, %r1, %r2;", (M1, 1), M1),
    (PAIR + "min.u64 %rd7, %rd5, %rd6;" + HIGH, (0, 12, 0, 0x80000000), 12),
    ("rem.u32 %r5, %r1, %r2;", (M1, 10), 5),
    ("shr.b32 %r5, %r1, 4;", (0x80000000,), 0x08000000),
    (
        "setp.lt.u32 %p2, %r1, 3; setp.gt.u32 %p3, %r1, 1; and.pred %p1, %p2, %p3;" + FLAG,
        (2,),
        1,
    ),
    (
        "setp.lt.u32 %p2, %r1, 3; setp.gt.u32 %p3, %r1, 5; or.pred %p1, %p2, %p3;" + FLAG,
        (4,),
        0,
    ),
    # Comparison and Selection Instructions
    ("setp.eq.b32 %p1, %r1, %r2;" + FLAG, (M1, M1), 1),
    ("setp.ne.b32 %p1, %r1, %r2;" + FLAG, (M1, M1), 0),
    ("setp.ne.s32 %p1, %r1, %r2;" + FLAG, (M1, 1), 1),
    ("setp.ge.s32 %p1, %r1, %r2;" + FLAG, (M1, 0), 0),
    ("setp.ge.u32 %p1, %r1, %r2;" + FLAG, (M1, 0), 1),
    ("setp.gt.s32 %p1, %r1, %r2;" + FLAG, (M1, 0), 0),
    ("setp.le.s32 %p1, %r1, %r2;" + FLAG, (M1, 0), 1),
    ("setp.lt.f32 %p1, %r1, %r2;" + FLAG, (F1, F2), 1),
    ("setp.lt.f32 %p1, %r1, %r2;" + FLAG, (NAN, F2), 0),
    ("setp.lt.u32 %p1, %r1, 3; selp.u32 %r5, 7, 9, %p1;", (2,), 7),
    # Floating Point Instructions
    ("mul.rn.f32 %r5, %r1, %r2;", (F2, F2), 0x40800000),
    ("rcp.rn.f32 %r5, %r1;", (F2,), 0x3F000000),
    # Data Movement and Conversion Instructions
    (HALVES + "mov.b16 %rs3, %rs2;" + WHOLE, (0x12340000,), 0x12341234),
    ("mov.f64 %rd7, 0d3FF0000000000000;" + HIGH, (), 0x3FF00000),
    ("cvt.rn.f16x2.f32 %r5, %r1, %r2;", (F1, F2), 0x3C004000),
    (PAIR + "cvt.u32.u64 %r5, %rd5;", (7, 9), 7),
    ("{ .reg .b8 b; cvt.u8.u32 b, %r1; cvt.u32.u8 %r5, b; }", (0x1FF,), 0xFF),
    ("shfl.sync.bfly.b32 %r6, %r0, 5, 31, -1; xor.b32 %r5, %r6, %r0;", (), 5),
    ("ld.param.b64 %rd7, [p_out]; cvt.u32.u64 %r5, %rd7;", (), 0x80000),
    ("ld.param.v2.b32 {%r5, %r6}, [p_out];", (), 0x80000),
    ("ld.param.v2.b8 {%rs1, %rs2}, [p_out+2]; mov.b32 %r5, {%rs1, %rs2};", (), 0x8),
    # loads and stores of shared memory
    (SHARED + "st.shared.b32 [%r9], %r1; ld.shared.b8 %rs3, [%r9+1];" + WHOLE, (0x3210,), 0x320032),
    (SHARED + "st.shared.b32 [%r9], %r1; ld.shared.s32 %r5, [%r9];", (M1,), M1),
    (
        SHARED + "st.shared.v2.b32 [%r9], {%r1, %r2}; ld.shared.v2.u32 {%r6, %r5}, [%r9];",
        (1, 2),
        2,
    ),
    (
        SHARED + "st.shared.v4.b32 [%r9], {%r1, %r2, %r3, %r4}; "
        "ld.shared.v4.u32 {%r6, %r7, %r8, %r5}, [%r9];",
        (1, 2, 3, 4),
        4,
    ),
    (SHARED + PAIR + "st.shared.b64 [%r9], %rd5; ld.shared.b32 %r5, [%r9+4];", (1, 2), 2),
    (SHARED + PAIR + "st.shared.b64 [%r9], %rd5; ld.shared.b64 %rd7, [%r9];" + HIGH, (1, 2), 2),
    (
        SHARED + HALVES + "st.shared.b32 [%r9], %r2; st.shared.b8 [%r9+1], %rs1; "
        "ld.shared.b32 %r5, [%r9];",
        (0x1234, M1),
        0xFFFF34FF,
    ),
    (SHARED + "st.shared.s32 [%r9], %r1; ld.shared.b32 %r5, [%r9];", (M1,), M1),
    (SHARED + "st.shared.u32 [%r9], %r1; ld.shared.u32 %r5, [%r9];", (M1,), M1),
    (SHARED + "st.shared.b32 [%r9], %r1; ld.volatile.shared.s32 %r5, [%r9];", (M1,), M1),
    (
        SHARED + "st.shared.v4.f32 [%r9], {%r1, %r2, %r3, %r4}; "
        "ld.shared.v4.f32 {%r6, %r7, %r8, %r5}, [%r9];",
        (1, 2, 3, 4),
        4,
    ),
    (
        SHARED + HALVES + "st.shared.b32 [%r9], %r2; st.shared.b16 [%r9+2], %rs1; "
        "ld.shared.b32 %r5, [%r9];",
        (0x1234, M1),
        0x1234FFFF,
    ),
    (
        SHARED + "st.shared.b32 [%r9], %r1; atom.shared.add.s32 %r6, [%r9], %r2; "
        "ld.shared.b32 %r7, [%r9]; add.s32 %r5, %r6, %r7;",
        (5, M1),
        9,
    ),
    # loads and stores of global and local memory
    (
        SPACE + "st.global.b32 [%rd8], %r1; ld.global.b16 %rs3, [%rd8+2];" + WHOLE,
        (7 << 16,),
        458759,
    ),
    (SPACE + "st.global.b32 [%rd8], %r1; ld.global.b8 %rs3, [%rd8+3];" + WHOLE, (7 << 24,), 458759),
    (SPACE + "st.global.b32 [%rd8], %r1; ld.global.nc.u32 %r5, [%rd8];", (7,), 7),
    (SPACE + "st.global.v2.b32 [%rd8], {%r1, %r2}; ld.global.u64 %rd7, [%rd8];" + HIGH, (7, 8), 8),
    (
        SPACE + "st.global.v2.b32 [%rd8], {%r1, %r2}; "
        "ld.global.v4.b16 {%rs1, %rs2, %rs4, %rs3}, [%rd8];" + WHOLE,
        (7, 8 << 16),
        0x80008,
    ),
    (
        SPACE + "st.global.v4.b32 [%rd8], {%r1, %r2, %r3, %r4}; "
        "ld.global.v4.u32 {%r6, %r7, %r8, %r5}, [%rd8];",
        (1, 2, 3, 4),
        4,
    ),
    (
        SPACE + HALVES + "st.global.b32 [%rd8], %r2; st.global.b16 [%rd8+2], %rs1; "
        "ld.global.b32 %r5, [%rd8];",
        (0x1234, M1),
        0x1234FFFF,
    ),
    (
        SPACE + HALVES + "st.global.b32 [%rd8], %r2; st.global.b8 [%rd8+2], %rs1; "
        "ld.global.b32 %r5, [%rd8];",
        (0x1234, M1),
        0xFF34FFFF,
    ),
    (SPACE + "st.global.s32 [%rd8], %r1; ld.global.b32 %r5, [%rd8];", (M1,), M1),
    (
        SPACE + "st.global.v4.f32 [%rd8], {%r1, %r2, %r3, %r4}; "
        "ld.global.v4.f32 {%r6, %r7, %r8, %r5}, [%rd8];",
        (1, 2, 3, 4),
        4,
    ),
    (
        SPACE + "st.global.b32 [%rd8], %r1; red.relaxed.gpu.global.add.s32 [%rd8], %r2; "
        "ld.global.b32 %r5, [%rd8];",
        (5, M1),
        4,
    ),
    (SPACE + PAIR + "st.global.u64 [%rd8], %rd5; ld.global.b32 %r5, [%rd8+4];", (1, 2), 2),
    (
        SPACE + "st.global.v4.u32 [%rd8], {%r1, %r2, %r3, %r4}; ld.global.b32 %r5, [%rd8+12];",
        (1, 2, 3, 4),
        4,
    ),
    (".local .align 4 .b8 own[8]; st.local.b32 [own+4], %r1; ld.local.b32 %r5, [own+4];", (9,), 9),
    (
        OWN
        + "st.local.v4.b32 [own], {%r1, %r2, %r3, %r4}; ld.local.v2.b64 {%rd5, %rd7}, [own];"
        + HIGH,
        (1, 2, 3, 4),
        4,
    ),
    (OWN + PAIR + "st.local.b64 [own], %rd5; ld.local.v2.b32 {%r6, %r5}, [own];", (1, 2), 2),
    (OWN + "st.local.v2.b32 [own], {%r1, %r2}; ld.local.b64 %rd7, [own];" + HIGH, (1, 2), 2),
    (
        SPACE + POLICY + PAIR + "st.global.L2::cache_hint.u64 [%rd8], %rd5, %rd7; "
        "ld.global.b32 %r5, [%rd8+4];",
        (1, 2),
        2,
    ),
    (
        SPACE + POLICY + "st.global.v4.b32 [%rd8], {%r1, %r2, %r3, %r4}; "
        "red.global.add.noftz.v4.bf16x2.L2::cache_hint [%rd8], {%r1, %r2, %r3, %r4}, %rd7; "
        "ld.global.b32 %r5, [%rd8+12];",
        (0, 0, 0, 0x3F803F80),
        0x40004000,
    ),
    ("redux.sync.add.s32 %r5, %r1, -1;", (3,), 96),
    # what changes no value
    ("mov.u32 %r5, %r1; membar.gl; membar.cta; fence.acq_rel.gpu;", (3,), 3),
    ("mov.u32 %r5, %r1; griddepcontrol.wait; griddepcontrol.launch_dependents;", (3,), 3),
    ("mov.u32 %r5, %r1; mov.b64 %rd5, p_in; prefetch.tensormap [%rd5];", (3,), 3),
    (
        "mov.u32 %r5, %r1; setmaxnreg.inc.sync.aligned.u32 40; setmaxnreg.dec.sync.aligned.u32 24;",
        (3,),
        3,
    ),
]


@pytest.mark.parametrize(("body", "given", "wanted"), BODIES)
def test_an_instruction_gives_what_the_isa_says(
    body: str, given: tuple[int, ...], wanted: int
) -> None:
    rows = np.repeat(np.array([given or (0,)], np.int64), 32, axis=0)
    memory = (Region(EXTRA, np.zeros(512, np.uint8), True, "extra"),)
    found = run(body, rows, memory=memory).out[:, 0]
    assert [hex(value) for value in np.unique(found)] == [hex(wanted)]


def names(body: str) -> set[str]:
    """The instructions of a body."""
    (kernel,) = kernels_of(source(body)).values()
    return {one.name for one in kernel.code}


def names_in_tests() -> set[str]:
    """Names of all instructions that a test of this folder spells, or the recorded bodies have."""
    found = set().union(*(names(body) for body, _, _ in BODIES), *map(names, RECORDED))
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    return found | set(re.findall(r"[a-z]\w*(?:\.[\w:]+)+", text))


def test_the_list_is_in_order_and_each_instruction_once() -> None:
    assert sorted(set(NEEDED)) == NEEDED
    assert len(NEEDED) > 150


TESTED = names_in_tests()


@pytest.mark.parametrize("name", NEEDED)
def test_each_needed_instruction_is_implemented_and_tested(name: str) -> None:
    assert name.split(".", maxsplit=1)[0] in EMITTERS, f"the executor lacks {name}"
    assert name in TESTED, f"no unit test has {name}: add one to BODIES"


def test_an_instruction_that_is_not_known_is_named_with_its_line() -> None:
    missing = "vadd" + "2.u32"
    assert missing not in TESTED, "what no test spells is missed"
    with pytest.raises(PtxError, match=rf"PTX line \d+: unknown instruction {missing}"):
        one(f"{missing} %r5, %r1, %r2, %r3;")


@pytest.mark.parametrize(
    ("base", "offset", "place"),
    [(2, 0, 2), (3, 0, -1), (0, 2, 2), (31, -1, 9), (31, -4, -1), (32, 1, -1), (2**31, -1, -1),
     (2**32 - 1, 0, -1), (5, -(2**31), 0)],
)  # fmt: skip
def test_the_nth_set_bit_from_a_base_on(base: int, offset: int, place: int) -> None:
    assert one("fns.b32 %r5, %r1, %r2, %r3;", 0b1000000110, base, offset) == place & 0xFFFFFFFF
