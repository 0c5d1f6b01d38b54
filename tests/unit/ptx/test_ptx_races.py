"""Races on global memory, between lanes of a warp, and through flags, locks and scopes."""

from __future__ import annotations

import numpy as np
import pytest

from builder.ptx.grid import Schedule
from builder.ptx.machine import Deadlock
from builder.ptx.memory import Region
from builder.ptx.races import Races, joined
from tests.unit.ptxworld import Result, run

ALL = [Schedule("eager"), *(Schedule("random", seed) for seed in range(5))]
DATA = 0x200000
#: %rd5: 64 words of zeros that all threads may write; %r9: a thread's number in the grid.
BEGIN = (
    f"mov.u64 %rd5, {DATA}; mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ntid.x;"
    "mad.lo.u32 %r9, %r10, %r11, %r0; mov.u64 %rd2, p_out; ld.param.u64 %rd2, [p_out];"
    "mul.wide.u32 %rd3, %r9, 16; add.s64 %rd2, %rd2, %rd3; setp.eq.u32 %p1, %r9, 0;"
    "setp.eq.u32 %p2, %r0, 0;"
)


def races(
    body: str,
    *,
    threads: int = 32,
    blocks: int = 1,
    schedule: Schedule = ALL[0],
    as_gpus: bool = False,
) -> Result:
    """Run a body with the 64 words; its blocks have outputs of their own."""
    words = np.zeros(64, np.uint32)
    more = np.zeros(1 << 16, np.uint8)
    regions = (
        Region(DATA, words.view(np.uint8), True, "words"),
        Region(0x90000, more, True, "more"),
    )
    body = BEGIN + body + "add.s64 %rd2, %rd2, 0x10000;"
    return run(
        body,
        threads=threads,
        blocks=blocks,
        schedule=schedule,
        watch=True,
        as_gpus=as_gpus,
        memory=regions,
    )


IN_WARP = "write without order after a write in the same warp"
IN_GRID = "read without order after a write in another block"


def test_lanes_are_ordered_by_a_barrier_of_the_warp_alone() -> None:
    """Each lane writes its word, then reads its neighbour's."""
    body = (
        "mul.wide.u32 %rd6, %r0, 4; add.s64 %rd7, %rd5, %rd6; st.global.b32 [%rd7], 7;"
        "\n{between}\nxor.b32 %r12, %r0, 1; mul.wide.u32 %rd6, %r12, 4; add.s64 %rd7, %rd5, %rd6;"
        "ld.global.b32 %r5, [%rd7];"
    )
    assert races(body.format(between="bar.warp.sync 0xffffffff;")).outcome.races == []
    assert races(body.format(between="bar.sync 0;")).outcome.races == []
    for none in ("", "shfl.sync.idx.b32 %r20, %r0, 0, 31, 0xffffffff;"):
        (race,) = races(body.format(between=none)).outcome.races
        assert race.kind == "read without order after a write in the same warp"
        assert (race.agents, race.memory) == (("warp 0 lane 0", "warp 0 lane 1"), "words")
        assert race.missing == "bar.warp.sync (__syncwarp) between the two lanes"


def test_lanes_that_store_different_values_at_once() -> None:
    assert races("st.global.b32 [%rd5], %r0;").kinds == {IN_WARP}
    assert races("st.global.b32 [%rd5], 5;").outcome.races == [], "the same value"
    body = "mov.b32 %r12, dynamic; st.shared.b32 [%r12], {};"
    assert races(body.format("%r0")).kinds == {IN_WARP}
    assert races(body.format("5")).outcome.races == []


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_atomics_race_only_with_plain_accesses(schedule: Schedule) -> None:
    add = "atom.global.add.u32 %r5, [%rd5], 1;"
    good = races(add, threads=64, blocks=3, schedule=schedule)
    assert good.outcome.races == []
    guard = "ld.global.u32 %r12, [%rd5]; setp.lt.u32 %p3, %r12, 1000; @%p3 " + add
    assert any("atomic" in kind for kind in races(guard, blocks=3, schedule=schedule).kinds)
    strong = guard.replace("ld.global", "ld.relaxed.gpu.global")
    assert races(strong, blocks=3, schedule=schedule).outcome.races == []


