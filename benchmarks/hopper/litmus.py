"""Litmus tests of the PTX memory model on a GPU: outcomes that the model forbids must not occur.

    python3 -m benchmarks.hopper.litmus [--groups 16] [--rounds 100] [--dry]

It needs numpy and the NVIDIA driver.  Each thread of a shape runs in a block of its own, on
relaxed accesses at gpu scope.  A row says how often the weak outcome of a shape was seen with each
fence between the accesses of every thread; exit 1 if one was seen that the model forbids.  That a
permitted outcome was not seen says nothing: this GPU may never show it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.hopper.run import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
LANES = 256
#: Bytes between two instances: a cache line of each place.
STRIDE = 128
FENCES = ("", "fence.acq_rel.gpu", "fence.sc.gpu")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape: the accesses of each thread, its weak outcome, and the fences that forbid it."""

    name: str
    #: for each thread two accesses: ``("st", place, value)`` or ``("ld", place, register)``
    threads: tuple[tuple[tuple[str, int, int], ...], ...]
    #: the values of the registers, then those of both places at the end; -1 is any
    weak: tuple[int, ...]
    forbidden_by: tuple[str, ...]


def st(place: int, value: int = 1) -> tuple[str, int, int]:
    """A store."""
    return ("st", place, value)


def ld(place: int, register: int) -> tuple[str, int, int]:
    """A load."""
    return ("ld", place, register)


BOTH, SC = FENCES[1:], FENCES[2:]
#: The common shapes, with places x = 0 and y = 1; which fences forbid each outcome is in the
#: PTX ISA, "Memory Consistency Model", axioms "Fence-SC" and "Causality".
SHAPES = (
    Shape(name="MP", threads=((st(0), st(1)), (ld(1, 0), ld(0, 1))),
          weak=(1, 0, -1, -1, -1, -1), forbidden_by=BOTH),
    Shape(name="LB", threads=((ld(0, 0), st(1)), (ld(1, 1), st(0))),
          weak=(1, 1, -1, -1, -1, -1), forbidden_by=BOTH),
    Shape(name="SB", threads=((st(0), ld(1, 0)), (st(1), ld(0, 1))),
          weak=(0, 0, -1, -1, -1, -1), forbidden_by=SC),
    Shape(name="R", threads=((st(0), st(1)), (st(1, 2), ld(0, 0))),
          weak=(0, -1, -1, -1, -1, 2), forbidden_by=SC),
    Shape(name="2+2W", threads=((st(0), st(1, 2)), (st(1), st(0, 2))),
          weak=(-1, -1, -1, -1, 1, 1), forbidden_by=SC),
    Shape(name="IRIW",
          threads=((st(0),), (st(1),), (ld(0, 0), ld(1, 1)), (ld(1, 2), ld(0, 3))),
          weak=(1, 0, 1, 0, -1, -1), forbidden_by=SC),
    Shape(name="CoRR", threads=((st(0),), (ld(0, 0), ld(0, 1))),
          weak=(1, 0, -1, -1, -1, -1), forbidden_by=FENCES),
)  # fmt: skip


def body(shape: Shape, fence: str) -> str:
    """The accesses of all threads, each behind a branch on the number of its block in the group."""
    lines = []
    for number, accesses in enumerate(shape.threads):
        lines += [f"setp.ne.u32 %p, %role, {number};", f"@%p bra SKIP{number};"]
        for index, (kind, place, operand) in enumerate(accesses):
            if index and fence:
                lines.append(f"{fence};")
            where = f"[%at+{64 * place}]"
            if kind == "st":
                lines.append(f"st.relaxed.gpu.global.u32 {where}, {operand};")
            else:
                lines.append(f"ld.relaxed.gpu.global.u32 %v{operand}, {where};")
        lines += [f"st.global.u32 [%at+{8 + 4 * operand}], %v{operand};"
                  for kind, _, operand in accesses if kind == "ld"]  # fmt: skip
        lines.append(f"SKIP{number}:")
    return "\n".join(lines)


