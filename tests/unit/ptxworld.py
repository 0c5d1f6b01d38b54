"""Small kernels for the tests of the PTX executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from builder.ptx.block import Launch
from builder.ptx.grid import Grid, Outcome, Schedule
from builder.ptx.machine import Fault
from builder.ptx.memory import GlobalMemory, Region
from builder.ptx.program import Program
from builder.ptx.source import kernels_of

#: Where the input and the output of a kernel lie.
IN, OUT = 0x10000, 0x80000

_HEAD = """.version 9.1
.target sm_121a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 p_in, .param .u64 p_out{more})
{{
.reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<60>; .reg .f32 %f<20>; .reg .b64 %rd<20>;
"""
_BEGIN = """ld.param.u64 %rd1, [p_in]; ld.param.u64 %rd2, [p_out]; mov.u32 %r0, %tid.x;
mul.wide.u32 %rd3, %r0, 16; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
"""
_END = "\nst.global.v4.b32 [%rd2], {%r5, %r6, %r7, %r8};\nret;\n}\n"


@dataclass
class Result:
    """What a kernel left: its four output words by thread, and what the run showed."""

    out: Any
    outcome: Outcome

    def floats(self, word: int = 0) -> Any:
        """One output word as float32."""
        return np.ascontiguousarray(self.out[:, word]).view(np.float32)

    @property
    def kinds(self) -> set[str]:
        """Kinds of races that were found."""
        return {race.kind for race in self.outcome.races}


def source(body: str, more: str = "") -> str:
    """A kernel whose threads have their input in %r1 to %r4 and leave %r5 to %r8."""
    return _HEAD.format(more=more) + _BEGIN + body + _END


def run(
    body: str,
    given: Any = None,
    *,
    threads: int = 32,
    blocks: int = 1,
    cluster: int = 1,
    schedule: Schedule | None = None,
    watch: bool = False,
    as_gpus: bool = False,
    shared: int = 8192,
    more: str = "",
    extra: bytes = b"",
    memory: tuple[Region, ...] = (),
    fast: bool | None = None,
) -> Result:
    """Run a body; ``given`` is an array of words by thread, missing ones being zero.

    ``fast``: in the core in C, or without it; by default in both, which have to agree.
    """
    words = np.zeros((threads, 4), np.uint32)
    if given is not None:
        columns = np.asarray(given)
        columns = columns.view(np.uint32) if columns.dtype == np.float32 else columns
        columns = columns.reshape(len(columns), -1).astype(np.int64) & 0xFFFFFFFF
        words[: len(columns), : columns.shape[1]] = columns
    out = np.zeros((threads, 4), np.uint32)
    regions = [
        Region(IN, words.view(np.uint8).reshape(-1), False, "in"),
        Region(OUT, out.view(np.uint8).reshape(-1), True, "out"),
        *memory,
    ]
    (kernel,) = kernels_of(source(body, more)).values()
    parameters = IN.to_bytes(8, "little") + OUT.to_bytes(8, "little")
    parameters += bytes(kernel.parameter_bytes - len(parameters) - len(extra)) + extra
    launch = Launch((blocks, 1, 1), (threads, 1, 1), shared, parameters, (cluster, 1, 1))
    program = Program(kernel)

    def outcome(regions: list[Region], *, fast: bool) -> Outcome | Fault:
        memory = GlobalMemory(regions)
        grid = Grid(program, launch, memory, schedule, watch=watch, as_gpus=as_gpus, fast=fast)
        try:
            return grid.run()
        except Fault as fault:
            return fault

    before = [replace(one, data=one.data.copy()) for one in regions]
    found = outcome(regions, fast=fast is not False)
    if fast is None:
        plain = outcome(before, fast=False)
        assert str(found) == str(plain)
        assert all((a.data == b.data).all() for a, b in zip(regions, before, strict=True))
    if isinstance(found, Fault):
        raise found
    return Result(out, found)


def one(body: str, *given: int | float) -> int:
    """The first output word of a kernel of which every lane is given the same."""
    is_float = any(isinstance(value, float) for value in given)
    row = np.array([given], np.float32 if is_float else np.int64)
    found = run(body, np.repeat(row, 32, axis=0)).out[:, 0]
    assert (found == found[0]).all()
    return int(found[0])
