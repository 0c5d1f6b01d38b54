"""Barriers, mbarriers, tensor copies: what waits, what deadlocks, what races."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from builder.ptx import grid
from builder.ptx.grid import Schedule
from builder.ptx.machine import SHARED_BASE, Deadlock, Fault
from builder.ptx.memory import GlobalMemory, Region, SharedMemory, TensorMap
from tests.unit.ptxworld import Result, run

EAGER, LAZY = Schedule("eager"), Schedule("lazy")
RANDOM = [Schedule("random", seed) for seed in range(6)]
ALL = [EAGER, LAZY, *RANDOM]

UNWRITTEN = "read of uninitialised memory"
EARLY_READ = "read without order after a write"
EARLY_WRITE = "write without order after a read"
TWICE = "write without order after a write"
UNFENCED = "asynchronous read of a write without fence.proxy.async"
REUSED = "write while a copy may still read"

# ----------------------------------------------------------------------------------- named barriers

#: Each warp writes its words, then reads those of its neighbour.
EXCHANGE = (
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 2; add.s32 %r11, %r9, %r10;"
    "\nst.shared.b32 [%r11], %r0;"
    "\n{barrier}"
    "\nxor.b32 %r12, %r10, 128; add.s32 %r12, %r9, %r12; ld.shared.b32 %r5, [%r12];"
)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_only_a_barrier_orders_accesses(schedule: Schedule) -> None:
    found = run(EXCHANGE.format(barrier="bar.sync 0;"), threads=64, schedule=schedule, watch=True)
    assert found.out[:, 0].tolist() == [n ^ 32 for n in range(64)]
    assert found.outcome.races == []
    other = run(
        EXCHANGE.format(barrier="barrier.sync.aligned 1, 64;"), threads=64, schedule=schedule,
        watch=True,
    )  # fmt: skip
    assert other.outcome.races == []


def test_without_a_barrier_the_race_is_reported_with_both_lines() -> None:
    found = run(EXCHANGE.format(barrier=""), threads=64, watch=True)
    races = {race.kind: race for race in found.outcome.races}
    assert set(races) == {UNWRITTEN, EARLY_READ, EARLY_WRITE}, "warp 0 goes first"
    race = races[EARLY_WRITE]
    assert (race.line, race.other, race.agents) == (12, 14, ("warp 1", "warp 0"))
    assert race.words == 32
    kinds = set().union(
        *(
            run(EXCHANGE.format(barrier=""), threads=64, schedule=s, watch=True).kinds
            for s in RANDOM
        )
    )
    assert EARLY_READ in kinds or EARLY_WRITE in kinds


def test_a_warp_that_only_arrives_does_not_wait() -> None:
    """The producer arrives, the consumer waits: ordered from the one to the other."""
    body = (
        "mov.b32 %r9, dynamic; setp.lt.u32 %p1, %r0, 32; @!%p1 bra CONSUMER;"
        "st.shared.b32 [%r9], 5; bar.arrive 2, 64; bra OUT;"
        "CONSUMER: bar.sync 2, 64; ld.shared.b32 %r5, [%r9]; OUT:"
    )
    found = run(body, threads=64, watch=True)
    assert set(found.out[32:, 0]) == {5}
    assert found.outcome.races == []
    with pytest.raises(Deadlock, match="warp 1 waits at barrier 2 at line 11"):
        run(body.replace("bar.arrive 2, 64;", ""), threads=64)
    other = run(body.replace("bar.arrive 2, 64;", "barrier.arrive 2, 64;"), threads=64, watch=True)
    assert set(other.out[32:, 0]) == {5}
    assert other.outcome.races == []


def test_lanes_that_a_guard_lets_wait() -> None:
    """They stay behind, and the others of their warp go on."""
    body = (
        "mov.b32 %r9, dynamic; setp.lt.u32 %p1, %r0, 16; st.shared.b32 [%r9], 1; bar.sync 1;"
        "@%p1 barrier.sync 2, 32; @%p1 bra READ; nanosleep.u32 9; st.shared.b32 [%r9], 2;"
        "barrier.arrive 2, 32; bra OUT; READ: ld.shared.b32 %r5, [%r9]; OUT:"
    )
    assert run(body).out[:16, 0].tolist() == [2] * 16


def test_invalid_barriers() -> None:
    with pytest.raises(Fault, match="barrier 3 wants 33 threads"):
        run("bar.sync 3, 33;")
    with pytest.raises(Fault, match="barrier 16: a block has 16"):
        run("bar.sync 16;")


# ---------------------------------------------------------------------------------------- mbarriers

WAIT = (
    "{{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{at}], {parity};"
    " @P bra DONE; bra AGAIN; DONE: }}"
)
#: Warp 0 initialises; warp 1 waits for what warp 0 writes, phase after phase.
PHASES = (
    "mov.b32 %r9, dynamic; mov.b32 %r5, 0; setp.eq.u32 %p1, %r0, 0;"
    "@%p1 mbarrier.init.shared.b64 [%r9], {count}; bar.sync 0;"
    "setp.lt.u32 %p2, %r0, 32; @!%p2 bra CONSUMER;"
    "\nst.shared.b32 [%r9+64], 3;"
    "\n{arrive}"
    "\nbra OUT;"
    "\nCONSUMER: {wait} ld.shared.b32 %r5, [%r9+64]; OUT:"
)


def phases(arrive: str, *, count: int = 32, parity: int = 0, schedule: Schedule = EAGER) -> Result:
    """Run it."""
    wait = WAIT.format(at="%r9", parity=parity)
    body = PHASES.format(count=count, arrive=arrive, wait=wait)
    return run(body, threads=64, schedule=schedule, watch=True)


ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r9];"


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_phase_completes_when_all_have_arrived(schedule: Schedule) -> None:
    found = phases(ARRIVE, schedule=schedule)
    assert set(found.out[32:, 0]) == {3}
    assert found.outcome.races == []
    one = "@%p1 mbarrier.arrive.shared.b64 _, [%r9], 5;"
    synchronised = f"bar.warp.sync 0xffffffff; {one}"
    assert phases(synchronised, count=5, schedule=schedule).outcome.races == []


def test_one_lane_that_arrives_hands_over_only_what_it_has_seen_of_its_warp() -> None:
    (race,) = phases("@%p1 mbarrier.arrive.shared.b64 _, [%r9], 5;", count=5).outcome.races
    assert (race.kind, race.line, race.other) == (EARLY_READ, 15, 12)
    assert race.missing.startswith("bar.warp.sync (__syncwarp) between line 12 in lane 31 and lane")


def test_a_missing_arrival_or_byte_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"warp 1 spins at line 15.*mbarrier at 0: phase 0, 1 arr"):
        phases(ARRIVE, count=33)
    with pytest.raises(Deadlock, match=r"mbarrier at 0: phase 0, 0 arrivals and 16 bytes missing"):
        phases("@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 16;", count=1)
    with pytest.raises(Deadlock, match="warp 1 spins"):
        phases("", schedule=RANDOM[0])


def test_many_warps_that_spin_are_a_deadlock_in_every_schedule() -> None:
    """A turn that ends between two looks at the mbarrier is no progress."""
    init = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [dynamic], 1; bar.sync 0;"
    for schedule in ALL:
        with pytest.raises(Deadlock, match="warp 8 spins"):
            run(init + WAIT.format(at="dynamic", parity=0), threads=288, schedule=schedule)


#: Of an mbarrier of three arrivals, by one lane.
STATES = (
    "mov.b32 %r9, dynamic; setp.eq.u32 %p1, %r0, 0; @!%p1 bra OUT;"
    "mbarrier.init.shared.b64 [%r9], 3;"
    "mbarrier.arrive.noComplete.shared.b64 %rd5, [%r9], 1; mbarrier.pending_count.b64 %r5, %rd5;"
    "mbarrier.arrive{drop}.shared.b64 %rd6, [%r9]; mbarrier.pending_count.b64 %r6, %rd6;"
    "mbarrier.test_wait.shared.b64 %p2, [%r9], %rd5; selp.b32 %r7, 1, 0, %p2;"
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 32; {bytes}"
    "mbarrier.try_wait.shared.b64 %p2, [%r9], %rd5; selp.b32 %r8, 1, 0, %p2;"
    "mbarrier.arrive.shared.b64 %rd6, [%r9]; mbarrier.pending_count.b64 %r10, %rd6;"
    "shl.b32 %r10, %r10, 8; or.b32 %r8, %r8, %r10; OUT:"
)
COMPLETE = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r9], 32;"


def test_states_of_arrivals_and_arrivals_that_count_for_all_later_phases() -> None:
    found = run(STATES.format(drop="", bytes=COMPLETE)).out[0]
    assert found.tolist() == [3, 2, 0, 3 << 8 | 1], "pending twice, not complete, complete"
    assert run(STATES.format(drop="_drop", bytes=COMPLETE)).out[0, 3] == 2 << 8 | 1
    with pytest.raises(Fault, match="excess arrivals"):
        run(STATES.format(drop="", bytes=""))
    with pytest.raises(Fault, match="noComplete that completes the phase"):
        run("mbarrier.init.shared.b64 [dynamic], 1;"
            "mbarrier.arrive.noComplete.shared.b64 %rd5, [dynamic], 1;")  # fmt: skip


def test_the_parity_identifies_the_phase() -> None:
    """Of an mbarrier whose first phase runs, that before counts as complete."""
    assert phases("", parity=1).kinds == {EARLY_READ}, "nobody waited"
    with pytest.raises(Deadlock, match="warp 1 spins at line 15"):
        phases(ARRIVE, parity=1)


def test_a_wait_for_an_invalid_parity() -> None:
    with pytest.raises(Fault, match="a wait for parity 5; 0 and 1 are valid"):
        run("mbarrier.init.shared.b64 [dynamic], 1;" + WAIT.format(at="dynamic", parity=5))


def test_an_arrival_with_count_zero() -> None:
    none = "mbarrier.init.shared.b64 [dynamic], 1; mov.b32 %r10, 0;"
    with pytest.raises(Fault, match="0 arrivals at once at an mbarrier"):
        run(f"{none} mbarrier.arrive.shared.b64 _, [dynamic], %r10;")


def test_too_many_arrivals_and_no_mbarrier() -> None:
    with pytest.raises(Fault, match="27 excess arrivals at the mbarrier at offset 0"):
        phases("mbarrier.arrive.shared.b64 _, [%r9], 32;", count=5)
    with pytest.raises(Fault, match="no mbarrier was initialised at offset 8"):
        run("mbarrier.arrive.shared.b64 _, [dynamic+8];")
    with pytest.raises(Fault, match="shared memory of block 221, but the cluster has 1"):
        run("mov.b32 %r10, 0xdeadbeef; mbarrier.arrive.shared.b64 _, [%r10];", watch=True)
    with pytest.raises(Fault, match="no mbarrier was initialised at offset"):
        run(WAIT.format(at="dynamic+8", parity=0), watch=True)
    with pytest.raises(Fault, match="an mbarrier with an expected count of 0"):
        run("mbarrier.init.shared.b64 [dynamic], 0;")


# ------------------------------------------------------------------------------------ tensor copies

TENSOR = 0x400000
CODE_U16, CODE_FP4, CODE_SPREAD = 1, 11, 12


def descriptor(
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    code: int = CODE_U16,
    swizzle: int = 0,
) -> bytes:
    """A tensor map as the host code of the CuTe DSL writes it."""
    words = [0] * 32
    words[0], words[2] = TENSOR, 2 | (len(dims) - 1) << 4 | code << 7 | swizzle << 13
    for n, stride in enumerate(strides):
        words[3 + n] = stride // 16
    for n, dim in enumerate(dims):
        words[8 + n] = dim - 1
    words[13] = box[0] - 1 << 24
    for n, size in enumerate(box[1:]):
        words[14] |= size - 1 << 8 * n
    return struct.pack("<32I", *words)


def rows(count: int, length: int) -> Any:
    """16-bit numbers, counted through."""
    return np.arange(count * length, dtype=np.uint16).reshape(count, length)


MORE = ", .param .align 64 .b8 p_map[128]"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    " [dynamic+1024], [%rd6, {{{x}, {y}}}], [dynamic];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {{{x}, {y}}}], [{at}];"
#: One lane loads a tile and all wait for it; each then has 4 words of it.
TILE = (
    "mov.b64 %rd5, p_map; cvta.param.u64 %rd6, %rd5; setp.eq.u32 %p1, %r0, 0;"
    "\n@%p1 mbarrier.init.shared.b64 [dynamic], 1;\n{fence} bar.sync 0; @!%p1 bra WAITING;"
    "mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], {bytes};"
    "\n{load}"
    "\nWAITING: {wait}"
    "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"
    "\nld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r9+1024];"
)


def load_tile(
    data: Any, tensor: bytes, *, x: int = 0, y: int = 0, size: int = 512, **options: Any
) -> Result:
    """Load a tile of 512 bytes."""
    wait = options.pop("wait", WAIT.format(at="dynamic", parity=0))
    fence = options.pop("fence", "fence.mbarrier_init.release.cluster;")
    body = TILE.format(bytes=size, load=LOAD.format(x=x, y=y), wait=wait, fence=fence)
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), False, "tensor")
    return run(body, more=MORE, extra=tensor, memory=(region,), **options)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_tile_is_zero_outside_the_tensor(schedule: Schedule) -> None:
    """A box of 16 columns by 16 rows at column 8, row -2 of a tensor of 20 by 40."""
    data = rows(40, 24)
    tensor = descriptor((20, 40), (48,), (16, 16))
    found = load_tile(data, tensor, x=8, y=-2, schedule=schedule, watch=True)
    assert found.outcome.races == []
    wanted = np.zeros((16, 16), np.uint16)
    wanted[2:, :12] = data[:14, 8:20]
    assert (found.out.view(np.uint16).reshape(16, 16) == wanted).all()


LOADS = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint",
    "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint",
    "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint",
)
ACQUIRE = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64"
RELEASE = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64"


@pytest.mark.parametrize(("rank", "name"), list(enumerate(LOADS, 2)))
def test_a_tile_of_more_dimensions_with_a_cache_hint(rank: int, name: str) -> None:
    """The last dimensions have one element; the hint changes nothing."""
    data, at = rows(40, 24), ", ".join(["8", "2", "0", "0"][:rank])
    tensor = descriptor((20, 40, 1, 1)[:rank], (48, 1920, 1920)[: rank - 1], (16, 16, 1, 1)[:rank])
    load = f"{name} [dynamic+1024], [%rd6, {{{at}}}], [dynamic], %rd7;"
    wait = WAIT.format(at="dynamic", parity=0)
    fence = "fence.mbarrier_init.release.cluster;"
    body = TILE.format(bytes=512, load=load, wait=wait, fence=fence)
    body = body.replace("mbarrier.try_wait.parity.shared.b64", ACQUIRE)
    body = body.replace("mbarrier.arrive.expect_tx.shared.b64", RELEASE)
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), False, "tensor")
    found = run(body, more=MORE, extra=tensor, memory=(region,), watch=True)
    assert found.outcome.races == []
    wanted = np.zeros((16, 16), np.uint16)
    wanted[:, :12] = data[2:18, 8:20]
    assert (found.out.view(np.uint16).reshape(16, 16) == wanted).all()


BYTES = (
    "mov.u64 %rd7, {source}; mov.b32 %r11, {size}; "
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [dynamic+{to}], [%rd7], "
    "%r11, [dynamic];"
)


def load_bytes(
    data: Any, source: int = TENSOR + 32, size: int = 512, to: int = 1024, **options: Any
) -> Result:
    """Copy bytes, 512 of which the threads read."""
    load = BYTES.format(source=source, size=size, to=to)
    wait = options.pop("wait", WAIT.format(at="dynamic", parity=0))
    body = TILE.format(
        bytes=512, load=load, wait=wait, fence="fence.mbarrier_init.release.cluster;"
    )
    tensor = descriptor((20, 40), (48,), (16, 16))
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), False, "tensor")
    return run(body, more=MORE, extra=tensor, memory=(region,), **options)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_bytes_that_are_copied_in_bulk(schedule: Schedule) -> None:
    data = rows(40, 24)
    found = load_bytes(data, schedule=schedule, watch=True)
    assert found.outcome.races == []
    assert (found.out.view(np.uint16).reshape(-1) == data.reshape(-1)[16:272]).all()


def test_bytes_that_are_copied_in_bulk_and_nobody_waits_for() -> None:
    races = load_bytes(rows(40, 24), wait="", watch=True).outcome.races
    assert "asynchronous copy" in str(races[0])


def test_bytes_that_cannot_be_copied_in_bulk() -> None:
    with pytest.raises(Deadlock, match="256 bytes missing"):
        load_bytes(rows(40, 24), size=256)
    wrong: list[tuple[dict[str, int], str]] = [
        ({"size": 520}, "a copy of 520 bytes .* not by 16"),
        ({"source": TENSOR + 8}, "not by 16"),
        ({"to": 1032}, "not by 16"),
        ({"source": TENSOR + 1904}, "outside every buffer"),
        ({"to": 1 << 20}, "a copy of 512 bytes to offset 1048576 of"),
    ]
    for given, words in wrong:
        with pytest.raises(Fault, match=words):
            load_bytes(rows(40, 24), **given)


@pytest.mark.parametrize("before", [0, 8, 40])
@pytest.mark.parametrize("at", [(0, 0), (16, 3), (-8, -2), (48, 30)])
def test_a_box_by_parts_is_the_box_byte_by_byte(
    at: tuple[int, int], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, over each edge; in memory that begins ``before`` bytes in front of it."""
    tensor = TensorMap(TENSOR, 16, 3, (64, 32), (128,), (64, 8))
    held = np.random.default_rng(1).integers(0, 256, before + 32 * 128 + 24).astype(np.uint8)
    box = np.arange(tensor.size, dtype=np.uint32).astype(np.uint8)

    def both_ways() -> list[bytes]:
        data = held.copy()
        memory = GlobalMemory([Region(TENSOR - before, data)])
        found, shared = tensor.gather(memory, at), SharedMemory(4096)
        tensor.scatter(memory, at, box)
        tensor.lay(shared, SHARED_BASE + 1024, box)
        taken = tensor.take(shared, SHARED_BASE + 1024)
        return [part.tobytes() for part in (found, data, shared.bytes, taken)]

    by_parts = both_ways()
    assert tensor._unit(at) == 16
    assert by_parts[1] != held.tobytes()
    places = tensor.place(SHARED_BASE + 1024) - SHARED_BASE
    assert np.frombuffer(by_parts[2], np.uint8)[places].tobytes() == box.tobytes()
    monkeypatch.setattr(TensorMap, "_unit", lambda _self, _at: 1)
    assert both_ways() == by_parts


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_copy_needs_an_initialised_mbarrier(schedule: Schedule) -> None:
    """The values are right without the fence; a device need not have seen the initialisation."""
    data, tensor = rows(16, 16), descriptor((16, 16), (32,), (16, 16))
    both = "fence.proxy.async.shared::cta;"
    assert load_tile(data, tensor, fence=both, schedule=schedule, watch=True).outcome.races == []
    (race,) = load_tile(data, tensor, fence="", schedule=schedule, watch=True).outcome.races
    assert race.kind == "asynchronous copy on an mbarrier without fence.mbarrier_init"
    assert (race.other, race.agents) == (12, ("asynchronous copy", "warp 0"))
    assert race.line > race.other


