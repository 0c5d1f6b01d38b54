"""A filed race in a CUDA kernel: tinygemm2 of TensorRT-LLM (pull request 15338), in FlashInfer.

    python -m benchmarks.tinygemm_race --work WORK

A consumer polls the barrier of the pipeline's first stage in place of its own.  It reads the source
of a release with the race and of one without it from the package index, compiles the kernel with
``nvcc`` for ``sm_121a``, and runs both in the executor.  Nothing of them is stored here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.ptx.api import Result, TensorMap, run
from builder.ptx.machine import to_bf16
from builder.ptx.source import kernels_of

RELEASES = ("0.6.13", "0.7.2.post1")
SOURCE = "flashinfer/data/csrc/tinygemm2.cu"
#: The kernel's tile is 16 x 8 values and 64 of the depth; a stage of the pipeline has four of them.
#: ``launch_tinygemm2`` takes 16 stages where shared memory has the room, else 4: those of SM12x.
ROWS, TOKENS, TILE, UNROLL, STAGES = 16, 8, 64, 4, (4, 8, 16)
BYTES = UNROLL * (ROWS + TOKENS) * TILE * 2
#: So deep that each consumer goes round 16 stages four times.
DEPTH = 4 * 16 * UNROLL * TILE
SCHEDULES = ("eager", "lazy", "random:1", "random:2")
POINTERS = ", ".join(["__nv_bfloat16*"] * 4)
INSTANCE = (
    f"template __global__ void tinygemm_kernel<{ROWS}, {ROWS}, {TOKENS}, {TILE}, %d, {UNROLL}, "
    f"false, true>({POINTERS}, int, int, int, const __grid_constant__ CUtensorMap, "
    "const __grid_constant__ CUtensorMap);\n"
)


def source_of(release: str) -> str:
    """The kernel of a release, without the host's part, for each number of stages."""
    index = PackageIndex()
    file = index.choose("flashinfer-python", release, Platform.parse("x86_64", "3.12"))
    text = RemoteWheel(file, index).read(SOURCE).decode()
    kernel = text.partition("// Host launcher")[0].replace('#include "tvm_ffi_utils.h"\n', "")
    return kernel + "\n" + "".join(INSTANCE % stages for stages in STAGES)


def compiled(release: str, work: Path) -> str:
    """Its PTX."""
    source, out = work / f"tinygemm2-{release}.cu", work / f"tinygemm2-{release}.ptx"
    source.write_text(source_of(release), "utf-8")
    words = ("nvcc", "-ptx", "-lineinfo", "-std=c++17", "-arch=compute_121a", "-w")
    subprocess.run([*words, source, "-o", out], check=True)
    return out.read_text("utf-8")


def _bfloat16(values: Any) -> Any:
    return to_bf16(values.astype(np.float32)).astype(np.uint16)


def examined(ptx: str, kernel: str, stages: int) -> tuple[Result, list[int]]:
    """Run it in all schedules; also the wrong values of each, of operands with exact sums."""
    chance = np.random.default_rng(0)
    weight, tokens = (chance.integers(-1, 2, (size, DEPTH)) for size in (ROWS, TOKENS))
    bias = chance.integers(-8, 9, ROWS)
    w, x, out = _bfloat16(weight), _bfloat16(tokens), np.zeros((TOKENS, ROWS), np.uint16)
    sizes = [np.int32(size) for size in (ROWS, TOKENS, DEPTH)]
    maps = TensorMap(w, (ROWS, TILE), 128), TensorMap(x, (TOKENS, TILE), 128)
    result = run(
        ptx, kernel, 1, 384, [out, w, x, _bfloat16(bias), *sizes, *maps],
        shared=stages * BYTES, schedules=SCHEDULES,
    )  # fmt: skip
    right = _bfloat16(tokens @ weight.T + bias)
    runs = range(len(SCHEDULES))
    return result, [int(np.sum(result.after(out, number) != right)) for number in runs]


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="for sources and PTX")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    print(f"wrong of {ROWS * TOKENS} values in {', '.join(SCHEDULES)}\n")
    print("| FlashInfer | stages | races | schedules without an end | wrong values |")
    print("|---|---|---|---|---|")
    for release in RELEASES:
        ptx = compiled(release, work)
        for name in kernels_of(ptx):
            (stages,) = map(int, re.findall(rf"Li{TILE}ELi(\d+)ELi{UNROLL}E", name))
            result, wrong = examined(ptx, name, stages)
            found, ends = len(result.races), len(result.faults)
            print(f"| {release} | {stages} | {found} | {ends} | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
