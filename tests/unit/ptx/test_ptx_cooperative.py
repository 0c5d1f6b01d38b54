"""Cooperative launches: all blocks meet at a barrier of the grid, whose memory the driver has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.errors import UsageError
from builder.ptx import grid
from builder.ptx.api import run
from builder.ptx.machine import PtxError

#: What nvcc makes of ``this_grid().sync()`` between a store and a load of another block's: the
#: address is in two registers of the driver's, and the barrier four bytes behind it.
MEETS = """.version 8.8
.target sm_121a
.address_size 64
.visible .entry meets(.param .u64 middle, .param .u64 out, .param .u32 blocks)
{
  .reg .pred %p<6>; .reg .b32 %r<20>; .reg .b64 %rd<12>;
  ld.param.u64 %rd1, [middle]; ld.param.u64 %rd2, [out]; ld.param.u32 %r9, [blocks];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  setp.ne.u32 %p1, %r2, 0;
  @!%p1 st.global.u32 [%rd4], %r1;
  mov.u32 %r3, %envreg2; cvt.u64.u32 %rd6, %r3;
  mov.u32 %r4, %envreg1; cvt.u64.u32 %rd7, %r4;
  shl.b64 %rd7, %rd7, 32; or.b64 %rd8, %rd7, %rd6;
  setp.ne.s64 %p2, %rd8, 0; @%p2 bra MEET; trap;
MEET:
  {sync}
  add.u32 %r10, %r1, 1; rem.u32 %r10, %r10, %r9; mul.wide.u32 %rd9, %r10, 4;
  add.s64 %rd9, %rd1, %rd9;
  @!%p1 ld.global.u32 %r11, [%rd9];
  @!%p1 st.global.u32 [%rd5], %r11;
  ret;
}
"""
SYNC = """barrier.sync 0;
  @%p1 bra MET;
  mov.u32 %r5, %nctaid.x; setp.eq.u32 %p3, %r1, 0;
  sub.s32 %r6, -2147483647, %r5; selp.b32 %r6, %r6, 1, %p3;
  atom.add.release.gpu.u32 %r7, [%rd8+{at}], %r6;
AGAIN:
  ld.acquire.gpu.u32 %r8, [%rd8+{at}]; xor.b32 %r8, %r8, %r7;
  setp.gt.s32 %p4, %r8, -1; @%p4 bra AGAIN;
MET:
  barrier.sync 0;"""


def ran(sync: str, blocks: int = 40, **more: Any) -> Any:
    middle, out = np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32)
    result = run(MEETS.replace("{sync}", sync), "meets", blocks, 64, [middle, out, blocks], **more)
    return result, result[out].tolist()


def test_blocks_that_meet_read_what_the_others_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_RESIDENT", 8)  # of other launches
    result, values = ran(SYNC.replace("{at}", "4"))
    assert (result.races, result.faults, result.differ) == ((), (), False)
    assert values == [*range(1, 40), 0]
    twice = SYNC.replace("{at}", "4") + SYNC.replace("{at}", "4").replace("MET", "M2").replace(
        "AGAIN", "A2"
    )
    result, values = ran(twice)
    assert (result.races, result.faults, values) == ((), (), [*range(1, 40), 0])


def test_without_the_barrier_there_is_a_race() -> None:
    result, _ = ran("")
    assert {race.kind for race in result.races} >= {
        "read without order after a write in another block"
    }


def test_the_drivers_memory_ends_behind_the_barrier() -> None:
    result, _ = ran(SYNC.replace("{at}", "8"), 2)
    assert all("global address 0x100000000008 (4 bytes) is outside" in one for one in result.faults)
    assert len(result.faults) == 3


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises((PtxError, UsageError), match=r"4096 blocks, and \d+ fit"):
        ran(SYNC.replace("{at}", "4"), 4096, shared=200_000)