def test_bytes_outside_the_tensor_count_for_the_mbarrier() -> None:
    data, tensor = rows(4, 8), descriptor((8, 4), (16,), (16, 16))
    assert (load_tile(data, tensor, x=0, y=0).out[8:] == 0).all()
    with pytest.raises(Deadlock, match="bytes missing"):
        load_tile(data, tensor, size=528)


@pytest.mark.parametrize(("swizzle", "span"), [(1, 32), (2, 64), (3, 128)])
def test_swizzling_permutes_16_bytes_within_the_span(swizzle: int, span: int) -> None:
    """The ISA's figures: part p of row r (of the span) lies at p xor (address bits 7 and up)."""
    columns, count = span // 2, 512 // span
    data = rows(count, columns)
    tensor = descriptor((columns, count), (span,), (columns, count), swizzle=swizzle)
    found = load_tile(data, tensor).out.view(np.uint16).reshape(32, 8)
    plain = data.reshape(32, 8)
    for part in range(32):
        place = part ^ (part // 8 % 2**swizzle)
        assert (found[place] == plain[part]).all()
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, plain.tolist()))


def test_a_tensor_of_4_bit_codes() -> None:
    data = rows(16, 16)
    tensor = descriptor((64, 16), (32,), (64, 16), code=CODE_FP4)
    assert (load_tile(data, tensor).out.view(np.uint16).reshape(16, 16) == data).all()


