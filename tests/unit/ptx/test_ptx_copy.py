"""Copies of elements (``cp.async``) and their groups: what arrives when, races and faults."""

from __future__ import annotations

import numpy as np
import pytest

from builder.ptx.findings import UNWAITED
from builder.ptx.grid import Schedule
from builder.ptx.machine import Deadlock, Fault, PtxError
from builder.ptx.memory import Region
from tests.unit.ptxworld import run

EAGER, LAZY = Schedule("eager"), Schedule("lazy")
ALL = [EAGER, LAZY, *(Schedule("random", seed) for seed in range(4))]
EARLY_READ, TWICE = "read without order after a write", "write without order after a write"
OVERWRITES = "write without order after a read"

#: Each lane copies its 16 bytes to shared memory, 16 bytes apart.
COPY = (
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"
    "\n{copy}"
    "\n{commit}"
    "\n{wait}"
    "\nld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r9];"
)
WHOLE = "cp.async.cg.shared.global [%r9], [%rd1], 16;"
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group 0;"
GIVEN = [[n, n + 100, n + 200, n + 300] for n in range(32)]


def body(copy: str = WHOLE, commit: str = COMMIT, wait: str = WAIT) -> str:
    return COPY.format(copy=copy, commit=commit, wait=wait)


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize(
    "copy",
    [
        WHOLE,
        "cp.async.ca.shared.global.L2::128B [%r9], [%rd1], 16;",
        "".join(f"cp.async.ca.shared.global [%r9+{n}], [%rd1+{n}], 4;" for n in (0, 4, 8, 12)),
    ],
)
def test_a_group_that_was_waited_for_is_there(copy: str, schedule: Schedule) -> None:
    found = run(body(copy), GIVEN, schedule=schedule, watch=True)
    assert found.out.tolist() == GIVEN
    assert found.outcome.races == []


def test_bytes_behind_the_source_are_zero_and_are_not_read() -> None:
    copy = "mov.b32 %r11, {size}; cp.async.cg.shared.global [%r9], [{at}], 16, %r11;"
    found = run(body(copy.format(size=6, at="%rd1")), [[0x11111111, 0x22222222, 3, 4]])
    assert found.out[0].tolist() == [0x11111111, 0x2222, 0, 0]
    nowhere = "mov.b64 %rd5, 0; " + copy.format(size=0, at="%rd5")
    assert run(body(nowhere), GIVEN).out.tolist() == [[0, 0, 0, 0]] * 32
    with pytest.raises(Fault, match="outside every buffer"):
        run(body("mov.b64 %rd5, 0; " + copy.format(size=16, at="%rd5")), GIVEN)


def test_a_predicate_says_which_lanes_copy() -> None:
    copy = f"mov.b32 %r11, 7; st.shared.b32 [%r9], %r11; setp.lt.u32 %p1, %r0, 5; @%p1 {WHOLE}"
    found = run(body(copy), GIVEN, watch=True)
    assert found.out[:, 0].tolist() == [0, 1, 2, 3, 4, *[7] * 27]
    # the rest of those rows was never written
    assert found.kinds == {"read of uninitialised memory"}


@pytest.mark.parametrize(
    "broken",
    [
        {"commit": "", "wait": WAIT},
        {"wait": ""},
        {"wait": "cp.async.wait_group 1;"},
    ],
    ids=["not in a group", "no wait", "a group too few"],
)
def test_without_the_wait_there_is_a_race_and_late_copies_are_missed(
    broken: dict[str, str],
) -> None:
    found = run(body(**broken), GIVEN, watch=True)
    assert EARLY_READ in found.kinds
    assert found.outcome.races[0].agents == ("warp 0", "asynchronous copy")
    late = run(body(**broken), GIVEN, schedule=LAZY)
    assert set(late.out[:, 0]) == {0xFFFFFFFF}


def test_the_latest_groups_may_be_under_way() -> None:
    """Two groups: of 1 that may be late only the first is there."""
    second = "cp.async.cg.shared.global [%r9+1024], [%rd1], 16; cp.async.commit_group;"
    text = body(commit=COMMIT + second, wait="cp.async.wait_group 1;")
    assert run(text, GIVEN, schedule=LAZY, watch=True).out.tolist() == GIVEN
    other = text.replace("[%r9];", "[%r9+1024];")
    assert EARLY_READ in run(other, GIVEN, watch=True).kinds
    assert set(run(other, GIVEN, schedule=LAZY).out[:, 0]) == {0xFFFFFFFF}


