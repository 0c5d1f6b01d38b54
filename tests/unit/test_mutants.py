"""What is drawn as a wrong kernel, and which of those compute the same."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.mutants import Subject
from benchmarks.observability import Check, row_of
from builder.ptx.block import Launch
from builder.ptx.findings import FoundRace, Line, Run
from builder.ptx.grid import Grid, Schedule
from builder.ptx.launchfile import Array, ExpectedResult, LaunchFile
from builder.ptx.memory import GlobalMemory, Region
from builder.ptx.program import Program
from builder.ptx.runs import run_once
from builder.ptx.source import Instruction, Name, Number, Vector, kernels_of
from tests.mutants import (
    AS_BEFORE,
    NOT_JUDGED,
    OBSERVED,
    SAME_VALUE,
    UNREAD,
    Mutant,
    drawn_of,
    noticed,
    noticed_in,
    poisoned,
    reason,
    redundant,
    unordered,
)

if TYPE_CHECKING:
    from builder.ptx.source import Kernel

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
TEXT = f"""
.version 8.8
.target sm_121a
.address_size 64
.visible .entry both()
{{
  .reg .pred %p<2>; .reg .b32 %r<9>; .reg .f32 %f<5>;
  .shared .align 8 .b64 barrier[1];
  mov.b32 %r1, barrier;
  mbarrier.init.shared.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  bar.sync 0;
  st.shared.b32 [%r1], %r2;
  bar.sync 0;
  mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
  {MMA} {{%f1,%f2,%f3,%f4}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%f1,%f2,%f3,%f4}};
  {MMA} {{%f1,%f2,%f3,%f4}}, {{%r5,%r6,%r7,%r8}}, {{%r1,%r2}}, {{%f1,%f2,%f3,%f4}};
  ret;
}}
"""
#: Without tensor cores; it polls, and lanes of four warps pass values on in shared memory.
VECTORS = """
.version 8.8
.target sm_121a
.address_size 64
.visible .entry vectors(.param .u64 given)
{
  .reg .pred %p<2>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<3>;
  .shared .align 4 .b8 place[512];
  ld.param.u64 %rd1, [given];
  mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.b32 %r3, place;
  add.s32 %r3, %r3, %r2; xor.b32 %r4, %r2, 256; mov.b32 %r5, place; add.s32 %r4, %r4, %r5;
  st.shared.b32 [%r3], %r1;
  membar.gl;
  bar.sync 0;
  bar.sync 1, 128;
AGAIN:
  ld.global.acquire.gpu.b32 %r6, [%rd1];
  setp.ne.b32 %p1, %r6, 0;
  @%p1 bra AGAIN;
  ld.shared.b32 %r7, [%r4];
  fma.rn.f32 %f1, %f2, %f3, %f1;
  fma.rn.f32 %f1, %f4, %f5, %f1;
  ret;
}
"""
NOTHING = Instruction("mov", ("b32",), (Name("%r7"), Name("%r7")), None, 0)
KERNEL = kernels_of(TEXT)["both"]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("operand", {17, 18}),
        ("wait", {16}),
        ("barrier", {12, 13, 15}),
        ("arrival or fence", {10, 11}),
    ],
)
def test_each_kind_changes_what_it_names(kind: str, lines: set[int]) -> None:
    assert set(OBSERVED) == {"operand", "wait", "barrier", "arrival or fence"}
    drawn = drawn_of(KERNEL, kind, 8, seed=1)
    assert {one.line for one in drawn} == lines
    assert all(one.kernel.code != KERNEL.code for one in drawn)


@pytest.mark.parametrize(
    ("kind", "lines"), [("operand", {21, 22}), ("wait", {19}), ("arrival or fence", {13})]
)
def test_a_kernel_without_tensor_cores_has_mutants_too(kind: str, lines: set[int]) -> None:
    kernel = kernels_of(VECTORS)["vectors"]
    assert {one.line for one in drawn_of(kernel, kind, 8, seed=1)} == lines
    if kind == "operand":
        nan = poisoned(kernel, 21)
        assert nan
        one = next(one for one in nan.code if one.line == 21)
        assert one.operands[1] == Number(0x7FC00000, 32)


def test_what_another_edge_orders_is_without_effect_where_the_launch_shows_it() -> None:
    kernel = kernels_of(VECTORS)["vectors"]
    array = Array("given", 0x10000, bytes(4), True, "u32", (1,))
    sizes, given = ((1, 1, 1), (128, 1, 1), 0), (0x10000).to_bytes(8, "little")
    launch = LaunchFile("one", VECTORS, "vectors", *sizes, (given,), (array,))

    def pairs(*lines: int) -> set[object]:
        """What is without order, without what these lines have."""
        code = tuple(NOTHING if i.line in lines else i for i in kernel.code)
        program = Program(replace(kernel, code=code))
        return unordered([[launch]], {(VECTORS, "vectors"): program})

    assert pairs() == pairs(14) == pairs(15), "the two barriers order the same"
    assert [redundant(kernel, line) for line in (14, 15)] == [False, False], "a run shows it"
    assert pairs(14, 15) - pairs()


@pytest.mark.parametrize(("strict", "races"), [(False, 0), (True, 1)])
def test_by_the_strict_rule_a_write_of_the_same_value_is_one_more(
    *, strict: bool, races: int
) -> None:
    text = VECTORS.replace("[%r3], %r1", "[place], 7")
    region = Region(0x10000, np.zeros(4, np.uint8), True, "given")
    launch = Launch((1, 1, 1), (64, 1, 1), 0, (0x10000).to_bytes(8, "little"))
    kernel = kernels_of(text.replace("bar.sync 1, 128", "bar.sync 1, 64"))["vectors"]
    grid = Grid(Program(kernel), launch, GlobalMemory([region]), watch=True, strict=strict)
    grid.run()
    between = [one for one in grid.races() if one.kind == "write without order after a write"]
    assert len(between) == races


def test_a_barrier_beside_the_same_barrier_is_redundant() -> None:
    assert [redundant(KERNEL, line) for line in (12, 13, 15)] == [True, True, False]


def test_a_fence_or_a_wait_is_redundant_only_before_the_same_or_the_end() -> None:
    assert redundant(KERNEL, 16), "nothing is accessed behind the wait"
    store = kernels_of(TEXT.replace("  ret;", "  st.shared.b32 [%r1], %r2;\n  ret;"))["both"]
    assert not redundant(store, 16)
    assert not redundant(KERNEL, 11)
    fence = "  fence.mbarrier_init.release.cluster;\n"
    more = f"  mbarrier.init.shared.b64 [%r1], 1;\n{fence}  bar.sync 0;\n"
    twice = kernels_of(TEXT.replace(fence, f"{fence}  @%p1 bra ON;\n  bar.sync 0;\nON:\n{more}"))[
        "both"
    ]
    assert redundant(twice, 11)
    used = kernels_of(TEXT.replace(fence, f"{fence}  st.shared.b32 [%r1], %r2;\n{more}"))["both"]
    assert not redundant(used, 11)


def test_a_race_of_the_kernel_itself_notices_no_mutant() -> None:
    lines = Line(5, "st", ""), Line(7, "ld", "")
    race = FoundRace("read without order after a write", lines, ("warp 0", "warp 1"), 0, 1)
    run = Run(launch="one", schedule="eager", races=(race,))
    assert noticed_in(run, ()) == "race"
    assert noticed_in(run, {race.key}) == ""


def test_a_poisoned_product_is_nan() -> None:
    nan = poisoned(KERNEL, 18)
    assert nan
    one = next(one for one in nan.code if one.line == 18)
    assert one.operands[1] == Vector((Number(0x7FFF7FFF),) * 4), "of float16 and of bfloat16"


FLAG = """
.version 8.8
.target sm_121a
.address_size 64
.visible .entry flag(.param .u64 given)
{
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [given];
  mov.u32 %r1, %ctaid.x;
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra AGAIN;
  st.global.b32 [%rd1+8], 7;
  st.global.release.gpu.b32 [%rd1], 1;
  ret;
AGAIN:
  ld.global.acquire.gpu.b32 %r2, [%rd1];
  setp.eq.b32 %p2, %r2, 0;
  @%p2 bra AGAIN;
  ld.global.b32 %r3, [%rd1+8];
  st.global.b32 [%rd1+12], %r3;
  ret;
}
"""


def test_a_block_that_does_not_wait_is_noticed_where_the_last_goes_first() -> None:
    kernel, name = kernels_of(FLAG)["flag"], (FLAG, "flag")
    array = Array("given", 0x10000, bytes(16), True, "u32", (4,))
    sizes, given = ((2, 1, 1), (32, 1, 1), 0), (0x10000).to_bytes(8, "little")
    launch = LaunchFile("one", FLAG, "flag", *sizes, (given,), (array,))
    assert noticed([[launch]], {name: Program(kernel)}) == ""
    (mutant,) = drawn_of(kernel, "wait", 1, seed=1)
    assert mutant.line == 18
    without = Program(mutant.kernel)
    assert run_once(launch, without, Schedule("eager"), watch=True).run.races == ()
    assert run_once(launch, without, Schedule("lazy"), watch=True).run.races
    assert noticed([[launch]], {name: without}) == "race"


#: Of one thread: a branch jumps over what changes the result.
OVER = """
.version 8.8
.target sm_121a
.address_size 64
.visible .entry over(.param .u64 given)
{
  .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [given];
  mov.u32 %r1, %tid.x;
  setp.eq.b32 %p1, %r1, 0;
  @%p1 bra END;
  sub.s32 %r2, %r1, %r3;
  sub.s32 %r2, %r2, 5;
  sub.s32 %r2, 9, %r2;
  bar.sync 0;
  bar.sync 1;
  st.global.b32 [%rd1+4], %r2;
END:
  st.global.b32 [%rd1], 7;
  ret;
}
"""


def test_mutants_in_code_that_does_not_run_are_counted_as_not_judged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernel = kernels_of(OVER)["over"]
    array = Array("given", 0x10000, bytes(8), True, "u32", (2,))
    sizes, given = ((1, 1, 1), (1, 1, 1), 0), (0x10000).to_bytes(8, "little")
    launch = LaunchFile("one", OVER, "over", *sizes, (given,), (array,))
    right = replace(
        launch, expected=ExpectedResult(0x10000, (2,), np.array([7.0, 0.0]), np.zeros(2), "u32")
    )
    programs = {(OVER, "over"): Program(kernel)}
    row = row_of(Check([[right]], programs), count=6, seed=1)
    total = sum(len(drawn_of(kernel, kind, 6, seed=1)) for kind in OBSERVED)
    assert row.not_judged == total > 0, "barriers are in that code alone"
    assert [why for _, _, why in row.others] == [NOT_JUDGED] * total
    Subject("over", launch, lambda memory: int(memory.regions[0].data[0] != 7)).show(8)
    first, *others = capsys.readouterr().out.splitlines()
    assert sum(map(int, re.findall(r"(\d+) [a-z]", first.partition("mutants ")[2]))) == 8
    (number,) = re.findall(rf"(\d+) {NOT_JUDGED}", first)
    assert sum(line.endswith(f": {NOT_JUDGED}") for line in others) == int(number) > 4


#: Four threads; the first alone writes a result.
VALUES = """
.version 8.8
.target sm_121a
.address_size 64
.visible .entry values(.param .u64 given)
{
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .f32 %f<3>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [given];
  mov.u32 %r1, %tid.x;
  max.s32 %r2, %r1, 0;
  add.s32 %r3, %r1, 7;
  setp.ne.b32 %p1, %r1, 0;
  selp.b32 %r5, 1, 2, %p1;
  @%p1 bra END;
  xor.b32 %r4, %r2, 5;
  st.global.b32 [%rd1], %r4;
  st.global.b32 [%rd1+4], %r3;
END:
  bar.warp.sync -1;
  ret;
}
"""


@pytest.mark.parametrize(
    ("line", "old", "new", "why"),
    [
        (10, "max.s32 %r2, %r1, 0", "max.s32 %r2, %r1, -9", SAME_VALUE),
        (12, "setp.ne.b32 %p1, %r1, 0", "setp.gt.s32 %p1, %r1, 0", SAME_VALUE),
        (11, "add.s32 %r3, %r1, 7", "add.s32 %r3, %r1, 8", UNREAD),
        (13, "selp.b32 %r5, 1, 2", "selp.b32 %r5, 1, 3", UNREAD),
        (17, "[%rd1+4], %r3", "[%rd1+4], %r2", UNREAD),
        (15, "xor.b32 %r4, %r2, 5", "xor.b32 %r4, %r2, 261", ""),
        (19, "bar.warp.sync -1", "bar.warp.sync 15", AS_BEFORE),
    ],
)
def test_why_nothing_notices_a_mutant(line: int, old: str, new: str, why: str) -> None:
    array = Array("given", 0x10000, bytes(8), True, "u32", (2,))
    sizes, given = ((1, 1, 1), (4, 1, 1), 0), (0x10000).to_bytes(8, "little")
    launch = LaunchFile("one", VALUES, "values", *sizes, (given,), (array,))
    kernel, name = kernels_of(VALUES)["values"], (VALUES, "values")

    def seen(other: Kernel) -> str:
        """A check of the first byte alone."""
        single = run_once(launch, Program(other), Schedule("eager"), watch=True)
        wrong = single.memory.regions[0].data[0] != 5
        return single.run.fault or "values" * bool(wrong)

    def disorders(other: Kernel) -> bool:
        return bool(unordered([[launch]], {name: Program(other)}))

    mutant = Mutant("operand", line, "", kernels_of(VALUES.replace(old, new))["values"])
    assert (seen(kernel), seen(mutant.kernel)) == ("", "")
    assert reason(kernel, mutant, seen, disorders) == why
    if why == AS_BEFORE:
        assert reason(kernel, mutant, seen, lambda _: True) == ""