@pytest.mark.parametrize("swizzle", [0, 3])
def test_4_bit_codes_that_are_spread(swizzle: int) -> None:
    """Of 16 bytes in shared memory the last 8 are padding, which does not count as transferred."""
    data = rows(8, 16)
    tensor = descriptor((64, 8), (32,), (64, 8), code=CODE_SPREAD, swizzle=swizzle)
    found = load_tile(data, tensor, size=256, watch=True)
    assert found.outcome.races == []
    parts, plain = found.out.view(np.uint64).reshape(32, 2)[:, 0], data.view(np.uint64).reshape(-1)
    order = [part ^ (part // 8 % 2**swizzle) for part in range(32)]
    assert (parts[order] == plain).all()
    with pytest.raises(Deadlock, match="256 bytes missing"):
        load_tile(data, tensor, size=512)


@pytest.mark.parametrize(
    ("word", "value", "words"),
    [
        (2, 3, "an unknown form"),
        (2, 2 | 1 << 4 | 1 << 7 | 1 << 11, "interleaved"),
        (13, 15 << 24 | 1, "element strides"),
    ],
)
def test_unsupported_tensor_maps(word: int, value: int, words: str) -> None:
    raw = list(struct.unpack("<32I", descriptor((16, 16), (32,), (16, 16))))
    raw[word] = value
    with pytest.raises(Fault, match=words):
        TensorMap.of(struct.pack("<32I", *raw))


def test_reading_a_tile_without_waiting() -> None:
    data, tensor = rows(16, 16), descriptor((16, 16), (32,), (16, 16))
    found = load_tile(data, tensor, wait="", schedule=EAGER, watch=True)
    assert found.kinds == {EARLY_READ}, "by luck the numbers are there"
    late = load_tile(data, tensor, wait="", schedule=LAZY, watch=True)
    assert UNWRITTEN in late.kinds
    assert EARLY_WRITE in late.kinds


#: Lanes write a tile, one of them stores it, then {after}.
PUT = (
    "mov.b64 %rd5, p_map; cvta.param.u64 %rd6, %rd5; mov.b32 %r9, dynamic;"
    "shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10; mov.b32 %r11, dynamic;"
    "\nst.shared.v4.b32 [%r9], {{%r1, %r2, %r3, %r4}};"
    "\n{fence} bar.sync 0; setp.eq.u32 %p1, %r0, 0;"
    "\n@%p1 " + STORE.format(x=0, y=0, at="%r11").replace("{0, 0}", "{{0, 0}}") + "\n{after}"
)
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 0; bar.sync 0;"
AGAIN = "\nst.shared.v4.b32 [%r9], {%r4, %r3, %r2, %r1};"
FENCE = "fence.proxy.async.shared::cta;"


def put(
    after: str,
    *,
    fence: str = FENCE,
    schedule: Schedule = EAGER,
    watch: bool = True,
    store: str = "st.shared.v4.b32",
) -> tuple[Any, Result]:
    """What is in the tensor, and the run."""
    data = np.zeros((32, 4), np.uint32)
    tensor = descriptor((16, 16), (32,), (16, 16))
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), True, "tensor")
    given = np.arange(128, dtype=np.uint32).reshape(32, 4)
    body = PUT.format(fence=fence, after=after).replace("st.shared.v4.b32", store)
    found = run(
        body, given, more=MORE, extra=tensor, memory=(region,), schedule=schedule, watch=watch
    )
    return data.reshape(-1).tolist(), found


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("read", ["", ".read"])
def test_a_store_that_is_waited_for(schedule: Schedule, read: str) -> None:
    data, found = put(DONE.format(read=read) + AGAIN, schedule=schedule)
    assert data == list(range(128))
    assert found.outcome.races == []
    assert found.outcome.unawaited == 0