def test_a_scope_of_one_block_does_not_reach_another() -> None:
    add = "atom.relaxed.cta.global.add.u32 %r5, [%rd5], 1;"
    assert races(add, threads=64).outcome.races == []
    (race,) = races(add, blocks=2).outcome.races
    assert (
        race.kind == "atomic without order after an atomic of too narrow a scope in another block"
    )
    assert race.missing.endswith("scope cta orders only the threads of one block")
    assert race.agents[0].startswith("block 1,0,0 warp 0")


#: Block 0 writes and sets a flag, the others wait for it and read.
FLAG = (
    "@!%p2 bra END; setp.ne.u32 %p3, %r10, 0; @%p3 bra WAIT;"
    "\nst.global.b32 [%rd5+64], 3;"
    "\n{set}"
    "\nbra END; WAIT: {get} setp.eq.u32 %p4, %r12, 0; @%p4 bra WAIT; {after}"
    "\nld.global.b32 %r5, [%rd5+64]; END:"
)
RELEASED = [
    ("st.release.gpu.global.b32 [%rd5], 1;", "ld.acquire.gpu.global.b32 %r12, [%rd5];", ""),
    ("membar.gl; st.volatile.global.b32 [%rd5], 1;", "ld.volatile.global.b32 %r12, [%rd5];",
     "membar.gl;"),
    ("fence.acq_rel.gpu; atom.global.exch.b32 %r13, [%rd5], 1;",
     "ld.relaxed.gpu.global.b32 %r12, [%rd5];", "fence.acq_rel.gpu;"),
    ("red.release.gpu.global.add.u32 [%rd5], 1;",
     "atom.acquire.gpu.global.or.b32 %r12, [%rd5], 0;", ""),
]  # fmt: skip
BROKEN = [
    ("st.relaxed.gpu.global.b32 [%rd5], 1;", "ld.acquire.gpu.global.b32 %r12, [%rd5];", ""),
    ("st.release.gpu.global.b32 [%rd5], 1;", "ld.relaxed.gpu.global.b32 %r12, [%rd5];", ""),
    ("membar.gl; st.volatile.global.b32 [%rd5], 1;", "ld.volatile.global.b32 %r12, [%rd5];", ""),
    ("fence.acq_rel.cta; atom.global.exch.b32 %r13, [%rd5], 1;",
     "ld.relaxed.gpu.global.b32 %r12, [%rd5];", "fence.acq_rel.gpu;"),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_flag_orders_if_one_side_releases_and_the_other_acquires(schedule: Schedule) -> None:
    for set_, get, after in RELEASED:
        body = FLAG.format(set=set_, get=get, after=after)
        assert races(body, blocks=3, schedule=schedule).outcome.races == [], set_
    for set_, get, after in BROKEN:
        body = FLAG.format(set=set_, get=get, after=after)
        assert races(body, blocks=3, schedule=schedule).kinds == {IN_GRID}, set_


def test_a_fence_of_too_narrow_a_scope_is_named() -> None:
    set_, get, after = BROKEN[-1]
    (race,) = races(FLAG.format(set=set_, get=get, after=after), blocks=2).outcome.races
    assert race.missing.endswith("scope cta orders only the threads of one block")


#: One lane of each block adds to a word behind a lock.
LOCK = (
    "@!%p2 bra END; SPIN: atom.global.cas.b32 %r12, [%rd5], 0, 1; setp.ne.u32 %p3, %r12, 0;"
    "@%p3 bra SPIN; {fence} ld.global.b32 %r5, [%rd5+64]; add.u32 %r5, %r5, 1;"
    "\nst.global.b32 [%rd5+64], %r5; {fence} atom.global.exch.b32 %r13, [%rd5], 0; END:"
)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_data_behind_a_spin_lock(schedule: Schedule) -> None:
    good = LOCK.format(fence="membar.gl;")
    assert races(good, threads=64, blocks=4, schedule=schedule).outcome.races == []
    assert races(LOCK.format(fence=""), blocks=4, schedule=schedule).outcome.races


#: Every block writes a word, all meet, and each reads the next block's.
GRID = (
    "mul.wide.u32 %rd6, %r10, 4; add.s64 %rd7, %rd5, %rd6;"
    "\n@%p2 st.global.b32 [%rd7+64], 9; bar.sync 0; @!%p2 bra MET; {before}"
    "red.global.add.u32 [%rd5], 1; AGAIN: ld.relaxed.gpu.global.b32 %r12, [%rd5];"
    "setp.lt.u32 %p3, %r12, 3; @%p3 bra AGAIN; {after} MET: bar.sync 0;"
    "add.u32 %r13, %r10, 1; rem.u32 %r13, %r13, 3; mul.wide.u32 %rd6, %r13, 4;"
    "add.s64 %rd7, %rd5, %rd6;\nld.global.b32 %r5, [%rd7+64];"
)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_barrier_of_the_grid(schedule: Schedule) -> None:
    good = GRID.format(before="membar.gl;", after="membar.gl;")
    assert races(good, threads=64, blocks=3, schedule=schedule).outcome.races == []
    for fences in ({"before": "", "after": "membar.gl;"}, {"before": "membar.gl;", "after": ""}):
        bad = races(GRID.format(**fences), threads=64, blocks=3, schedule=schedule)
        assert bad.kinds == {IN_GRID}


#: As `GRID`, in FlashInfer's form: the last block to arrive, with a relaxed atomic, sets the count
#: back with a weak store.
RESET = (
    "mul.wide.u32 %rd6, %r10, 4; add.s64 %rd7, %rd5, %rd6;"
    "\n@%p2 st.global.b32 [%rd7+64], 9; {first} {fence} @!%p2 bra MET;"
    "ld.acquire.gpu.global.u32 %r14, [%rd5+4];"
    "\natom.global.add.u32 %r12, [%rd5], 1; setp.ne.u32 %p3, %r12, 2; @%p3 bra AGAIN;"
    "\nst.global.u32 [%rd5], 0;"
    "\nadd.u32 %r15, %r14, 1; st.release.gpu.global.u32 [%rd5+4], %r15; bra MET;"
    "AGAIN: ld.acquire.gpu.global.u32 %r12, [%rd5+4]; setp.eq.u32 %p3, %r12, %r14;"
    "@%p3 bra AGAIN; MET: {last}"
    "add.u32 %r13, %r10, 1; rem.u32 %r13, %r13, 3; mul.wide.u32 %rd6, %r13, 4;"
    "add.s64 %rd7, %rd5, %rd6;\nld.global.b32 %r5, [%rd7+64];"
)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_barrier_of_the_grid_whose_last_block_acquires_nothing(schedule: Schedule) -> None:
    """The memory model does not order the data, GPUs do; without a part they do not either.

    The weak store follows the atomic that saw the others, which the model does order.
    """
    whole = {"first": "bar.sync 0;", "fence": "membar.gl;", "last": "bar.sync 0;"}

    def kinds(as_gpus: bool, **parts: str) -> set[str]:
        body = RESET.format(**{**whole, **parts})
        return races(body, threads=64, blocks=3, schedule=schedule, as_gpus=as_gpus).kinds

    assert kinds(as_gpus=False) == {IN_GRID}
    assert kinds(as_gpus=True) == set()
    assert IN_GRID in kinds(as_gpus=True, fence="")
    assert IN_GRID in kinds(as_gpus=True, last="")


#: Block 1 waits for what block 0 adds to a word, and changes it with a weak store.
TURN = (
    "@!%p2 bra END; setp.ne.u32 %p3, %r10, 0; @%p3 bra WAIT;"
    "\n{set}"
    "\nbra END; WAIT: setp.ne.u32 %p3, %r10, 1; @%p3 bra END;"
    "SPIN: {get} setp.eq.u32 %p4, %r12, 0; @%p4 bra SPIN; END: {between}"
    "\n{back}"
)
SEEN = {
    "set": "red.relaxed.gpu.global.add.u32 [%rd5], 1;",
    "get": "ld.relaxed.gpu.global.u32 %r12, [%rd5];",
    "between": "",
    "back": "setp.eq.and.u32 %p3, %r10, 1, %p2; @%p3 st.global.u32 [%rd5], 9;",
}
RESET_UNSEEN = "write without order after an atomic in another block"
UNSEEN = {RESET_UNSEEN, "atomic without order after a write in another block"}


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_weak_store_follows_the_strong_writes_that_its_thread_saw(schedule: Schedule) -> None:
    """As where FlashInfer's W4A16 experts give the lock of a split depth back."""

    def kinds(as_gpus: bool = False, **parts: str) -> set[str]:
        body = TURN.format(**{**SEEN, **parts})
        return races(body, threads=64, blocks=2, schedule=schedule, as_gpus=as_gpus).kinds

    other_warp = SEEN["back"].replace("%p2", "%p4")
    other_warp = f"setp.eq.u32 %p4, %r0, 32; {other_warp}"
    for as_gpus in (False, True):
        assert kinds(as_gpus) == set()
        assert kinds(as_gpus, back=other_warp, between="bar.sync 0;") == set()
        # a thread that nothing orders after the one that saw it
        assert kinds(as_gpus, back=other_warp) & UNSEEN
        # nobody saw it
        assert kinds(as_gpus, get="mov.u32 %r12, 1;") & UNSEEN
        # one that adds after it was seen
        assert kinds(as_gpus, set=f"{SEEN['set']} nanosleep.u32 900;{SEEN['set']}") & UNSEEN


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_strong_store_hides_the_atomics_before_it(schedule: Schedule) -> None:
    """Block 0 adds, block 1 stores without having read that, and block 2 sees what block 1 stored.

    GPUs order strong writes of one place as they come, and the model does not.
    """
    body = (
        "@!%p2 bra END; setp.eq.u32 %p3, %r10, 2; @%p3 bra SPIN; setp.eq.u32 %p3, %r10, 1;"
        "@%p3 bra STORE; red.relaxed.gpu.global.add.u32 [%rd5], 1;"
        "\nst.relaxed.gpu.global.u32 [%rd5+64], 1; bra END;"
        "STORE: ld.relaxed.gpu.global.u32 %r12, [%rd5+64]; setp.eq.u32 %p4, %r12, 0;"
        "@%p4 bra STORE;\nst.relaxed.gpu.global.u32 [%rd5], 2; bra END;"
        "SPIN: ld.relaxed.gpu.global.u32 %r12, [%rd5]; setp.ne.u32 %p4, %r12, 2; @%p4 bra SPIN;"
        "\nst.global.u32 [%rd5], 0; END:"
    )
    for as_gpus, kinds in ((False, {RESET_UNSEEN}), (True, set())):
        result = races(body, threads=32, blocks=3, schedule=schedule, as_gpus=as_gpus)
        assert result.kinds == kinds


def test_volatile_data_races_but_a_volatile_flag_in_a_loop_does_not() -> None:
    both = "@%p2 st.volatile.global.b32 [%rd5+64], %r10;"
    (race,) = races(both, blocks=2).outcome.races
    assert race.kind == "write without order after a write in another block"
    mixed = (
        "@!%p2 bra END; setp.eq.u32 %p3, %r10, 0; {fence} @%p3 st.volatile.global.b32 [%rd5], 1;"
        "@!%p3 atom.global.exch.b32 %r5, [%rd5], 2; END:"
    )
    assert races(mixed.format(fence=""), blocks=2).outcome.races
    assert races(mixed.format(fence="membar.gl;"), blocks=2).outcome.races == [], "an unlock"
    read = "@%p2 ld.volatile.global.b32 %r5, [%rd5+64]; @%p1 st.volatile.global.b32 [%rd5+64], 1;"
    assert races(read, blocks=2).kinds == {"write without order after a read in another block"}


def test_blocks_that_write_one_word() -> None:
    (race,) = races("@%p2 st.global.b32 [%rd5+8], %r9;", blocks=2).outcome.races
    assert race.kind == "write without order after a write in another block"
    assert (race.memory, race.offset) == ("words", 8)
    assert races("@%p2 st.global.b32 [%rd5+8], 1;", blocks=2).outcome.races == []


def test_a_wait_at_an_mbarrier_before_it_is_initialised() -> None:
    body = (
        "mov.b32 %r12, dynamic; @%p1 mbarrier.init.shared.b64 [%r12], 1; {} "
        "setp.eq.u32 %p3, %r0, 32; @%p3 mbarrier.arrive.shared.b64 _, [%r12];"
    )
    assert races(body.format("bar.sync 0;"), threads=64).outcome.races == []
    (race,) = races(body.format(""), threads=64).outcome.races
    assert race.kind == "use of an mbarrier without order after a write"


def test_a_loop_of_atomics_that_change_nothing_is_no_deadlock() -> None:
    """A maximum that is reached: no memory changes for many turns, but the loop counts."""
    body = (
        "mov.u32 %r12, 0; AGAIN: atom.global.max.u32 %r13, [%rd5], 0; add.u32 %r12, %r12, 1;"
        "setp.lt.u32 %p3, %r12, 200; @%p3 bra AGAIN; mov.b32 %r5, %r12;"
    )
    for schedule in ALL:
        assert races(body, schedule=schedule).outcome.instructions > 800
    with pytest.raises(Deadlock, match="warp 0 spins"):
        races(body.replace("add.u32 %r12, %r12, 1;", ""))


def test_all_lanes_may_initialise_an_mbarrier_alike() -> None:
    body = "mov.b32 %r12, dynamic; mbarrier.init.shared.b64 [%r12], {};"
    assert races(body.format("1")).outcome.races == []
    assert races("add.u32 %r13, %r0, 1;" + body.format("%r13")).kinds == {IN_WARP}


def test_what_a_thread_hands_over_later_includes_what_it_did_before() -> None:
    watch, lane = Races(64, 2), np.array([3])
    first, later = watch.released(0, lane), watch.released(0, lane)
    assert joined((first, later)) is later
    assert joined((later, first)) is later
    watch.acquire(1, first)
    known = watch.knows[1]
    watch.acquire(1, first, lane)
    assert watch.knows[1] is known, "nothing is new"
    watch.acquire(1, later, lane)
    assert watch.knows[1] is not known
    other = watch.released(0, np.array([4]))
    assert joined((later, other)).seen[0][3:5].tolist() == [2, 3]


def test_what_one_of_two_threads_hands_over_later_lacks_what_the_other_knew() -> None:
    watch, number = Races(64, 2), 40
    watch.acquire(0, watch.released(1, np.array([number - 32])), np.array([4]))
    both, later = watch.released(0, np.array([3, 4])), watch.released(0, np.array([3]))
    assert (both.seen[0][number], later.seen[0][number]) == (1, 0)
    for clocks in (joined((both, later)), joined((later, both))):
        assert clocks.seen[0][[3, 4, number]].tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("takes", "found"),
    [
        ("atom.acquire.gpu.global.add.u32 %r13, [%rd5], 0;", set()),
        ("atom.global.add.u32 %r13, [%rd5], 0;", set()),
        ("red.global.add.u32 [%rd5], 0;", {IN_GRID}),
    ],
)
def test_a_reduction_is_no_read_and_acquires_nothing(takes: str, found: set[str]) -> None:
    body = (
        "setp.ne.u32 %p3, %r10, 0; @!%p2 bra END; @%p3 bra TAKE;"
        "st.global.u32 [%rd5+4], 7; membar.gl; red.global.add.u32 [%rd5], 1; bra END;"
        f"TAKE: {takes} ld.global.u32 %r5, [%rd5+4]; END:"
    )
    assert races(body, blocks=2, as_gpus=True).kinds == found
