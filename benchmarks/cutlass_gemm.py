"""FlashInfer's CUTLASS NVFP4 GEMM for SM12x, compiled from the wheel's sources, in the executor.

    python -m benchmarks.cutlass_gemm FLASHINFER --work WORK [--include FOLDER] [--tile 128x32x128]

FLASHINFER is the folder ``flashinfer`` of a release's wheel; ``nvcc`` must be on PATH, FOLDER has
headers that its toolkit lacks (curand), and no GPU is needed.  `cutlass_gemm.cu` is compiled with
them once (two minutes of processor time): the kernels' PTX, and a program that makes each launch
with FlashInfer's own host code (`cuda_host`).

Prints for each launch how many values differ from the exact ones, rounded once, and the races; and
how many of the barriers, waits and fences of a kernel nothing notices if left out (``--orders``);
or mutants drawn at random (``--mutants``).
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.cuda_host import Built, Compiler, add_options, placed
from benchmarks.mutants import Subject
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.launchfile import Array, LaunchFile
from builder.ptx.machine import E2M1, from_bf16, from_f16, to_bf16, to_f16
from builder.ptx.runs import program_of, run_once, schedules_of

if TYPE_CHECKING:
    from builder.ptx.memory import GlobalMemory

#: Scheduler, whether A and B are swapped, tokens, columns, depth, multiprocessors.
LAUNCHES = [
    *((s, w, 256, 264, 416, MULTIPROCESSORS) for s in ("dp", "streamk") for w in (False, True)),
    *((s, True, 1, 256, 1024, MULTIPROCESSORS) for s in ("dp", "streamk")),
    *((s, True, 24, 136, 4096, MULTIPROCESSORS) for s in ("dp", "streamk")),
    *((s, w, 384, 512, 256, 3) for s in ("dp", "streamk") for w in (False, True)),
]
#: What is left out: barriers, waits for an mbarrier and for stores, and fences.
ORDERS = re.compile(
    r"bar(?:rier)?\.sync\s[^;]*;|bra\s+LAB_WAIT;|cp\.async\.bulk\.wait_group[^;]*;"
    r"|fence\.proxy\.[^;]*;|fence\.mbarrier_init[^;]*;"
)
#: Codes of E2M1 whose sums, with scales that are powers of two, are exact in float32.
CODES, SCALES = np.array([0, 1, 2, 3, 4, 9, 10, 11, 12]), np.arange(-2, 3)
ALPHA, GROUP = 0.5, 16
#: The workspace's address.
WORKSPACE = 1 << 32


def build(compiler: Compiler, tile: str) -> Built:
    """Compile for a tile, unless that was done."""
    sizes = (f"-DTILE_{name}={size}" for name, size in zip("MNK", tile.split("x"), strict=True))
    return compiler.linked(
        tile, [compiler.compiled(tile, Path(__file__).with_suffix(".cu"), *sizes)]
    )


def packed(codes: Any) -> bytes:
    """Two codes a byte, the first in the low half."""
    return bytes((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).tobytes())


def unpacked(pairs: Any) -> Any:
    """The two codes of each byte, in rows."""
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1)


def ue4m3(powers: Any) -> Any:
    """Powers of two as bytes."""
    return powers + 7 << 3


def rounded(values: Any, *, f16: bool = False) -> Any:
    """To bfloat16 or float16, from float32: the bits."""
    singles = np.asarray(values).astype(np.float32)
    return (to_f16 if f16 else to_bf16)(singles).astype(np.uint16)


def numbers(bits: Any, *, f16: bool) -> Any:
    """The values of bits of bfloat16 or float16."""
    return (from_f16 if f16 else from_bf16)(bits).astype(np.float64)


def tiled(scales: Any, behind: int = 0) -> bytes:
    """Bytes in tiles of 128 rows and 4 columns that are 32 rows of 16 bytes; ``behind`` the last
    row and column is another byte.
    """
    rows, columns = (
        -(-size // unit) * unit for size, unit in zip(scales.shape, (128, 4), strict=True)
    )
    codes = np.full((rows, columns), behind, np.uint8)
    codes[: scales.shape[0], : scales.shape[1]] = scales
    return codes.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4).tobytes()


def untiled(codes: Any, columns: int) -> Any:
    """Bytes in such tiles by row and column; ``columns`` are a multiple of 4."""
    tiles = codes.reshape(-1, columns // 4, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, columns)


@dataclass(frozen=True)
class Case:
    """A launch on exact operands, and the exact result as bits of bfloat16."""

    file: LaunchFile
    exact: Any

    def wrong(self, memory: GlobalMemory) -> int:
        """How many values after a run are not the exact ones."""
        left = np.frombuffer(memory.regions[0].data.tobytes(), np.uint16)
        return int((left != self.exact.reshape(-1)).sum())

    def judged(self, ptx: str, *schedules: str) -> tuple[int, list[str], list[str]]:
        """Wrong values, races and faults, with the launch's PTX or another."""
        file = replace(self.file, ptx=ptx)
        program = program_of(file, Path(self.file.name))
        wrong, races, faults = 0, set[str](), []
        for schedule in schedules_of(schedules):
            single = run_once(file, program, schedule, watch=True)
            wrong = max(wrong, self.wrong(single.memory))
            races |= {str(race) for race in single.run.races}
            faults += [f"{schedule}: {single.run.fault}"] if single.run.fault else []
        return wrong, sorted(races), faults