def test_a_store_with_a_cache_hint_and_a_wait_for_its_source() -> None:
    plain = STORE.format(x=0, y=0, at="%r11")
    hinted = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
    wait = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; bar.sync 0;"
    data = np.zeros((32, 4), np.uint32)
    tensor = descriptor((16, 16), (32,), (16, 16))
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), True, "tensor")
    given = np.arange(128, dtype=np.uint32).reshape(32, 4)
    body = PUT.format(fence=FENCE, after=wait + AGAIN)
    assert body.count(plain) == 1
    body = body.replace(plain, f"{hinted} [%rd6, {{0, 0}}], [%r11], %rd7;")
    found = run(body, given, more=MORE, extra=tensor, memory=(region,), schedule=LAZY, watch=True)
    assert data.reshape(-1).tolist() == list(range(128))
    assert found.outcome.races == []


def test_a_store_without_a_wait_reads_later_values() -> None:
    """As the dense kernel of FlashInfer 0.6.9 does between two tiles."""
    data, found = put(AGAIN, schedule=EAGER)
    assert data == list(range(128)), "by luck"
    assert REUSED in found.kinds
    data, found = put(AGAIN, schedule=LAZY)
    assert data != list(range(128))
    assert found.outcome.unawaited == 1
    one_left = DONE.replace(" 0; bar", " 1; bar").format(read="")
    assert REUSED in put(one_left + AGAIN)[1].kinds, "one group may still be under way"