def test_groups_are_of_each_lane() -> None:
    """Lanes 0 to 15 commit one group, then the others; each waits for all but its latest."""
    apart = (
        "setp.lt.u32 %p1, %r0, 16; @!%p1 bra REST;"
        f"{WHOLE} {COMMIT} bra MEET; REST: {WHOLE} {COMMIT} MEET: bar.warp.sync -1;"
    )
    for number, seen in ((0, range(32)), (1, [0xFFFFFFFF] * 32)):
        wait = f"cp.async.wait_group {number};"
        found = run(body(apart, "", wait), GIVEN, schedule=LAZY)
        assert found.out[:, 0].tolist() == [*seen]


def test_one_lane_does_not_wait_for_another() -> None:
    """Two halves of a warp copy, and wait, one after the other."""
    halves = (
        "setp.lt.u32 %p1, %r0, 16; @!%p1 bra REST;"
        f"{WHOLE} {COMMIT} bra MEET; REST: {WHOLE} {COMMIT} MEET: bar.warp.sync -1;"
    )
    waits = f"@!%p1 bra LATER; {WAIT} bra BOTH; LATER: {WAIT} BOTH: bar.warp.sync -1;"
    found = run(body(halves, "", waits), GIVEN, schedule=LAZY, watch=True)
    assert found.out.tolist() == GIVEN
    assert found.outcome.races == []


def test_other_warps_need_a_barrier_behind_the_wait() -> None:
    read = "xor.b32 %r12, %r10, 512; mov.b32 %r9, dynamic; add.s32 %r9, %r9, %r12;"
    given = [[n] for n in range(64)]
    good = run(body(wait=f"{WAIT} bar.sync 0; {read}"), given, threads=64, watch=True)
    assert good.out[:, 0].tolist() == [n ^ 32 for n in range(64)]
    assert good.outcome.races == []
    early = run(body(wait=f"bar.sync 0; {WAIT} {read}"), given, threads=64, watch=True)
    assert EARLY_READ in early.kinds, "the barrier is in front of the wait"


#: Warp 0 copies, and an mbarrier behind the data tells warp 1, which reads.
TRACKED = (
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r12, %r9, %r10;"
    "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9+1024], {count}; bar.sync 0;"
    "setp.lt.u32 %p2, %r0, 32; @!%p2 bra CONSUMER;"
    "cp.async.cg.shared.global [%r12], [%rd1], 16; {arrive} bra OUT;"
    "CONSUMER: {{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [%r9+1024], 0;"
    "@P bra DONE; bra AGAIN; DONE: }} ld.shared.b32 %r5, [%r12-512]; OUT:"
)
TRACK = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r9+1024];"


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_an_mbarrier_tells_other_warps_of_copies(schedule: Schedule) -> None:
    given = [[n] for n in range(64)]
    own = TRACK.replace(".noinc", "") + "mbarrier.arrive.shared.b64 _, [%r9+1024];"
    for arrive in (TRACK, own):
        body = TRACKED.format(count=32, arrive=arrive)
        found = run(body, given, threads=64, schedule=schedule, watch=True)
        assert found.out[32:, 0].tolist() == list(range(32))
        assert found.outcome.races == []


def test_an_arrival_that_does_not_track_the_copies_is_a_race() -> None:
    given = [[n] for n in range(64)]
    body = TRACKED.format(count=32, arrive="mbarrier.arrive.shared.b64 _, [%r9+1024];")
    kinds = set[str]().union(
        *(run(body, given, threads=64, schedule=one, watch=True).kinds for one in ALL)
    )
    assert EARLY_READ in kinds
    # it raises the count of its phase itself, so that none of the phase's own has arrived
    body = TRACKED.format(count=32, arrive=TRACK.replace(".noinc", ""))
    with pytest.raises(Deadlock, match="warp 1 spins"):
        run(body, given, threads=64)


def test_copies_and_accesses_of_one_place_need_an_order() -> None:
    """Two copies of a place, and one into what another warp reads."""
    assert TWICE in run(body(WHOLE + WHOLE), GIVEN, watch=True).kinds
    again = f"{WAIT} ld.shared.b32 %r11, [%r9]; {{sync}} xor.b32 %r10, %r10, 512;"
    again += f"mov.b32 %r9, dynamic; add.s32 %r9, %r9, %r10; {WHOLE} {COMMIT} {WAIT}"
    for sync, kinds in (("", {OVERWRITES, TWICE}), ("bar.sync 0;", set())):
        found = run(body(wait=again.format(sync=sync)), [[1]] * 64, threads=64, watch=True)
        assert found.kinds == kinds