def kernel(shape: Shape, fence: str) -> str:
    """All rounds of a shape: the blocks of a group meet before each, and start at once."""
    threads = len(shape.threads)
    return f"""{HEAD}.visible .entry k(.param .u64 data, .param .u64 meet, .param .u32 rounds) {{
.reg .b32 %role, %group, %rounds, %round, %want, %seen, %lane, %t, %v<4>; .reg .pred %p;
.reg .b64 %at, %meet, %x, %step;
ld.param.u64 %at, [data]; ld.param.u64 %meet, [meet]; ld.param.u32 %rounds, [rounds];
mov.u32 %t, %ctaid.x; rem.u32 %role, %t, {threads}; div.u32 %group, %t, {threads};
mov.u32 %lane, %tid.x;
mul.wide.u32 %x, %group, 128; add.u64 %meet, %meet, %x;
mul.lo.u32 %t, %group, %rounds; mad.lo.u32 %t, %t, {LANES}, %lane;
mul.wide.u32 %x, %t, {STRIDE}; add.u64 %at, %at, %x;
mov.u64 %step, {LANES * STRIDE}; mov.u32 %round, 0;
NEXT:
bar.sync 0;
setp.ne.u32 %p, %lane, 0; @%p bra MET;
add.u32 %want, %round, 1; mul.lo.u32 %want, %want, {threads};
atom.global.gpu.relaxed.add.u32 %seen, [%meet], 1;
WAIT: ld.relaxed.gpu.global.u32 %seen, [%meet];
setp.lt.u32 %p, %seen, %want; @%p bra WAIT;
MET: bar.sync 0;
{body(shape, fence)}
add.u64 %at, %at, %step; add.u32 %round, %round, 1;
setp.lt.u32 %p, %round, %rounds; @%p bra NEXT;
ret; }}
"""


def weak_outcomes(shape: Shape, data: bytes) -> int:
    """How many instances ended in the weak outcome."""
    words = np.frombuffer(data, np.uint32).reshape(-1, STRIDE // 4)
    ended = words[:, [2, 3, 4, 5, 0, 16]]  # the registers, x, y: as ``body`` stores them
    wanted = np.array(shape.weak)
    return int(((ended == wanted) | (wanted == -1)).all(axis=1).sum())


def launched(cuda: Driver, ptx: str, blocks: int, size: int, rounds: int) -> bytes:
    """Run a kernel on cleared memory, and give its bytes."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
    cuda("cuModuleGetFunction", ctypes.byref(function), module, b"k")
    data, meet = (cleared(cuda, each) for each in (size, 128 * blocks))
    values = (data, meet, ctypes.c_uint32(rounds))
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
    cuda("cuLaunchKernel", function, blocks, 1, 1, LANES, 1, 1, 0, None, pointers, None)
    cuda("cuCtxSynchronize")
    out = ctypes.create_string_buffer(size)
    cuda("cuMemcpyDtoH_v2", out, data, ctypes.c_size_t(size))
    for memory in (data, meet):
        cuda("cuMemFree_v2", memory)
    cuda("cuModuleUnload", module)
    return out.raw


def cleared(cuda: Driver, size: int) -> ctypes.c_uint64:
    """Cleared memory on the GPU."""
    address = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    cuda("cuMemsetD8_v2", address, 0, ctypes.c_size_t(size))
    return address


def check(cuda: Driver, groups: int, rounds: int) -> int:
    """Print a row for each shape; how many forbidden outcomes were seen."""
    forbidden = 0
    size = groups * rounds * LANES * STRIDE
    print("| shape | runs | no fence | fence.acq_rel | fence.sc |\n|---|---|---|---|---|")
    for shape in SHAPES:
        cells = []
        for fence in FENCES:
            blocks = groups * len(shape.threads)
            seen = weak_outcomes(shape, launched(cuda, kernel(shape, fence), blocks, size, rounds))
            ruled_out = fence in shape.forbidden_by
            forbidden += seen if ruled_out else 0
            cells.append(f"{seen:,}" + (" (forbidden)" if ruled_out else ""))
        print(f"| {shape.name} | {groups * rounds * LANES:,} | {' | '.join(cells)} |")
    return forbidden


def main(words: Sequence[str] | None = None) -> None:
    """Run the litmus tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=16, help="groups of blocks in a launch")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each group")
    parser.add_argument("--dry", action="store_true", help="only print a kernel")
    given = parser.parse_args(words)
    if given.dry:
        print(kernel(SHAPES[2], FENCES[2]))
        return
    seen = check(Driver(), given.groups, given.rounds)
    print(f"forbidden outcomes: {seen}")
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