def test_a_missing_proxy_fence_is_reported_though_values_are_right() -> None:
    data, found = put(DONE.format(read=""), fence="")
    assert data == list(range(128))
    assert found.kinds == {UNFENCED}
    assert put(DONE.format(read=""), fence="fence.proxy.async.global;")[1].kinds == {UNFENCED}


def test_the_asynchronous_proxy_does_not_see_a_store_of_the_whole_warp_either() -> None:
    """Who knows one of its lanes knows it all; without the fence, the copy knows none."""
    words = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
    assert put(DONE.format(read=""), store=words)[1].kinds == set()
    assert put(DONE.format(read=""), store=words, fence="")[1].kinds == {UNFENCED}


UNWAITED = "bulk store that no thread waits for before its block ends"
OVERWRITTEN = "asynchronous write after a write without fence.proxy.async"


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_store_that_nobody_waits_for_before_the_block_ends(schedule: Schedule) -> None:
    (race,) = put("cp.async.bulk.commit_group;", schedule=schedule)[1].outcome.races
    assert (race.kind, race.line, race.other) == (UNWAITED, 14, 0)
    assert race.missing.startswith("cp.async.bulk.wait_group.read in the thread that started it")
    assert UNWAITED in put("", schedule=schedule)[1].kinds, "not even in a group"


