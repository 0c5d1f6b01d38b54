"""Clusters of several blocks: their barrier, each other's shared memory, and what goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.errors import UsageError
from builder.ptx.api import Result, TensorMap, run
from builder.ptx.grid import Schedule
from builder.ptx.machine import Deadlock, Fault
from tests.unit.ptxworld import run as run_body

SCHEDULES = ("eager", "lazy", *(f"random:{seed}" for seed in range(1, 6)))
#: %r0 is a thread of its block, %r1 the block's rank, %r2 the next rank of two, %r3 the thread of
#: the grid, %rd2 its word of the output; ``data`` and ``bar`` are shared.
HEAD = """.version 9.0
.target sm_121a
.address_size 64
.visible .entry k(.param .u64 out{parameters}) {directives}
{{
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %rd<20>;
.reg .b128 %q<4>;
.shared .align 128 .b8 data[2048]; .shared .align 16 .b8 bar[64];
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
mov.u32 %r13, %cluster_nctarank; sub.u32 %r13, %r13, 1; min.u32 %r2, %r2, %r13;
mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mad.lo.u32 %r3, %r4, %r5, %r0;
ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r3, 4; add.s64 %rd2, %rd1, %rd2;
mov.u32 %r6, data; mov.u32 %r7, bar; shl.b32 %r8, %r0, 2; add.s32 %r9, %r6, %r8;
mapa.shared::cluster.u32 %r10, %r6, %r2; add.s32 %r11, %r10, %r8;
mapa.shared::cluster.u32 %r12, %r7, %r2; setp.eq.u32 %p1, %r0, 0; mov.u32 %r20, 0;
"""
END = "\nst.global.u32 [%rd2], %r20;\nret;\n}\n"
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
#: As compilers have it: only the initialisation of mbarriers is handed over.
MEET_RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r7], {count}; fence.mbarrier_init.release.cluster;"
WAIT = (
    "AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r7], 0;@!%p2 bra AGAIN;"
)


def cluster(
    body: str, *arrays: Any, threads: int = 32, blocks: int = 2, size: Any = 2,
    schedules: tuple[str, ...] = SCHEDULES, directives: str = "",
) -> tuple[Result, Any]:  # fmt: skip
    """Run a body; the result, and the output's words by block."""
    out = np.zeros((blocks, threads), np.uint32)
    more = "".join(
        f", .param .align 64 .b8 map{n}[128]"
        if isinstance(one, TensorMap)
        else f", .param .u64 a{n}"
        for n, one in enumerate(arrays)
    )
    text = HEAD.format(directives=directives, parameters=more) + body + END
    result = run(
        text, "k", blocks, threads, [out, *arrays], cluster=size, schedules=schedules
    )  # fmt: skip
    return result, result[out]


def kinds(result: Result) -> set[str]:
    """The kinds of the races."""
    return {race.kind for race in result.races}


#: Each block writes, and reads what its neighbour wrote.
EXCHANGE = "\nadd.s32 %r13, %r3, 100; st.shared.b32 [%r9], %r13; {first}\n{read} {last}"
READ = "ld.shared::cluster.u32 %r20, [%r11];"
GENERIC = (
    "cvt.u64.u32 %rd5, %r9; cvta.shared.u64 %rd5, %rd5; mapa.u64 %rd6, %rd5, %r2;"
    "ld.u32 %r20, [%rd6];"
)
NEIGHBOURS = np.arange(100, 164).reshape(2, 32)[::-1]


@pytest.mark.parametrize("read", [READ, GENERIC])
def test_a_block_reads_what_another_wrote(read: str) -> None:
    result, out = cluster(EXCHANGE.format(first=MEET, last=MEET, read=read))
    result.check()
    assert not result.differ
    assert (out == NEIGHBOURS).all()


def test_without_the_first_barrier_the_read_races() -> None:
    result, _ = cluster(EXCHANGE.format(first="bar.sync 0;", last=MEET, read=READ))
    assert "access to shared memory of a block that may not have begun" in kinds(result)
    assert {
        "read without order after a write in another block",
        "write without order after a read in another block",
    } & kinds(result)
    race = next(race for race in result.races if "without order" in race.kind)
    assert race.missing == (
        "a cluster barrier (barrier.cluster.arrive and .wait) or an mbarrier between the two blocks"
    )
    assert race.memory.startswith("shared memory of block ")
    relaxed = EXCHANGE.format(first=MEET_RELAXED, last=MEET, read=READ)
    assert kinds(cluster(relaxed)[0]), "a relaxed arrival hands over nothing"
    fenced = relaxed.replace(
        "barrier.cluster.arrive.relaxed", "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed"
    )
    assert not kinds(cluster(fenced)[0])
    narrow = fenced.replace("acq_rel.cluster", "acq_rel.cta")
    assert kinds(cluster(narrow)[0]), "a fence of one block"


def test_a_block_that_ends_while_another_reads() -> None:
    """A missing last barrier is a race in every schedule, and a fault where the block was gone."""
    result, _ = cluster(EXCHANGE.format(first=MEET, last="", read=READ))
    assert kinds(result) == {"end of the block without order after a read in another block"}
    slow = "setp.eq.u32 %p3, %r1, 1; @%p3 bra READS; nanosleep.u32 9; nanosleep.u32 9; READS:"
    result, _ = cluster(EXCHANGE.format(first=MEET, last="", read=slow + READ))
    assert (
        "shared memory of block 1,0,0, which has ended: it wants a cluster barrier"
        in result.faults[0]
    )
    assert "PTX line 18, block 0,0,0, warp 0" in result.faults[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier.cluster.wait;", "a wait at the cluster barrier without an arrival"),
        (f"barrier.cluster.arrive; {MEET}", "a second arrival at the cluster barrier"),
        (
            "mov.u32 %r13, 2; mapa.shared::cluster.u32 %r13, %r6, %r13;",
            "mapa to block 2 of a cluster",
        ),
        ("ld.shared.u32 %r20, [%r11];", "outside the block's 2112 bytes"),
        ("@%p1 barrier.cluster.arrive.aligned;", "by a part of a warp"),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r12];", "no mbarrier was initialised"),
    ],
)
def test_faults(body: str, message: str) -> None:
    result, _ = cluster(body)
    assert len(result.faults) == len(SCHEDULES)
    assert all(message in fault for fault in result.faults), result.faults


