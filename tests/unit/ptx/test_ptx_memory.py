"""Loads, stores and atomics: what they do, and what they may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.ptx import accesses, api
from builder.ptx.grid import Schedule
from builder.ptx.machine import Fault, PtxError
from builder.ptx.memory import Region
from tests.unit.ptxworld import IN, run

PLACE = "mov.b32 %r9, dynamic; shl.b32 %r10, %r0, 4; add.s32 %r9, %r9, %r10;"


def test_vectors_and_parts_of_words_through_shared_memory() -> None:
    given = np.arange(128, dtype=np.uint32).reshape(32, 4) * 0x01010101
    body = (
        f"{PLACE} st.shared.v4.b32 [%r9], {{%r1, %r2, %r3, %r4}};"
        "ld.shared.v2.b32 {%r5, %r6}, [%r9+8]; ld.shared.b16 %rs1, [%r9+4]; cvt.u32.u16 %r7, %rs1;"
        "ld.shared.s8 %r8, [%r9+12];"
    )
    out = run(body, given).out
    assert (out[:, :2] == given[:, 2:]).all()
    assert (out[:, 2] == given[:, 1] & 0xFFFF).all()
    assert (
        out[:, 3] == (given[:, 3] & 0xFF).astype(np.uint8).view(np.int8).astype(np.uint32)
    ).all()


def test_a_byte_of_a_wider_register_is_stored_alone() -> None:
    body = f"{PLACE} st.shared.b32 [%r9], %r1; st.shared.u8 [%r9+1], %r2; ld.shared.b32 %r5, [%r9];"
    assert run(body, [[0x11223344, 0xABCD]]).out[0, 0] == 0x1122CD44


def test_uninitialised_memory_is_nan() -> None:
    found = run("mov.b32 %r9, dynamic; ld.shared.b32 %r5, [%r9];", watch=True)
    assert np.isnan(found.floats()).all()
    assert found.kinds == {"read of uninitialised memory"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ld.global.b32 %r5, [%rd1+512];", "outside every buffer; the nearest is in"),
        ("ld.global.b32 %r5, [%rd1+2];", "is not a multiple of 4"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd1+8];", "is not a multiple of 16"),
        ("st.global.b32 [%rd1], %r1;", "a write to in at"),
        ("ld.shared.b32 %r5, [dynamic+8192];", "shared memory offset 8192 (4 bytes) is outside"),
        ("mov.b32 %r9, 512; ld.shared.b32 %r5, [%r9];", "shared memory offset -512"),
        ("ld.shared.b64 %rd5, [dynamic+4];", "shared memory offset 4 is not a multiple of 8"),
        ("atom.global.add.u32 %r5, [%rd1], 1;", "a write to in at"),
    ],
)
def test_an_invalid_address_is_a_fault_with_its_line(body: str, words: str) -> None:
    with pytest.raises(Fault) as caught:
        run(f"\n{body}")
    assert str(caught.value).startswith("PTX line 12, block 0,0,0, warp 0: "), caught.value
    assert words in str(caught.value)


def atomics(body: str, first: int, width: int = 4) -> tuple[list[int], int]:
    """What each lane got, and what is left."""
    cell = np.zeros(8, np.uint8)
    cell.view(f"u{width}")[0] = first
    region = Region(0x200000, cell, True, "cell")
    out = run(f"mov.b64 %rd5, 0x200000; {body}", memory=(region,)).out
    return out[:, 0].tolist(), int(cell.view(f"u{width}")[0])


def test_atomics_happen_lane_by_lane() -> None:
    assert atomics("atom.global.add.s32 %r5, [%rd5], 2;", 10) == (
        [10 + 2 * n for n in range(32)],
        74,
    )
    got, left = atomics("atom.global.cas.b32 %r5, [%rd5], %r0, 9;", 0)
    assert (got[:2], left) == ([0, 9], 9)
    assert atomics("atom.global.exch.b32 %r5, [%rd5], %r0;", 7)[1] == 31
    assert atomics("red.global.max.s32 [%rd5], %r0;", 0xFFFFFFFF)[1] == 31
    assert atomics("red.global.min.s32 [%rd5], %r0;", 0xFFFFFFFF)[1] == 0xFFFFFFFF
    assert atomics("red.global.min.u32 [%rd5], %r0;", 0xFFFFFFFF)[1] == 0
    assert atomics("red.relaxed.gpu.global.add.u64 [%rd5], %rd5;", 0, 8)[1] == 32 * 0x200000


def test_a_bf16_atomic_rounds_each_sum() -> None:
    """256 + 1 is a tie in bfloat16, and rounds down to the even 256, every time."""
    body = "mov.b32 %r9, 0x3F803F80; red.relaxed.gpu.global.add.noftz.bf16x2 [%rd5], %r9;"
    assert atomics(body, 0x43804380)[1] == 0x43804380
    assert atomics(body, 0x00000000)[1] == 0x42004200, "32 ones are 32"


def reduced(body: str) -> tuple[list[int], int]:
    """What is left of 64 words, and how many of them changed, as the grid counts."""
    cells = np.arange(64, dtype=np.uint32) * np.uint32(0x3F810101) + np.uint32(0x7F7FC1FF)
    cells[5] = 0x7FC0FF80  # a NaN and an infinity
    region = Region(0x200000, cells.view(np.uint8), True, "cells")
    words = np.random.default_rng(3).integers(0, 2**32, (32, 2))
    words[:4] = 0, 0x80008000
    found = run(body, words, memory=(region,))
    return cells.tolist(), found.outcome.instructions


@pytest.mark.parametrize("kind", ["add.noftz.bf16x2", "add.u32"])
@pytest.mark.parametrize(
    ("step", "vector", "lanes"),
    [(4, "%r1", "@%p1"), (8, ".v2", ""), (8, "%r1", "@%p1")],
    ids=["side by side", "vectors", "apart"],
)
def test_a_reduction_at_once_gives_what_lane_after_lane_gives(
    kind: str, step: int, vector: str, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, dot, form = kind.rpartition(".")
    op, value = (f"{name}.v2{dot}{form}", "{%r1, %r2}") if vector == ".v2" else (kind, vector)
    body = (
        f"mul.wide.u32 %rd6, %r0, {step}; mov.b64 %rd5, 0x200000; add.s64 %rd5, %rd5, %rd6;"
        f"setp.ne.u32 %p1, %r0, 3; {lanes} red.relaxed.gpu.global.{op} [%rd5], {value};"
    )
    if op == "add.v2.u32":
        body = body.replace("add.v2.u32", "add.u32").replace(value, "%r1")
    at_once = reduced(body)
    turns = []

    def by_lane(at: Any) -> Any:
        turns.append(len(at))
        yield from (np.array([lane]) for lane in range(len(at)))

    monkeypatch.setattr(accesses, "_turns", by_lane)
    assert reduced(body) == at_once
    assert turns


@pytest.mark.parametrize("hint", [False, True])
def test_a_reduction_of_a_vector_is_one_of_each_element(*, hint: bool) -> None:
    policy = "createpolicy.fractional.L2::evict_last.b64 %rd6, 1.0;" if hint else ""
    form = "red.global.add.noftz.v4.bf16x2"
    form = f"{form}.L2::cache_hint" if hint else form
    body = (
        f"mov.b32 %r9, 0x3F803F80; mov.b32 %r10, 0x40004000; {policy}"
        f"{form} [%rd5], {{%r9, %r10, %r9, %r10}}{', %rd6' if hint else ''};"
    )
    cell = np.zeros(16, np.uint8)
    region = Region(0x200000, cell, True, "cell")
    run(f"mov.b64 %rd5, 0x200000; {body}", memory=(region,))
    assert cell.view(np.uint32).tolist() == [0x42004200, 0x42804280] * 2
    with pytest.raises(Fault, match=r"0x200004 is not a multiple of 16"):
        run(f"mov.b64 %rd5, 0x200004; {body}", memory=(region,))
    for form in ("red.global.add.noftz.v4.bf16x2 [%rd5], {%r9, %r10};",
                 "red.global.add.v8.f16x2 [%rd5], %r9;",
                 "atom.global.add.v2.f32 %r5, [%rd5], %r9;"):  # fmt: skip
        with pytest.raises(PtxError, match=rf"unknown instruction {form.split()[0]}"):
            run(form)


LOCAL = "{ .local .align 16 .b8 own[64]; .reg .b64 at; .reg .b64 generic;"


def test_each_thread_has_its_own_local_memory() -> None:
    body = (
        f"{LOCAL} mov.b64 at, own; cvta.local.u64 generic, at; add.u64 generic, generic, 16;"
        "cvta.to.local.u64 %rd5, generic; st.local.v2.b32 [%rd5], {%r0, %r1}; add.s32 %r1, %r1, 1;"
        "setp.lt.u32 %p1, %r0, 4; @%p1 st.local.u8 [own+16], %r1;"
        "ld.local.b32 %r5, [own+16]; ld.local.b32 %r6, [%rd5+4]; ld.local.u16 %rs1, [own];"
        "cvt.u32.u16 %r7, %rs1; }"
    )
    out = run(body, np.full((32, 1), 77)).out
    assert out[:, 0].tolist() == [78] * 4 + list(range(4, 32))
    assert set(out[:, 1]) == {77}
    assert set(out[:, 2]) == {0xFFFF}, "nobody wrote it"


@pytest.mark.parametrize("place", ["own+64", "own+61", "own+2", "own-4"])
def test_local_memory_has_bounds(place: str) -> None:
    with pytest.raises(Fault, match=r"outside the thread's 64 bytes, or not a multiple of 4"):
        run(f"{LOCAL} ld.local.b32 %r5, [{place}]; }}")


def test_lanes_read_different_buffers() -> None:
    other = np.arange(4, dtype=np.uint32)
    region = Region(0x300000, other.view(np.uint8), False, "other")
    body = (
        "setp.lt.u32 %p1, %r0, 4; mul.wide.u32 %rd6, %r0, 4; add.s64 %rd6, %rd6, 0x300000;"
        "selp.b64 %rd7, %rd6, %rd1, %p1; ld.global.b32 %r5, [%rd7];"
    )
    out = run(body, np.full((32, 1), 77), memory=(region,)).out
    assert out[:, 0].tolist() == [0, 1, 2, 3] + [77] * 28


def test_shared_memory_is_private_to_a_block() -> None:
    """A flag that the last block raises: all blocks are there at once, in every schedule."""
    cell = np.zeros(8, np.uint8)
    region = Region(0x200000, cell, True, "flag")
    body = (
        "mov.b64 %rd5, 0x200000; mov.u32 %r9, %ctaid.x; setp.eq.s32 %p1, %r9, 2;"
        "@!%p1 bra WAIT; st.global.release.gpu.s32 [%rd5], 1;"
        "WAIT: ld.global.acquire.gpu.s32 %r5, [%rd5]; setp.eq.s32 %p2, %r5, 0; @%p2 bra WAIT;"
    )
    for schedule in (Schedule(), Schedule("lazy"), Schedule("random", 3)):
        cell[:] = 0
        assert run(body, blocks=3, schedule=schedule, memory=(region,)).out[0, 0] == 1
    assert IN < 0x200000


#: Words 0 and 2 are written, and all four loaded.
WIDENED = """.version 9.0
.target sm_121a
.address_size 64
.visible .entry k(.param .u64 out)
{{
.reg .b32 %r<9>; .reg .b64 %rd<3>; .shared .align 16 .b8 place[32];
ld.param.u64 %rd1, [out]; mov.u32 %r1, 7; mov.u32 %r2, 0; mov.u32 %r4, 0;
st.shared.b32 [place], %r1; st.shared.b32 [place+8], %r1;
{pragma}
ld.shared.v4.b32 {{%r5, %r2, %r6, %r4}}, [place];
{more}
add.u32 %r5, %r5, %r6; st.global.u32 [%rd1], %r5; ret;
}}
"""
UNUSED = '.pragma "used_bytes_mask 0xf0f";'


def test_bytes_that_a_compiler_loads_but_does_not_use() -> None:
    """A load that was widened over another thread's words is no read of those."""

    def loaded(pragma: str, more: str = "") -> tuple[set[str], int]:
        out = np.zeros(1, np.uint32)
        result = api.run(WIDENED.format(pragma=pragma, more=more), "k", 1, 1, [out])
        return {race.kind for race in result.races}, int(result[out][0])

    uninitialised = "read of uninitialised memory"
    assert loaded(UNUSED) == (set(), 14)
    assert loaded("") == ({uninitialised}, 14)
    assert loaded('.pragma "used_bytes_mask 0xffff";') == ({uninitialised}, 14)
    assert loaded('.pragma "used_bytes_mask 0xf1f";') == ({uninitialised}, 14), "a byte is used"
    next_one = "ld.shared.v4.b32 {%r5, %r2, %r6, %r4}, [place];"
    assert loaded(UNUSED, next_one) == ({uninitialised}, 14), "it is for one load"