def test_a_tile_that_is_loaded_over_what_threads_wrote() -> None:
    """The generic write is ordered before the copy, but the asynchronous proxy does not see it."""
    data, tensor = rows(32, 16), descriptor((16, 32), (32,), (16, 32))
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), True, "tensor")
    body = (
        "mov.b64 %rd5, p_map; cvta.param.u64 %rd6, %rd5; mov.b32 %r9, dynamic;"
        "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9], 1;"
        "@%p1 fence.mbarrier_init.release.cluster; shl.b32 %r10, %r0, 2; add.s32 %r10, %r10, %r9;"
        "st.shared.b32 [%r10+1024], 0; {fence} bar.sync 0;"
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 1024; @%p1 "
        + LOAD.format(x=0, y=0).replace("{0, 0}", "{{0, 0}}")
        + WAIT.format(at="%r9", parity=0).replace("{", "{{").replace("}", "}}")
        + "ld.shared.b32 %r5, [%r10+1024];"
    )
    for fence, kinds in ((FENCE, set()), ("", {OVERWRITTEN})):
        found = run(body.format(fence=fence), more=MORE, extra=tensor, memory=(region,), watch=True)
        assert found.kinds == kinds


def test_misplaced_tiles() -> None:
    data, tensor = rows(16, 16), descriptor((16, 16), (32,), (16, 16))
    with pytest.raises(Fault, match="not a multiple of 128"):
        put(STORE.format(x=0, y=0, at="%r11+64"))
    with pytest.raises(Fault, match="a tile of 512 bytes at offset 1024 of 1040 bytes"):
        load_tile(data, tensor, shared=1040)
    with pytest.raises(Fault, match="PTX line 14, block 0,0,0: global address"):
        load_tile(rows(4, 16), descriptor((16, 16), (32,), (16, 16)), schedule=LAZY)


