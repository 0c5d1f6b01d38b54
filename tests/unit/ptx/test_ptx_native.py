"""The core in C and the reference in Python: the same bits, the same counts, the same races."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from builder.ptx import block, grid, native
from builder.ptx.block import Block
from builder.ptx.grid import Grid, Schedule
from builder.ptx.machine import Fault
from builder.ptx.memory import Region
from builder.ptx.native import core
from tests.unit.ptxworld import run

if TYPE_CHECKING:
    from tests.unit.ptxworld import Result

pytestmark = pytest.mark.skipif(core() is None, reason="there is no C compiler")

RECORDED = dict(
    json.loads((Path(__file__).parents[1] / "golden" / "ptx_h100.json").read_text("utf-8"))
)
WORDS = np.random.default_rng(7).integers(0, 2**32, (96, 4), np.uint32)
#: Floats with zeros, subnormal numbers, infinities and NaN.
SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0x3F800000, 0x00800000,
     0x7F7FFFFF, 0x4B000000, 0xBF000000, 0x33800000], np.uint32
)  # fmt: skip


def check_same(body: str, given: Any = None, **options: Any) -> Result:
    """Run a body in both, which compares everything that they leave."""
    return run(body, WORDS[: options.get("threads", 32)] if given is None else given, **options)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", RECORDED)
def test_recorded_bodies(body: str) -> None:
    check_same(body, threads=96, watch=True)


FLOATS = [
    *(f"{op}.f32 %f3, %f1, %f2;" for op in ("add", "sub", "mul.ftz", "add.ftz", "min", "max.ftz")),
    *(f"{op}.f32 %f3, %f1, %f2;" for op in ("div.rn", "div.rn.ftz")),
    *(f"{op}.f32 %f3, %f1;" for op in ("rcp.approx.ftz", "rcp.rn", "sqrt.rn", "sqrt.approx.ftz",
                                       "ex2.approx", "ex2.approx.ftz", "neg", "abs.ftz")),
    "fma.rn.f32 %f3, %f1, %f2, %f1;", "fma.rn.ftz.f32 %f3, %f1, %f2, %f2;",
]  # fmt: skip
NARROW = [
    "cvt.rn.bf16x2.f32 %r5, %f1, %f2;", "cvt.rn.f16x2.f32 %r5, %f1, %f2;",
    "cvt.rn.satfinite.bf16x2.f32 %r5, %f1, %f2;", "cvt.rni.s32.f32 %r5, %f1;",
    "cvt.rzi.u32.f32 %r5, %f1;", "cvt.rmi.ftz.s32.f32 %r5, %f1;",
    "mul.rn.bf16x2 %r5, %r1, %r2;", "add.f16x2 %r5, %r1, %r2;",
    "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2; cvt.u32.u16 %r5, %rs1;",
    "cvt.u16.u32 %rs1, %r1; cvt.rn.f16x2.e4m3x2 %r5, %rs1;",
    "cvt.u16.u32 %rs1, %r1; cvt.f32.f16 %f3, %rs1; mov.b32 %r5, %f3;",
    *(f"setp.{c}.f32 %p1, %f1, %f2; selp.b32 %r5, 1, 0, %p1;" for c in ("lt", "neu", "ne", "geu")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", [*FLOATS, *NARROW])
def test_special_and_ordinary_floats(body: str) -> None:
    pairs = np.array([(x, y) for x in SPECIAL for y in SPECIAL], np.uint32)
    near = np.random.default_rng(3).normal(0, 300, (87, 2)).astype(np.float32).view(np.uint32)
    given = np.concatenate([pairs, near])
    begin = "mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %r5, 0; mov.b32 %f3, 0f00000000; "
    end = "" if "%r5" in body else " mov.b32 %r5, %f3;"
    check_same(begin + body + end, given, threads=256)


INTEGERS = [
    f"{op} {r}5, {r}1, {r}2;" for op, r in (
        ("div.s32", "%r"), ("rem.s32", "%r"), ("div.u32", "%r"), ("mul.hi.s32", "%r"),
        ("shl.b32", "%r"), ("shr.s32", "%r"), ("shr.u32", "%r"), ("max.s32", "%r"),
    )
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", INTEGERS)
def test_integers_at_their_limits(body: str) -> None:
    edge = np.array([0, 1, 2**31, 2**31 - 1, 2**32 - 1, 31, 32, 40], np.uint32)
    check_same(body, np.array([(x, y) for x in edge for y in edge], np.uint32), threads=64)


LOOP = """mov.u32 %r5, 0;
again: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, %r6; @%p1 bra again;"""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("random", 4)])
def test_loops_are_counted_as_in_the_reference(schedule: Schedule) -> None:
    whole = check_same("mov.u32 %r6, 300; " + LOOP, schedule=schedule)
    apart = check_same("mov.u32 %r6, %laneid; " + LOOP, schedule=schedule)
    assert whole.outcome.instructions > 900
    assert apart.outcome.instructions > 90


SHARED = "mov.u32 %r9, dynamic; shl.b32 %r10, %r0, 2; add.u32 %r9, %r9, %r10; "
RACES = {
    "of warps": SHARED + "st.shared.u32 [%r9], %r1; ld.shared.u32 %r5, [%r9+128];",
    "ordered": SHARED + "st.shared.u32 [%r9], %r1; bar.sync 0;"
               "add.u32 %r11, %r10, 128; rem.u32 %r11, %r11, 384; mov.u32 %r12, dynamic;"
               "add.u32 %r9, %r12, %r11; ld.shared.u32 %r5, [%r9];",
    "lanes": SHARED + "st.shared.u32 [%r9], %r1; ld.shared.u32 %r5, [%r9+4];",
    "of bytes": SHARED + "st.shared.u8 [%r9], %r1; bar.sync 0; ld.shared.u32 %r5, [%r9+128];",
    "read first": SHARED + "st.shared.u32 [%r9], %r1; bar.sync 0; ld.shared.u32 %r5, [%r9+128];"
                           "st.shared.u32 [%r9], %r5;",
    "same value": SHARED + "st.shared.u32 [%r9], 7; st.shared.u32 [%r9+4], 7;",
    "one place": "mov.u32 %r9, dynamic; st.shared.u32 [%r9], %r0;",
    "volatile": SHARED + "st.volatile.shared.u32 [%r9], %r1; ld.shared.u32 %r5, [%r9+128];",
    "global": "st.global.u32 [%rd2], %r1; ld.global.u32 %r5, [%rd2];",
    "atomics": SHARED + "st.shared.u32 [%r9], 1; bar.sync 0; mov.u32 %r11, dynamic;"
                        "atom.shared.add.u32 %r12, [%r11], 1; ld.shared.u32 %r5, [%r11];",
}  # fmt: skip


#: Those that are none: without one, of values that are the same, and of what only one thread has.
QUIET = ("ordered", "same value", "global")


@pytest.mark.parametrize("name", RACES)
def test_races(name: str) -> None:
    found = check_same(RACES[name], threads=96, watch=True, shared=8704)
    assert bool(found.outcome.races) == (name not in QUIET)


#: Of each, which the core leaves to the reference: nothing, once the race is known.
AGAIN = (
    "mov.u32 %r20, 0; again: {} add.u32 %r20, %r20, 1; setp.lt.u32 %p9, %r20, 9; @%p9 bra again;"
)
KNOWN = {
    "of warps": ("ld.shared.u32 %r5, [%r9+128]; st.shared.u32 [%r9], %r1;", "st.shared.u32"),
    "unwritten": ("ld.shared.u32 %r5, [%r9+512];", "ld.shared.u32"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_race_is_not_looked_at_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, instruction = KNOWN[name]
    body = SHARED + "st.shared.u32 [%r9], %r1; " + AGAIN.format(body)
    found = check_same(body, threads=96, watch=True, shared=8704)
    assert found.outcome.races
    left = _left_to_python(monkeypatch)
    run(body, WORDS[:96], threads=96, watch=True, shared=8704, fast=True)
    assert 0 < left.count(instruction) < 9


def _left_to_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instructions that the core leaves to the reference from now on."""
    left: list[str] = []
    plain = Grid._steps

    def steps(self: Grid, warp: Any, mask: Any, places: range) -> Any:
        left.append(self.program.kernel.code[places.start].name)
        return plain(self, warp, mask, places)

    monkeypatch.setattr(Grid, "_steps", steps)
    return left