def test_a_barrier_that_a_block_does_not_reach_is_a_deadlock() -> None:
    body = "setp.eq.u32 %p3, %r1, 0; @%p3 bra WAITS; SPINS: bra SPINS; WAITS: " + MEET
    # the other block only waits for something that never comes
    body = body.replace("SPINS: bra SPINS;", INIT.format(count=1) + WAIT)
    result, _ = cluster(body)
    assert all(run.deadlock for run in result.runs)
    assert "block 0,0,0: warp 0 waits at the cluster barrier" in result.faults[0]
    ended = "setp.eq.u32 %p3, %r1, 0; @!%p3 bra OUT;" + MEET + "OUT:"
    cluster(ended)[0].check()  # threads that have ended are not waited for


#: The registers of a cluster, a decimal digit each.
NUMBER = (
    "mov.u32 %r13, %cluster_nctarank; mov.u32 %r14, %clusterid.x; mov.u32 %r15, %nclusterid.x;"
    "mad.lo.u32 %r20, %r13, 10, %r1; mad.lo.u32 %r20, %r20, 10, %r14;"
    "mad.lo.u32 %r20, %r20, 10, %r15; mov.u32 %r16, %cluster_ctaid.x;"
    "mad.lo.u32 %r20, %r20, 10, %r16; getctarank.shared::cluster.u32 %r17, %r10;"
    "mad.lo.u32 %r20, %r20, 10, %r17;"
)


def test_special_registers_and_directives() -> None:
    _, out = cluster(NUMBER, blocks=4)
    assert out[:, 0].tolist() == [200201, 210210, 201201, 211210]
    own = ".explicitcluster .reqnctapercluster 2, 1, 1"
    assert (cluster(NUMBER, blocks=4, size=None, directives=own)[1] == out).all()
    for size, directives, message in (
        (4, own, r"clusters of \(4, 1, 1\); k has \(2, 1, 1\)"),
        (None, ".explicitcluster", "k has .explicitcluster, and the launch no cluster"),
        (3, "", "is not of clusters of"),
        (9, "", "8 are the most"),
    ):
        with pytest.raises(UsageError, match=message):
            cluster(NUMBER, blocks=4, size=size, directives=directives)