def product(
    m: int, n: int, k: int, *, half: bool = False, behind: int = 0
) -> tuple[dict[str, bytes], Any]:
    """The memory of a product, D = alpha A B, and the exact result as bits of bfloat16 or half;
    ``behind`` the rows and columns of A its scales are this byte.
    """
    draw = np.random.default_rng(3)
    a, b = (draw.choice(CODES, (rows, k)) for rows in (m, n))
    powers = [draw.choice(SCALES, (rows, k // GROUP)) for rows in (m, n)]
    values = [E2M1[c] * np.repeat(2.0**p, GROUP, 1) for c, p in zip((a, b), powers, strict=True)]
    exact = rounded(ALPHA * values[0] @ values[1].T, f16=half)
    contents = {
        "D": np.full((m, n), 0x7FC0, np.uint16).tobytes(), "A": packed(a), "B": packed(b),
        "SFA": tiled(ue4m3(powers[0]), behind), "SFB": tiled(ue4m3(powers[1])),
        "alpha": np.float32(ALPHA).tobytes(),
    }  # fmt: skip
    return contents, exact


def case_of(built: Built, launch: tuple[str, bool, int, int, int, int]) -> Case:
    """A launch with its operands in memory."""
    scheduler, swapped, m, n, k, processors = launch
    contents, exact = product(m, n, k)
    memory = placed(contents, "D")
    words = [scheduler, "swapped" if swapped else "plain", *(one.address for one in memory),
             WORKSPACE, m, n, k]  # fmt: skip
    room, *_, line = built.printed(words, processors)
    if size := room["workspace"]:
        memory.append(Array("workspace", WORKSPACE, bytes(size), True, "u8", ()))
    name = f"{scheduler}{' swapped' if swapped else ''} {m}x{n}x{k}, {processors} multiprocessors"
    return Case(built.launch(name, line, tuple(memory)), exact)


class Judged(Protocol):
    """A launch, and what shows if it runs with its PTX or another."""

    @property
    def file(self) -> LaunchFile:
        """The launch."""

    def judged(self, ptx: str, *schedules: str) -> tuple[int, list[str], list[str]]:
        """Wrong values, races and faults."""


def without(ptx: str, order: re.Match[str]) -> str:
    """PTX in which an order is left out: a wait for an mbarrier passes at once."""
    if not order[0].startswith("bra"):
        return f"{ptx[: order.start()]}{ptx[order.end() :]}"
    at = ptx.rindex("mbarrier.try_wait", 0, order.start())
    return f"{ptx[:at]}setp.eq.u32 P1, 0, 0;{ptx[ptx.index(';', at) + 1 :]}"


def unnoticed(case: Judged) -> tuple[list[str], int]:
    """The orders of a kernel that can be left out, each alone, and nothing shows; of how many."""
    begin = case.file.ptx.index(f".entry {case.file.kernel}")
    end = case.file.ptx.find(".entry", begin + 1)
    orders = [*ORDERS.finditer(case.file.ptx, begin, end if end > 0 else len(case.file.ptx))]
    silent = []
    for one in orders:
        ptx = without(case.file.ptx, one)
        if not any(any(case.judged(ptx, order)) for order in ("eager", "lazy", "random:1")):
            line = case.file.ptx.count("\n", 0, one.start()) + 1
            silent.append(f"  line {line}: {one[0]}")
    return silent, len(orders)


def show_unnoticed(case: Judged, name: str) -> None:
    """Print what nothing notices if it is left out."""
    silent, count = unnoticed(case)
    print(f"{name}: {len(silent)} of {count} barriers, waits and fences can be left out")
    print(*silent, sep="\n", flush=True)


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument(
        "--tile", default="128x32x128", help="FlashInfer's first tactic has this one"
    )
    options = parser.parse_args()
    built = build(Compiler.of_flashinfer(options), options.tile)
    for launch in LAUNCHES:
        case = case_of(built, launch)
        wrong, races, faults = case.judged(case.file.ptx)
        figures = f"{wrong} of {case.exact.size} values wrong, {len(races)} races"
        print(f"{options.tile} {case.file.name}, grid {case.file.grid}: {figures}, "
              f"{len(faults)} faults", flush=True)  # fmt: skip
        print(*races[:3], *faults[:3], sep="\n", end="\n" if races or faults else "")
        if options.orders and launch[-1] < MULTIPROCESSORS:
            show_unnoticed(case, case.file.name)
        if options.mutants and launch[-1] < MULTIPROCESSORS:
            Subject(case.file.name, case.file, case.wrong).show(options.mutants)


if __name__ == "__main__":
    main()