BAD = [
    "ld.global.u32 %r5, [%rd1+4096];", "st.global.u32 [%rd1], %r1;",
    "ld.param.u32 %r5, [p_in-4096];", "ld.param.u32 %r5, [p_in+0xffffffffffffffff];",
    "mov.u64 %rd7, 0x7ffffffffffffffc; ld.global.u32 %r5, [%rd7];",
    "mov.u64 %rd7, 0x7ffffffffffffffc; ld.shared.u32 %r5, [%rd7];",
    SHARED + "st.shared.u32 [%r9+2], %r1;", SHARED + "ld.shared.u32 %r5, [%r9+8190];",
]  # fmt: skip


@pytest.mark.parametrize("body", BAD)
def test_faults(body: str) -> None:
    said = []
    for fast in (True, False):
        with pytest.raises(Fault) as caught:
            run(body, WORDS[:32], fast=fast)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "PTX line" in said[0]


def test_an_endless_loop_is_found_in_the_core() -> None:
    with pytest.raises(Fault, match="a loop that does not end"):
        run("again: add.u32 %r5, %r5, 1; bra again;", fast=True)


def test_the_core_runs_what_is_common(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _left_to_python(monkeypatch)
    run("mov.u32 %r6, 300; " + LOOP, fast=True)
    assert left == ["ret"]


def test_without_a_compiler_the_reference_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert native.core.__wrapped__() is None
    monkeypatch.setattr(grid, "core", lambda: None)
    found = run("add.u32 %r5, %r1, %r2;", WORDS[:32]).out[:, 0]
    assert (found == WORDS[:32, 0] + WORDS[:32, 1]).all()


MEET = "bar.sync 0; mov.u32 %r5, %ctaid.x;"


@pytest.mark.parametrize("fast", [True, False])
def test_blocks_are_made_as_they_run(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Counted(Block):
        def __init__(self, *given: Any) -> None:
            nonlocal most
            super().__init__(*given)
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(block, "Block", Counted)
    monkeypatch.setattr(grid, "_RESIDENT", 4)
    for schedule in (Schedule(), Schedule("random", 1)):
        run(MEET, WORDS[:32], blocks=60, schedule=schedule, fast=fast)
    assert most <= 8


#: Each block waits until all are there.
TOGETHER = """mov.u32 %r9, 1; setp.eq.u32 %p1, %r0, 0; @!%p1 bra wait;
atom.global.add.u32 %r10, [%rd2+4], %r9;
wait: ld.volatile.global.u32 %r11, [%rd2+4]; setp.lt.u32 %p2, %r11, 12; @%p2 bra wait;
mov.u32 %r5, 1; mov.u32 %r6, 12; mov.u32 %r7, 0; mov.u32 %r8, 0;"""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("random", 3)])
def test_blocks_that_wait_for_later_ones(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_RESIDENT", 4)
    one_thread = np.zeros((1, 4), np.uint32)
    found = run(TOGETHER, one_thread, threads=1, blocks=12, schedule=schedule)
    assert found.out[0, 0] == 1


#: Block 0 writes, and releases a flag that the others acquire; then they read, twice.
HANDED = """mov.u32 %r9, %ctaid.x; mov.u64 %rd8, 1048576; setp.ne.u32 %p1, %r9, 0; @%p1 bra take;
shl.b32 %r10, %r0, 2; cvt.u64.u32 %rd9, %r10; add.s64 %rd10, %rd8, %rd9;
st.global.u32 [%rd10+256], %r1; bar.sync 0;
setp.ne.u32 %p2, %r0, 0; @%p2 bra end; membar.gl; st.relaxed.gpu.global.u32 [%rd8], 1; bra end;
take: ld.{order}.gpu.global.u32 %r11, [%rd8]; setp.eq.u32 %p2, %r11, 0; @%p2 bra take; bar.sync 0;
mov.u32 %r12, 0;
more: shl.b32 %r10, %r0, 2; cvt.u64.u32 %rd9, %r10; add.s64 %rd10, %rd8, %rd9;
ld.global.u32 %r13, [%rd10+256]; add.u32 %r12, %r12, 1;
setp.lt.u32 %p3, %r12, 4; @%p3 bra more;
end: mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0; mov.u32 %r8, 0;"""


@pytest.mark.parametrize(("order", "races"), [("acquire", False), ("relaxed", True)])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule("random", 5)])
def test_what_other_blocks_hand_over(order: str, races: bool, schedule: Schedule) -> None:
    found = []
    for fast in (True, False):
        data = np.zeros(1024, np.uint8)
        memory = (Region(1 << 20, data, True, "handed"),)
        body = HANDED.replace("{order}", order)
        one = run(body, WORDS[:64], threads=64, blocks=3, watch=True, memory=memory,
                  schedule=schedule, fast=fast)  # fmt: skip
        found.append((one.outcome, data.tobytes()))
    assert found[0] == found[1]
    handed = [race for race in found[0][0].races if race.memory == "handed"]
    assert bool(handed) == races


