"""A warp that is late in FlashInfer's experts for many tokens: what the missing barrier can do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from builder.proof.kernels import Launched
from builder.proof.opening import target_of_plan
from builder.ptx.runs import program_of, run_once, schedules_of

from .mutated import LaunchedAlone

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from builder.ptx.launchfile import LaunchFile
    from tests.wheels.support import Planner

TOKENS, BEFORE = 40, 200
MANY = Launched(
    name="many",
    serves="nvfp4-moe",
    request={
        "kind": "moe-b12x",
        "tokens": [TOKENS],
        "experts": 4,
        "hidden": 512,
        "many": True,
        "sms": 2,
    },
)
READ, BARRIER = "ld.shared.s32", "bar.sync"
#: Warp 1 of block 0 goes round a loop that does nothing, before it reads the number of its batch.
LATE = """{ .reg .pred other, again; .reg .b32 mine, left;
mov.u32 mine, %tid.x; shr.u32 mine, mine, 5; xor.b32 mine, mine, 1;
mov.u32 left, %ctaid.z; or.b32 mine, mine, left; setp.ne.u32 other, mine, 0; mov.u32 left, 1000;
@other bra AWAKE;
ASLEEP: sub.u32 left, left, 1; setp.ne.u32 again, left, 0; @again bra ASLEEP;
AWAKE: }
"""


def left_over(rows: int) -> bytes:
    """Tokens of a launch with more of them, beyond those of this one."""
    return (BEFORE - 1 - np.arange(rows, dtype=np.int32) % (BEFORE - TOKENS)).tobytes()


def with_a_late_warp(launch: LaunchFile, *, barrier: bool) -> LaunchFile:
    """The launch after one with more tokens; with the layer's barrier behind the read or without.

    `token_map`, the parameter before the last, has the tokens that the earlier launch left there.
    """
    lines = launch.ptx.splitlines()
    at = next(
        n
        for n, line in enumerate(lines)
        if READ in line and all(BARRIER in "".join(lines[a:b]) for a, b in ((n - 9, n), (n, n + 6)))
    )
    after = next(n for n in range(at, at + 6) if BARRIER in lines[n])
    lines[at] = LATE + lines[at]
    lines[after] = lines[after] if barrier else ""
    address = int.from_bytes(launch.parameters[-2][:8], "little")
    memory = tuple(
        replace(one, data=left_over(len(one.data) // 4)) if one.address == address else one
        for one in launch.memory
    )
    return replace(launch, ptx="\n".join(lines), memory=memory)


def test_a_late_warp_writes_beyond_the_output_without_the_barrier(
    planned: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer 0.6.12; what is late is as right as what is not."""
    made = planned("pypi:vllm==0.23.0")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    alone = LaunchedAlone.of(target, MANY, tmp_path / "kept", monkeypatch)
    (schedule,) = schedules_of(("random:1",))
    faults = []
    for barrier in (True, False):
        launch = with_a_late_warp(alone.launch, barrier=barrier)
        single = run_once(launch, program_of(launch, tmp_path), schedule, watch=False)
        faults.append(single.run.fault or "")
    assert faults[0] == ""
    assert "moe_dynamic_kernel.py:2512" in faults[1]  # the scatter
    # behind the output there is no buffer, or one of the inputs: their addresses differ by run
    beyond = ("(16 bytes) is outside every buffer", "a write to memory-")
    assert any(words in faults[1] for words in beyond)