def test_a_misaligned_or_outside_copy_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"PTX line 12.*not a multiple of 16"):
        run(body("cp.async.cg.shared.global [%r9+4], [%rd1], 16;"), GIVEN)
    with pytest.raises(Fault, match="not a multiple of 16"):
        run(body("cp.async.cg.shared.global [%r9], [%rd1+4], 16;"), GIVEN)
    with pytest.raises(Fault, match="outside the block's 8192 bytes"):
        run(body("cp.async.cg.shared.global [%r9+8192], [%rd1], 16;"), GIVEN)


@pytest.mark.parametrize(
    "one",
    [
        "cp.async.cg.shared.global [%r9], [%rd1], 8;",
        "cp.async.ca.shared.global [%r9], [%rd1], 3;",
        "cp.async.ca.shared::cluster.global [%r9], [%rd1], 4;",
        "cp.async.wait_any;",
        "cp.async.wait_group %r9;",
        "cp.async.mbarrier.wait.shared.b64 [%r9];",
    ],
)
def test_unknown_forms_are_named(one: str) -> None:
    name = one.split(maxsplit=1)[0].rstrip(";")
    with pytest.raises(PtxError, match=f"PTX line 12: unknown instruction {name}"):
        run(body(one))


#: Each lane writes its words, and lane 0 copies those of all lanes to another array.
STORE_BYTES = (
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"
    "st.shared.v4.b32 [%r9], {%r1, %r2, %r3, %r4}; fence.proxy.async; bar.sync 0;"
    "mov.b64 %rd5, 0xa0000; setp.eq.u32 %p1, %r0, 0; mov.b32 %r11, 512;"
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd5], [dynamic], %r11;"
    "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_bytes_of_shared_memory_are_stored(schedule: Schedule) -> None:
    far = np.zeros(512, np.uint8)
    memory = (Region(0xA0000, far, True, "far"),)
    found = run(STORE_BYTES, GIVEN, schedule=schedule, watch=True, memory=memory)
    assert far.view(np.uint32).reshape(32, 4).tolist() == GIVEN
    assert found.outcome.races == []


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_all_lanes_store_the_same_bytes(schedule: Schedule) -> None:
    """That is one copy, and no race; from two places it is one."""
    far = np.zeros(512, np.uint8)
    memory = (Region(0xA0000, far, True, "far"),)
    body = STORE_BYTES.replace("@%p1 ", "")
    found = run(body, GIVEN, schedule=schedule, watch=True, memory=memory)
    assert far.view(np.uint32).reshape(32, 4).tolist() == GIVEN
    assert found.outcome.races == []
    copy = "cp.async.bulk.global.shared::cta.bulk_group [%rd5], [dynamic], %r11;"
    twice = body.replace(copy, f"@%p1 {copy} @!%p1 {copy}")
    assert run(twice, GIVEN, schedule=schedule, watch=True, memory=memory).outcome.races == []
    place = "mov.b32 %r11, 256; and.b32 %r12, %r10, 256; mov.b32 %r13, dynamic;"
    apart = body.replace("mov.b32 %r11, 512;", f"{place} add.s32 %r12, %r12, %r13;")
    apart = apart.replace("[dynamic]", "[%r12]")
    raced = run(apart, GIVEN, schedule=schedule, watch=True, memory=memory)
    assert raced.kinds == {"write without order after a write"}


def test_what_a_store_of_bytes_lacks_is_seen() -> None:
    far = Region(0xA0000, np.zeros(512, np.uint8), True, "far")
    unfenced = STORE_BYTES.replace("fence.proxy.async;", "")
    assert run(unfenced, GIVEN, watch=True, memory=(far,)).kinds
    alone = STORE_BYTES.replace("@%p1 cp.async.bulk.wait_group 0;", "")
    assert UNWAITED in run(alone, GIVEN, watch=True, memory=(far,)).kinds
    with pytest.raises(Fault, match="not by 16"):
        run(STORE_BYTES.replace("512;", "24;"), GIVEN, memory=(far,))
    with pytest.raises(Fault):
        run(STORE_BYTES, GIVEN, memory=(Region(0xA0000, far.data, False, "far"),))
