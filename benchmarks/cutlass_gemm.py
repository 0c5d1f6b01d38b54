"""FlashInfer's CUTLASS NVFP4 GEMM for SM12x, compiled from the wheel's sources, in the executor.

    python -m benchmarks.cutlass_gemm FLASHINFER --work WORK [--include FOLDER] [--tile 128x32x128]

FLASHINFER is the folder ``flashinfer`` of a release's wheel; ``nvcc`` must be on PATH, FOLDER has
headers that its toolkit lacks (curand), and no GPU is needed.  `cutlass_gemm.cu` is compiled with
them once (two minutes of processor time): the kernels' PTX, and a program that makes each launch
with FlashInfer's own host code.  Left out is what asks the device: multiprocessors are a GB10's,
fewer where a block shall have several tiles, and tensor maps have what the executor reads of them.

Prints for each launch how many values differ from the exact ones, rounded once, and the races; and
how many of the barriers, waits and fences of a kernel nothing notices if left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.launchfile import APART, FIRST, Array, LaunchFile
from builder.ptx.machine import E2M1, to_bf16
from builder.ptx.runs import program_of, run_once, schedules_of

#: FlashInfer's own flags (``gen_gemm_sm120_module_cutlass_fp4``), and one by which CUTLASS calls
#: the function for tensor maps by its name.
FLAGS = (
    "-arch=compute_121a", "-code=compute_121a", "-std=c++17", "-O3", "--expt-relaxed-constexpr",
    "-DENABLE_BF16", "-DENABLE_FP4", "-DCUTLASS_ENABLE_GDC_FOR_SM100=1", "-w",
    "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
)  # fmt: skip
INCLUDES = (
    "include", "csrc", "cutlass/include", "cutlass/tools/util/include", "csrc/nv_internal",
    "csrc/nv_internal/include", "spdlog/include", "cccl/include",
)  # fmt: skip
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
    r"|fence\.proxy\.async[^;]*;|fence\.mbarrier_init[^;]*;"
)
#: Tables of curand, which none of these kernels names.
TABLES = re.compile(
    r"^\.(?:global|const) [^=;]*(?:precalc|mrg32k3a|__cr_)\w*\[[^;]*;\n", re.MULTILINE
)
#: Codes of E2M1 whose sums, with scales that are powers of two, are exact in float32.
CODES, SCALES = np.array([0, 1, 2, 3, 4, 9, 10, 11, 12]), np.arange(-2, 3)
ALPHA, GROUP = 0.5, 16


@dataclass(frozen=True)
class Built:
    """The program that makes launches, and its kernels."""

    program: Path
    ptx: str

    def kernel(self, scheduler: str, *, swapped: bool) -> str:
        """The name of a kernel; one whose operands are swapped stores matrices transposed."""
        names: list[str] = re.findall(r"\.entry\s+([\w$]+)", self.ptx)
        forms = {("StreamK" in name, "STSM_T" in name): name for name in names}
        return forms[scheduler == "streamk", swapped]


def build(flashinfer: Path, work: Path, tile: str, more: list[Path]) -> Built:
    """Compile for a tile, unless that was done."""
    folder, source = work / tile, Path(__file__).with_suffix(".cu")
    program = folder / "program"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sizes = zip("MNK", tile.split("x"), strict=True)
        subprocess.run(
            ["nvcc", *FLAGS, *(f"-DTILE_{name}={size}" for name, size in sizes), "--keep",
             "--keep-dir", folder, *(f"-I{flashinfer / 'data' / one}" for one in INCLUDES),
             *(f"-I{one}" for one in more), source, "-o", program],
            check=True,
        )  # fmt: skip
    ptx = (folder / source.with_suffix(".ptx").name).read_text("utf-8")
    return Built(program, TABLES.sub("\n", ptx))


def packed(codes: Any) -> bytes:
    """Two codes a byte, the first in the low half."""
    return bytes((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).tobytes())


def tiled(powers: Any) -> bytes:
    """Scales as UE4M3, in tiles of 128 rows and 4 columns that are 32 rows of 16 bytes."""
    rows, columns = (
        -(-size // unit) * unit for size, unit in zip(powers.shape, (128, 4), strict=True)
    )
    codes = np.zeros((rows, columns), np.uint8)
    codes[: powers.shape[0], : powers.shape[1]] = powers + 7 << 3
    return codes.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4).tobytes()


@dataclass(frozen=True)
class Case:
    """A launch on exact operands, and the exact result as bits of bfloat16."""

    file: LaunchFile
    exact: Any

    def judged(self, ptx: str, *schedules: str) -> tuple[int, list[str], list[str]]:
        """Wrong values, races and faults, with the launch's PTX or another."""
        file = replace(self.file, ptx=ptx)
        program = program_of(file, Path(self.file.name))
        wrong, races, faults = 0, set[str](), []
        for schedule in schedules_of(schedules):
            single = run_once(file, program, schedule, watch=True)
            left = np.frombuffer(single.memory.regions[0].data.tobytes(), np.uint16)
            wrong = max(wrong, int((left != self.exact.reshape(-1)).sum()))
            races |= {str(race) for race in single.run.races}
            faults += [f"{schedule}: {single.run.fault}"] if single.run.fault else []
        return wrong, sorted(races), faults