def test_clusters_in_two_dimensions() -> None:
    text = (
        HEAD.format(directives="", parameters="")
        + (
            "mov.u32 %r13, %ctaid.y; mov.u32 %r14, %nctaid.x; mad.lo.u32 %r15, %r13, %r14, %r4;"
            "mul.wide.u32 %rd2, %r15, 4; add.s64 %rd2, %rd1, %rd2; mov.u32 %r16, %cluster_ctaid.y;"
            "shl.b32 %r16, %r16, 4; add.u32 %r20, %r1, %r16; mov.u32 %r17, %clusterid.y;"
            "shl.b32 %r17, %r17, 8; add.u32 %r20, %r20, %r17;"
        )
        + END
    )
    out = np.zeros((4, 4), np.uint32)
    result = run(text, "k", (4, 4), 1, [out], cluster=(2, 2))
    assert result[out].tolist() == [
        [row // 2 << 8 | row % 2 << 4 | row % 2 * 2 + column % 2 for column in range(4)]
        for row in range(4)
    ]


# -------------------------------------------------------------------- atomics, scopes and mbarriers

#: All threads of a cluster count in the memory of its first block.
COUNT = (
    "st.shared.b32 [%r9], 0; {first} mov.u32 %r13, 0; mapa.shared::cluster.u32 %r14, %r6, %r13;"
    "\natom.{order}.shared::cluster.add.u32 %r15, [%r14], 1; {last}"
    "ld.shared::cluster.u32 %r20, [%r14]; {last}"
)


def test_atomics_on_another_block() -> None:
    body = COUNT.format(first=MEET, last=MEET, order="relaxed.cluster")
    result, out = cluster(body)
    result.check()
    assert (out == 64).all()
    narrow, _ = cluster(COUNT.format(first=MEET, last=MEET, order="relaxed.cta"))
    (race,) = narrow.races
    assert (
        race.kind == "atomic without order after an atomic of too narrow a scope in another block"
    )
    assert cluster(body, blocks=4)[1].tolist() == [[64] * 32] * 4, "each cluster has its own"


@pytest.mark.parametrize(("size", "kinds_of"), [(2, set()), (1, {"of too narrow a scope"})])
def test_the_scope_of_a_cluster_on_global_memory(size: int, kinds_of: set[str]) -> None:
    body = "red.relaxed.cluster.global.add.u32 [%rd1], 1; bra OUT; OUT: add.s64 %rd2, %rd2, 4;"
    text = HEAD.format(directives="", parameters="") + body + END
    out = np.zeros(80, np.uint32)
    result = run(text, "k", 2, 32, [out], cluster=size)
    assert bool(result.races) == bool(kinds_of)
    assert all(word in race.kind for race in result.races for word in kinds_of)


#: Block 0 stores to block 1, whose threads wait for its arrival.
HAND_OVER = (
    INIT.format(count=32) + MEET_RELAXED + "setp.eq.u32 %p3, %r1, 1; @%p3 bra TAKES;"
    "\nst.shared::cluster.u32 [%r11], %r0;"
    "\nmbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [%r12]; bra OUT;"
    f"TAKES: {WAIT}"
    "\nld.shared.u32 %r20, [%r9]; OUT: " + MEET
)


def test_an_arrival_at_the_mbarrier_of_another_block() -> None:
    result, out = cluster(HAND_OVER.format(order="release"))
    result.check()
    assert out[1].tolist() == list(range(32))
    relaxed, _ = cluster(HAND_OVER.format(order="relaxed"))
    assert "read without order after a write in another block" in kinds(relaxed)
    unfenced = HAND_OVER.format(order="release").replace("fence.mbarrier_init.release.cluster;", "")
    assert "use of an mbarrier without order after a write in another block" in kinds(
        cluster(unfenced)[0]
    )
    late = HAND_OVER.format(order="release").removesuffix(MEET)
    assert kinds(cluster(late)[0]) == set(), "block 1 has waited for all that is done to it"


#: Each block sends its neighbour two words of each thread, which count for its mbarrier.
SEND = (
    INIT.format(count=1) + "\n{begin}\n@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], {bytes};"
    "add.s32 %r13, %r3, 7; shl.b32 %r14, %r0, 3; add.s32 %r15, %r10, %r14; add.s32 %r16, %r6, %r14;"
    "\nst.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r15], {{%r3, %r13}}, [%r12];"
    "\n{wait}\nld.shared.v2.u32 {{%r20, %r21}}, [%r16]; add.u32 %r20, %r20, %r21;" + MEET
)


def test_stores_that_count_for_an_mbarrier() -> None:
    result, out = cluster(SEND.format(begin=MEET_RELAXED, bytes=256, wait=WAIT))
    result.check()
    assert (out == 2 * np.arange(64).reshape(2, 32)[::-1] + 7).all()
    unwaited = cluster(SEND.format(begin=MEET_RELAXED, bytes=256, wait=""))[0]
    assert {
        "read of uninitialised memory", "read without order after a write in another block"
    } & kinds(unwaited)  # fmt: skip
    short = cluster(SEND.format(begin=MEET_RELAXED, bytes=264, wait=WAIT))[0]
    assert all(run.deadlock for run in short.runs)


#: All threads of a block add to the first word of its neighbour.
SUM = (
    INIT.format(count=1) + "mov.b32 %r13, 5; @%p1 st.shared.b32 [%r6], %r13;" + MEET
    + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128; add.s32 %r14, %r3, 1;"
    "\nred.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation} [%r10],"
    " %r14, [%r12];" + WAIT + "ld.shared.u32 %r20, [%r6];" + MEET
)  # fmt: skip
#: By operation, what the words 1 to 32, and 33 to 64, make of 5; None if their order matters.
SUMS = {
    "add.u32": (533, 1557), "add.s32": (533, 1557), "min.u32": (1, 5), "max.s32": (32, 64),
    "and.b32": (0, 0), "or.b32": (63, 127), "xor.b32": (37, 101),
}  # fmt: skip


@pytest.mark.parametrize("operation", SUMS)
def test_sums_that_count_for_an_mbarrier(operation: str) -> None:
    result, out = cluster(SUM.format(operation=operation))
    result.check()
    assert out[:, 0].tolist() == [*SUMS[operation][::-1]]
    early = SUM.format(operation=operation).replace(MEET + "@%p1", "bar.sync 0; @%p1")
    assert kinds(cluster(early)[0]), "nobody knows that the first word is there"


# ---------------------------------------------------------------------------------------- copies


#: Each block copies words of its own to its neighbour.
COPY = (
    INIT.format(count=1) + "add.s32 %r13, %r3, 7; st.shared.b32 [%r9+1024], %r13; {fence}"
    + MEET + "@!%p1 bra SENT; mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128;"
    "add.s32 %r14, %r6, 1024;"
    "\ncp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r14],"
    " 128, [{signal}]; SENT: bar.warp.sync -1;" + WAIT + "ld.shared.u32 %r20, [%r9];" + MEET
)  # fmt: skip


def test_a_copy_to_the_shared_memory_of_another_block() -> None:
    fence = "fence.proxy.async.shared::cta;"
    result, out = cluster(COPY.format(fence=fence, signal="%r12"))
    result.check()
    assert (out == np.arange(7, 71).reshape(2, 32)[::-1]).all()
    unfenced, _ = cluster(COPY.format(fence="", signal="%r12"))
    assert kinds(unfenced) == {"asynchronous read of a write without fence.proxy.async"}
    wrong, _ = cluster(COPY.format(fence=fence, signal="%r7"))
    assert "counts for an mbarrier of block 0,0,0" in wrong.faults[0]


#: The first block loads a tile for all blocks of the mask.
MULTICAST = (
    INIT.format(count=1) + "mov.u16 %h1, {mask};"
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128; mov.u64 %rd5, map0;"
    "cvta.param.u64 %rd5, %rd5; mov.u32 %r13, 0; {meet}"
    "setp.eq.and.u32 %p3, %r1, 0, %p1; @%p3 cp.async.bulk.tensor.2d.shared::cluster.global"
    ".mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd5, {{%r13, %r13}}], [%r7], %h1;"
    + WAIT + "ld.shared.u32 %r20, [%r9]; {last}"
)  # fmt: skip


def test_a_tile_for_several_blocks() -> None:
    words = np.arange(64, dtype=np.uint32).reshape(2, 32)
    words.flags.writeable = False
    tile = TensorMap(words, (1, 32))
    body = MULTICAST.format(mask=3, meet=MEET_RELAXED, last=MEET)
    result, out = cluster(body, tile)
    result.check()
    assert (out == words[0]).all()
    wrong, _ = cluster(body.replace("%h1, 3;", "%h1, 5;"), tile)
    assert "shared memory of block 2, but the cluster has 2" in wrong.faults[0]
    alone, _ = cluster(body.replace("%h1, 3;", "%h1, 1;"), tile)
    assert all(run.deadlock for run in alone.runs)
    early, _ = cluster(MULTICAST.format(mask=3, meet="", last=MEET), tile)
    assert early.faults or kinds(early), "nobody knows that the other mbarrier is there"


# -------------------------------------------------------------------------- clusterlaunchcontrol

#: A block does its own work, and that of blocks that it cancels.
STEAL = (
    INIT.format(count=1) + "bar.sync 0; mov.u32 %r22, %r4; mov.u32 %r23, 0; mov.u32 %r24, 0;"
    "WORK: mad.lo.u32 %r25, %r22, %r5, %r0; mul.wide.u32 %rd3, %r25, 4; add.s64 %rd3, %rd1, %rd3;"
    "add.u32 %r26, %r25, 1; st.global.u32 [%rd3], %r26;"
    "@!%p1 bra ASKED; mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 16;"
    "\nclusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{all}.b128"
    " [%r6], [%r7]; ASKED:"
    "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r7], %r23; @!%p2 bra AGAIN;"
    "ld.shared.b128 %q1, [%r6]; xor.b32 %r23, %r23, 1;"
    "\nclusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;"
    "{guard} clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128"
    " {{%r22, %r27, %r28, _}}, %q1;"
    "{fence} bar.sync 0; {more} @%p3 bra WORK; ret;"
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_launch_of_other_blocks_is_cancelled(schedule: str) -> None:
    body = STEAL.format(guard="@%p3", fence="fence.proxy.async.shared::cta;", more="", all="")
    result, out = cluster(body, blocks=6, size=None, schedules=(schedule,))
    result.check()
    assert (out == np.arange(1, 193).reshape(6, 32)).all()
    found = run_body("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1;".join(
        (".reg .b128 %q1; mov.u64 %rd5, 0; mov.b128 %q1, {%rd5, %rd5};", "selp.b32 %r5, 1, 0, %p1;")
    ))  # fmt: skip
    assert not found.out[:, 0].any()


def test_what_goes_wrong_with_cancelled_launches() -> None:
    fence = "fence.proxy.async.shared::cta;"
    first, _ = cluster(STEAL.format(guard="", fence=fence, more="", all=""), blocks=3, size=None)
    assert "the first block of a cluster that was not cancelled" in first.faults[0]
    again = STEAL.format(guard="@%p3", fence=fence, more="bra WORK;", all="")
    assert (
        "a try_cancel after one was seen to fail"
        in cluster(again, blocks=3, size=None)[0].faults[0]
    )
    unfenced = STEAL.format(guard="@%p3", fence="", more="", all="")
    result, _ = cluster(unfenced.replace("bar.sync 0;  @", " @"), blocks=3, size=None, threads=64)
    assert "write without order after a read" in kinds(result)


def test_the_core_and_the_reference_agree_on_clusters() -> None:
    body = (
        "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 2; add.s32 %r9, %r9, %r10;"
        f"st.shared.b32 [%r9], %r0; {MEET} ld.shared.u32 %r5, [%r9]; mov.u32 %r11, 1;"
        "mapa.shared::cluster.u32 %r12, %r9, %r11; ld.shared::cluster.u32 %r6, [%r12];"
        "st.shared.b32 [%r9], 3;"
    )
    for schedule in (Schedule(), Schedule("random", 2)):
        fast, plain = (
            run_body(body, blocks=2, cluster=2, watch=True, schedule=schedule, fast=fast)
            for fast in (True, False)
        )
        assert fast.outcome == plain.outcome
        assert "end of the block without order after a read in another block" in fast.kinds


def test_faults_of_a_launch_without_a_race_detector() -> None:
    with pytest.raises(Deadlock, match="block 0,0,0: warp 0 spins"):
        run_body("setp.eq.u32 %p1, %r0, 0; @%p1 barrier.cluster.arrive; @%p1 barrier.cluster.wait;"
                 "HERE: bar.warp.sync -1;")  # fmt: skip
    with pytest.raises(Fault, match="a wait at the cluster barrier without an arrival"):
        run_body("barrier.cluster.wait;", fast=False)