def test_two_copies_to_the_same_address() -> None:
    data, tensor = rows(16, 16), descriptor((16, 16), (32,), (16, 16))
    twice = TILE.format(
        bytes=1024,
        load=2 * LOAD.format(x=0, y=0),
        wait=WAIT.format(at="dynamic", parity=0),
        fence="fence.mbarrier_init.release.cluster;",
    )
    region = Region(TENSOR, data.view(np.uint8).reshape(-1), False, "tensor")
    found = run(twice, more=MORE, extra=tensor, memory=(region,), watch=True)
    assert TWICE in found.kinds


def test_a_random_schedule_is_repeated_by_its_seed() -> None:
    counts = [
        phases(ARRIVE, schedule=Schedule("random", seed)).outcome.instructions
        for seed in (1, 1, 2, 3, 4)
    ]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1


def test_coverage_names_the_blocks_that_ran() -> None:
    body = "setp.eq.u32 %p1, %r0, 99; @%p1 bra NEVER; bra OUT; NEVER: trap; OUT:"
    outcome = run(body).outcome
    assert len(outcome.covered) == 3, "the head, the branch around, the end; not the trap"


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_an_endless_loop(schedule: Schedule) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "_ENDLESS", 100)
        with pytest.raises(Fault, match="a loop that does not end"):
            run("HERE: bra HERE;", schedule=schedule)