def case_of(built: Built, launch: tuple[str, bool, int, int, int, int]) -> Case:
    """A launch with its operands in memory."""
    scheduler, swapped, m, n, k, processors = launch
    draw = np.random.default_rng(3)
    a, b = (draw.choice(CODES, (rows, k)) for rows in (m, n))
    powers = [draw.choice(SCALES, (rows, k // GROUP)) for rows in (m, n)]
    values = [E2M1[c] * np.repeat(2.0**p, GROUP, 1) for c, p in zip((a, b), powers, strict=True)]
    exact = to_bf16((ALPHA * values[0] @ values[1].T).astype(np.float32)).astype(np.uint16)
    contents = {
        "D": np.full((m, n), 0x7FC0, np.uint16).tobytes(), "A": packed(a), "B": packed(b),
        "SFA": tiled(powers[0]), "SFB": tiled(powers[1]),
        "alpha": np.float32(ALPHA).tobytes(), "workspace": b"",
    }  # fmt: skip
    address, memory = FIRST, []
    for name, data in contents.items():
        memory.append(Array(name, address, data, name in ("D", "workspace"), "u8", (len(data),)))
        address += -(-len(data) // APART) * APART + APART
    words = [scheduler, "swapped" if swapped else "plain", *(str(one.address) for one in memory),
             *map(str, (m, n, k, processors))]  # fmt: skip
    done = subprocess.run([built.program, *words], check=True, capture_output=True, text=True)
    given = json.loads(done.stdout)
    memory[-1] = Array("workspace", memory[-1].address, bytes(given["workspace"]), True, "u8", ())
    name = f"{scheduler}{' swapped' if swapped else ''} {m}x{n}x{k}, {processors} multiprocessors"
    return Case(
        LaunchFile(name, built.ptx, built.kernel(scheduler, swapped=swapped), tuple(given["grid"]),
                   tuple(given["block"]), given["shared"], (bytes.fromhex(given["parameters"]),),
                   tuple(memory if given["workspace"] else memory[:-1])), exact,
    )  # fmt: skip


def unnoticed(case: Case) -> tuple[int, int]:
    """How many orders of a kernel can be left out, each alone, and nothing shows; of how many."""
    begin = case.file.ptx.index(f".entry {case.file.kernel}")
    end = case.file.ptx.find(".entry", begin + 1)
    orders = [*ORDERS.finditer(case.file.ptx, begin, end if end > 0 else len(case.file.ptx))]
    silent = 0
    for one in orders:
        ptx = f"{case.file.ptx[: one.start()]}{case.file.ptx[one.end() :]}"
        silent += not any(case.judged(ptx, "eager", "lazy"))
    return silent, len(orders)


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("flashinfer", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--include", type=Path, action="append", default=[])
    parser.add_argument(
        "--tile", default="128x32x128", help="FlashInfer's first tactic has this one"
    )
    parser.add_argument("--orders", action="store_true", help="leave out barriers, one at a time")
    options = parser.parse_args()
    built = build(options.flashinfer, options.work, options.tile, options.include)
    for launch in LAUNCHES:
        case = case_of(built, launch)
        wrong, races, faults = case.judged(built.ptx)
        figures = f"{wrong} of {case.exact.size} values wrong, {len(races)} races"
        print(f"{options.tile} {case.file.name}, grid {case.file.grid}: {figures}, "
              f"{len(faults)} faults", flush=True)  # fmt: skip
        print(*races[:3], *faults[:3], sep="\n", end="\n" if races or faults else "")
        if options.orders and launch[-1] < MULTIPROCESSORS:
            silent, count = unnoticed(case)
            print(f"  {silent} of {count} barriers, waits and fences can be left out", flush=True)


if __name__ == "__main__":
    main()