def test_what_others_hand_over_is_read_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _left_to_python(monkeypatch)
    memory = (Region(1 << 20, np.zeros(1024, np.uint8), True, "handed"),)
    body = HANDED.replace("{order}", "acquire")
    run(body, WORDS[:64], threads=64, blocks=3, watch=True, memory=memory, fast=True)
    # of the four loads of each of four warps, the first is left to the reference
    assert left.count("ld.global.u32") == 4


APART = "setp.lt.u32 %p1, %laneid, 5; @%p1 bra done; again: bra again; done:"


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("random", 1)])
def test_endless_loops_of_some_lanes_are_found(schedule: Schedule) -> None:
    with pytest.raises(Fault, match="a loop that does not end"):
        run(APART, schedule=schedule, fast=True)


PARTS = """setp.lt.u32 %p1, %laneid, 9; mov.u32 %r5, 0; mov.u32 %r6, 40; @%p1 bra less;
more: add.u32 %r5, %r5, 2; setp.lt.u32 %p2, %r5, %r6; @%p2 bra more; bra.uni end;
less: add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, %laneid; @%p2 bra less;
end: bar.warp.sync -1; vote.sync.ballot.b32 %r7, %p1, -1;"""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("lazy"), Schedule("random", 9)])
def test_lanes_that_go_their_own_way(schedule: Schedule) -> None:
    found = check_same(PARTS, schedule=schedule, threads=96, watch=True)
    assert (found.out[:32, 2] == 0x1FF).all()


def test_lanes_part_and_meet_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    left = _left_to_python(monkeypatch)
    run(PARTS, fast=True)
    assert set(left) == {"bar.warp.sync", "ret"}


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "file" / "cache"))
    assert native.core.__wrapped__() is None