#: Warp 0 yields 200 times before it arrives; warp 1 waits, and does something before each try.
LATE = """mov.u32 %r9, dynamic; mov.u32 %r22, 0; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0; setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT;
mov.u32 %r20, 0;
MORE: nanosleep.u32 1; add.u32 %r20, %r20, 1; setp.lt.u32 %p4, %r20, 200; @%p4 bra MORE;
@%p1 mbarrier.arrive.shared.b64 _, [%r9]; bra END;
WAIT: {} mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; {}
END: mov.u32 %r5, %r22; mov.u32 %r6, 0; mov.u32 %r7, 0; mov.u32 %r8, 0;"""
COUNTS = "add.u32 %r22, %r22, 1;"


@pytest.mark.parametrize("back", ["@!%p3 bra WAIT;", "@%p3 bra END; bra WAIT;"])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule("lazy"), Schedule("random", 2)])
def test_a_warp_sleeps_while_it_only_waits(back: str, schedule: Schedule) -> None:
    sleeps = run(LATE.format("", back), threads=64, watch=True, schedule=schedule)
    works = run(LATE.format(COUNTS, back), threads=64, watch=True, schedule=schedule)
    tries = int(works.out[32, 0])
    assert tries > 20
    assert works.outcome.instructions - sleeps.outcome.instructions > 2 * tries
    assert not sleeps.outcome.races


def test_a_warp_that_sleeps_sees_that_its_mbarrier_is_gone() -> None:
    body = LATE.format("", "@!%p3 bra WAIT;").replace("arrive.shared.b64 _,", "inval.shared.b64")
    with pytest.raises(Fault, match="no mbarrier was initialised at offset 0"):
        run(body, threads=64)
