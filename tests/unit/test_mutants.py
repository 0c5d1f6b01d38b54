"""What is drawn as a wrong kernel, and which of those compute the same."""

from __future__ import annotations

import pytest

from builder.ptx.findings import FoundRace, Line, Run
from builder.ptx.source import Number, Vector, kernels_of
from tests.mutants import OBSERVED, drawn_of, noticed_in, poisoned, redundant

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
    one = next(one for one in poisoned(KERNEL, 18).code if one.line == 18)
    assert one.operands[1] == Vector((Number(0x7FFF7FFF),) * 4), "of float16 and of bfloat16"
