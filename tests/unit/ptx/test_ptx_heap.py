"""Memory of the device's ``malloc``: what is freed and given again starts without history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from builder.ptx.block import Launch
from builder.ptx.grid import Grid, Schedule
from builder.ptx.memory import GlobalMemory, Region
from builder.ptx.program import Program
from builder.ptx.source import kernels_of

if TYPE_CHECKING:
    from builder.ptx.grid import Outcome

OUT, EAGER = 0x80000, Schedule("eager")
MODULE = """.version 9.1
.target sm_121a
.address_size 64
.extern .func (.param .b64 r) malloc (.param .b64 p);
.extern .func free (.param .b64 p);
.visible .entry k(.param .u64 p_out)
{{
.reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .shared .align 8 .b64 place;
ld.param.u64 %rd1, [p_out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r0, 0;
{body}
END: ret;
}}
"""


def malloc(size: int, register: str) -> str:
    """``register = malloc(size)``."""
    return (
        f"\nmov.u64 %rd9, {size}; {{ .param .b64 q; .param .b64 s; st.param.b64 [q], %rd9;"
        f" call.uni (s), malloc, (q); ld.param.b64 {register}, [s]; }}\n"
    )


def free(register: str) -> str:
    return f"\n{{ .param .b64 q; st.param.b64 [q], {register}; call.uni free, (q); }}\n"


def heap(
    body: str, *, threads: int = 32, blocks: int = 1, schedule: Schedule = EAGER
) -> tuple[Outcome, list[int]]:
    """Run a body; return the outcome, and the words that it left."""
    words = np.zeros(64, np.uint32)
    (kernel,) = kernels_of(MODULE.format(body=body)).values()
    launch = Launch((blocks, 1, 1), (threads, 1, 1), 0, OUT.to_bytes(8, "little"), (1, 1, 1))
    memory = GlobalMemory([Region(OUT, words.view(np.uint8), True, "out")])
    outcome = Grid(Program(kernel), launch, memory, schedule, watch=True).run()
    return outcome, words.tolist()


#: One lane allocates, writes and frees, and leaves the low bits of the address.
USE = (
    malloc(64, "%rd4")
    + "st.global.u32 [%rd4], %r1; ld.global.u32 %r5, [%rd4]; cvt.u32.u64 %r6, %rd4;"
    + "mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd5, %rd1; st.global.u32 [%rd5], %r6;"
    + free("%rd4")
)


@pytest.mark.parametrize("schedule", [EAGER, Schedule("lazy")], ids=str)
def test_blocks_that_get_the_same_memory_one_after_the_other(schedule: Schedule) -> None:
    outcome, words = heap("@!%p1 bra END;" + USE, blocks=3, schedule=schedule)
    assert len({*words[:3]}) == 1, "the address is the same each time"
    assert outcome.races == []


def test_lanes_that_get_the_same_memory_one_after_the_other() -> None:
    """Also where the second block is larger than the first, or smaller."""
    for size in (16, 64, 4096):
        body = "@!%p1 bra OTHER;" + USE + "bra END; OTHER: setp.ne.u32 %p2, %r0, 1; @%p2 bra END;"
        last = size - 4
        body += malloc(size, "%rd4") + f"st.global.u32 [%rd4+{last}], 1; st.global.u32 [%rd4], 1;"
        assert heap(body)[0].races == [], size


def shared(use: str, barrier: str) -> str:
    """One lane allocates for its block; every warp uses that, and a lane of the last frees it."""
    return (
        "@!%p1 bra MET;" + malloc(512, "%rd4") + "st.shared.b64 [place], %rd4; MET: bar.sync 0;"
        "ld.shared.b64 %rd4, [place]; mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd5, %rd4;"
        f"\n{use} {barrier} setp.eq.u32 %p1, %r0, 32; @!%p1 bra END;" + free("%rd4")
    )


@pytest.mark.parametrize("use", ["st.global.u32 [%rd5], %r0;", "ld.global.u32 %r5, [%rd5];"])
def test_memory_is_freed_after_all_accesses(use: str) -> None:
    assert heap(shared(use, "bar.sync 0;"), threads=64)[0].races == []
    bad, _ = heap(shared(use, ""), threads=64)
    noun = "write" if use.startswith("st") else "read"
    assert f"free without order after a {noun}" in {race.kind for race in bad.races}


def test_what_was_released_at_an_address_is_gone_with_it() -> None:
    """A flag in freed memory says nothing to who gets that memory next."""
    first = (
        malloc(64, "%rd4") + "\nst.global.u32 [%rd1+128], 7; membar.gl;"
        "st.relaxed.gpu.global.u32 [%rd4], 1;" + free("%rd4")
    )
    second = (
        malloc(64, "%rd4") + "ld.acquire.gpu.global.u32 %r5, [%rd4];"
        "\nld.global.u32 %r6, [%rd1+128];"
    )
    body = "@!%p1 bra END; setp.eq.u32 %p2, %r1, 1; @%p2 bra NEXT;" + first + "bra END; NEXT:"
    outcome, _ = heap(body + second, blocks=2)
    assert [race.kind for race in outcome.races] == [
        "read without order after a write in another block"
    ]
