"""Litmus tests of the PTX memory model, and the order that ``fence.sc`` makes.

The shapes are those that papers on memory models name: MP, SB, LB, R, 2+2W, IRIW, CoRR.  A thread
writes data with a weak store before its accesses, and another one reads it after its own.  What
the accesses saw decides whether the model orders the two: then there is no race, else there is one.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from builder.ptx.grid import Schedule
from builder.ptx.memory import Region
from tests.unit.ptx.test_ptx_races import ALL, BEGIN, DATA, IN_GRID, races
from tests.unit.ptxworld import run

if TYPE_CHECKING:
    from collections.abc import Callable

#: Two places that all access with strong instructions, and one with data.
X, Y, D = "[%rd5+128]", "[%rd5+132]", "[%rd5+64]"
MORE = 0x90000


def _store(place: str, value: int) -> str:
    return f"st.relaxed.gpu.global.b32 {place}, {value};"


def _load(place: str, register: str = "%r5") -> str:
    return f"ld.relaxed.gpu.global.b32 {register}, {place};"


_WRITES, _READS = f"\nst.global.b32 {D}, 1;", f"\nld.global.b32 %r7, {D};"


class Seen:
    """What threads read, by thread, and what is left in the two places."""

    def __init__(self, reads: list[tuple[int, int]], x: int, y: int) -> None:
        self.reads, self.x, self.y = reads, x, y


#: A shape: its threads, each with a place for a fence; whether ``fence.sc`` orders the data, and
#: whether ``fence.acq_rel`` does, by what was seen; and what no fence allows.
Shape = tuple[list[str], "Callable[[Seen], bool]", "Callable[[Seen], bool]"]
SHAPES: dict[str, Shape] = {
    "MP": (
        [_WRITES + "{F}" + _store(X, 1), _load(X) + "{F}" + _READS],
        lambda s: s.reads[1][0] == 1,
        lambda s: s.reads[1][0] == 1,
    ),
    "SB": (
        [_WRITES + _store(X, 1) + "{F}" + _load(Y), _store(Y, 1) + "{F}" + _load(X) + _READS],
        lambda s: s.reads[0][0] == 0,
        lambda s: False,
    ),
    "LB": (
        [_WRITES + _load(X) + "{F}" + _store(Y, 1), _load(Y) + "{F}" + _READS + _store(X, 1)],
        lambda s: s.reads[1][0] == 1,
        lambda s: s.reads[1][0] == 1,
    ),
    "R": (
        [_WRITES + _store(X, 1) + "{F}" + _store(Y, 1),
         _store(Y, 2) + "{F}" + _load(X) + _READS],
        lambda s: s.y == 2,
        lambda s: False,
    ),
    "2+2W": (
        [_WRITES + _store(X, 1) + "{F}" + _store(Y, 2),
         _store(Y, 1) + "{F}" + _store(X, 2) + _READS],
        lambda s: s.y == 1,
        lambda s: False,
    ),
    "IRIW": (
        [_WRITES + _load(X) + "{F}" + _load(Y, "%r6"),
         _load(Y) + "{F}" + _load(X, "%r6") + _READS,
         _store(X, 1), _store(Y, 1)],
        lambda s: s.reads[0][1] == 0 and s.reads[1][0] == 1,
        lambda s: False,
    ),
}  # fmt: skip
#: What ``fence.sc`` forbids in each shape.
FORBIDDEN: dict[str, Callable[[Seen], bool]] = {
    "MP": lambda s: False,
    "SB": lambda s: s.reads[0][0] == 0 and s.reads[1][0] == 0,
    "LB": lambda s: s.reads[0][0] == 1 and s.reads[1][0] == 1,
    "R": lambda s: s.y == 2 and s.reads[1][0] == 0,
    "2+2W": lambda s: s.y == 1 and s.x == 1,
    "IRIW": lambda s: s.reads[:2] == [(1, 0), (1, 0)],
}


def litmus(
    threads: list[str], fence: str, schedule: Schedule, order: list[int], *, apart: int = 0
) -> tuple[set[str], Seen]:
    """Run threads in blocks of their own, in an order; return the races and what was seen.

    ``apart``: each one first lets others run, so many times as there are threads before it.
    """
    words, more = np.zeros(64, np.uint32), np.zeros(1 << 16, np.uint8)
    body = BEGIN + "mov.b32 %r5, 0; mov.b32 %r6, 0; @!%p2 bra END;"
    for number, thread in enumerate(order):
        body += f"setp.eq.u32 %p3, %r10, {number}; @%p3 bra T{thread};"
    for thread, code in enumerate(threads):
        wait = _load("[%rd5+200]", "%r20") * (apart * order.index(thread))
        body += f"\nT{thread}: {wait} {code.format(F=fence)} bra END;"
    result = run(
        body + "END: add.s64 %rd2, %rd2, 0x10000;",
        blocks=len(threads),
        schedule=schedule,
        watch=True,
        memory=(
            Region(DATA, words.view(np.uint8), True, "words"),
            Region(MORE, more, True, "more"),
        ),
    )
    rows = more.view(np.uint32).reshape(-1, 4)
    reads = [(int(rows[32 * at][0]), int(rows[32 * at][1])) for at in np.argsort(order)]
    return result.kinds, Seen(reads, int(words[32]), int(words[33]))


SCHEDULES = [Schedule("eager"), Schedule("lazy"), *(Schedule("random", n) for n in range(3))]
SC = ("membar.gl;", "fence.sc.gpu;", "membar.sys;")


def _runs(name: str, fence: str) -> list[tuple[set[str], Seen]]:
    threads = SHAPES[name][0]
    orders = [[*range(len(threads))], [*range(len(threads))][::-1]]
    orders += [[0, 3, 2, 1]] if len(threads) == 4 else []
    return [
        litmus(threads, fence, schedule, order, apart=apart)
        for schedule, order, apart in product(SCHEDULES, orders, (0, 6))
    ]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fence", SC)
def test_fence_sc_orders_what_the_model_orders(name: str, fence: str) -> None:
    outcomes = set()
    for kinds, seen in _runs(name, fence):
        ordered = SHAPES[name][1](seen)
        outcomes.add(ordered)
        assert not FORBIDDEN[name](seen)
        assert (not kinds) == ordered, (kinds, vars(seen))
    assert outcomes == {True, False}, "a shape of which only one outcome was seen shows nothing"


@pytest.mark.parametrize("name", SHAPES)
def test_a_fence_of_release_and_acquire_orders_less(name: str) -> None:
    for kinds, seen in _runs(name, "fence.acq_rel.gpu;"):
        assert (not kinds) == SHAPES[name][2](seen), (kinds, vars(seen))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fence", ["", "membar.cta;", "fence.sc.cta;", "fence.sc.cluster;"])
def test_without_a_fence_that_reaches_the_other_block_nothing_is_ordered(
    name: str, fence: str
) -> None:
    assert all(kinds for kinds, _ in _runs(name, fence))


@pytest.mark.parametrize("name", SHAPES)
def test_fences_of_which_one_is_missing(name: str) -> None:
    """Every thread of a shape needs its fence."""
    for missing in range(2):
        threads = [
            code.replace("{F}", "") if at == missing else code
            for at, code in enumerate(SHAPES[name][0])
        ]
        order = [*range(len(threads))]
        assert all(litmus(threads, "membar.gl;", one, order)[0] for one in SCHEDULES)


def test_two_reads_of_one_place_do_not_go_back() -> None:
    """CoRR, with no fence at all."""
    threads = [_store(X, 1), _load(X) + _load(X, "%r6")]
    for schedule, order in product(SCHEDULES, ([0, 1], [1, 0])):
        kinds, seen = litmus(threads, "", schedule, order)
        assert kinds == set()
        assert seen.reads[1] != (1, 0)


#: Every thread of every block writes a word; the last block to count itself reads all of them.
LAST = (
    "mul.wide.u32 %rd6, %r9, 4; mov.u64 %rd7, 0x98000; add.s64 %rd7, %rd7, %rd6;"
    "\nst.global.b32 [%rd7], 9; {all_before} {first} @!%p2 bra MET; {one_before}"
    "atom.global.add.u32 %r12, [%rd5], 1; {one_after} mov.b32 %r13, dynamic;"
    "\nst.shared.b32 [%r13], %r12; MET: {second} mov.b32 %r13, dynamic;"
    "\nld.shared.b32 %r12, [%r13]; setp.ne.u32 %p3, %r12, 2; @%p3 bra END; {all_after}"
    "mov.u64 %rd7, 0x98000; xor.b32 %r14, %r0, 33; mul.wide.u32 %rd6, %r14, 4;"
    "add.s64 %rd7, %rd7, %rd6;"
    "\nld.global.b32 %r5, [%rd7]; ld.global.b32 %r6, [%rd7+256]; ld.global.b32 %r7, [%rd7+512];"
    "END:"
)
FORMS = [*product(("all_before", "one_before"), ("all_after", "one_after"))]


def _last(before: str, after: str, **parts: str) -> str:
    whole = dict.fromkeys(("all_before", "one_before", "one_after", "all_after"), "")
    whole |= {"first": "bar.sync 0;", "second": "bar.sync 0;", before: "membar.gl;"}
    whole |= {after: "membar.gl;", **parts}
    return LAST.format(**whole)


def _kinds(body: str, schedule: Schedule) -> set[str]:
    return races(body, threads=64, blocks=3, schedule=schedule).kinds


@pytest.mark.parametrize("schedule", [*ALL[:3], Schedule("lazy")], ids=str)
@pytest.mark.parametrize(("before", "after"), FORMS)
def test_the_last_block_reads_what_all_blocks_wrote(
    before: str, after: str, schedule: Schedule
) -> None:
    """A sum over blocks: PyTorch's reductions have the form of a fence by all threads."""
    assert _kinds(_last(before, after), schedule) == set()
    for fence in SC[1:]:
        assert _kinds(_last(before, after, **{before: fence, after: fence}), schedule) == set()
    # release and acquire: only where the thread with the atomic has the fences
    weak = {before: "fence.acq_rel.gpu;", after: "fence.acq_rel.gpu;"}
    ordered = (before, after) == ("one_before", "one_after")
    assert _kinds(_last(before, after, **weak), schedule) == (set() if ordered else {IN_GRID})
    # without a part of it
    for none in (before, after, "first", "second"):
        assert _kinds(_last(before, after, **{none: ""}), schedule), none
    # of too narrow a scope, on one side or on both
    for narrow in ((before,), (after,), (before, after)):
        cut = dict.fromkeys(narrow, "membar.cta;")
        assert _kinds(_last(before, after, **cut), schedule) == {IN_GRID}
