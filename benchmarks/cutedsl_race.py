"""A filed race in a CuTe DSL kernel: SGLang's fused-A GEMM (its pull request 37287).

    pip install nvidia-cutlass-dsl==4.6.2
    python -m benchmarks.cutedsl_race --work WORK

It fetches the kernel by its commit, compiles it for ``sm_121a`` as it is and with the barrier of
that pull request, and runs both.  ``--file`` takes a local copy.  Nothing of it is stored here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks.race_suites import Suite, fetched
from builder.ptx.api import Result, run
from builder.ptx.machine import to_bf16
from builder.ptx.source import kernels_of

PATH = "python/sglang/kernels/ops/gemm/cutedsl_dsv3_fused_a_gemm.py"
SGLANG = Suite(
    "sgl-project/sglang", "3a000c0e04f79bd6541f35dea30b733dfd516e11", lambda _: iter(()),
    folders=(str(Path(PATH).parent),),
)  # fmt: skip
#: What the module imports, but its kernel does not need.
ABSENT = (
    "torch", "sglang", "sglang.kernels", "sglang.kernels.kernel_api_logging", "sglang.srt",
    "sglang.srt.utils", "sglang.srt.utils.common",
)  # fmt: skip
#: The loop that stores the sums of a warp, and the barrier that belongs before it.
STORES = re.compile(r"^ {8}(?=for nb in cutlass\.range_constexpr\(NB\):$)", re.MULTILINE)
BARRIER = " " * 8 + "cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)\n"
SCHEDULES = ("eager", "lazy", "random:1", "random:2", "random:3")
#: Rows of the weight, depth, tokens; and stages of the pipeline: with few, more is written over.
N, K, TOKENS, STAGES = 32, 1024, 8, (2, 3, 4)


def module(text: str, name: str, work: Path) -> Any:
    """The kernel's module from its source."""
    (work / f"{name}.py").write_text(text)
    return importlib.import_module(name)


def compiled(kernel: Any, stages: int) -> tuple[str, int]:
    """Its PTX, and the bytes of shared memory that it needs."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")

    def tensor(dtype: Any, *shape: int) -> Any:
        return runtime.make_fake_compact_tensor(dtype, shape, stride_order=(1, 0))

    tiles, width = K // kernel.TILE_K, 8
    shared = 4 * (kernel._BAR_I32 + stages * kernel._stage_i32(width))
    done = cute.compile(
        kernel._dsv3_fused_a_gemm_host,
        tensor(cutlass.Int32, N, K // 2), tensor(cutlass.Int32, 16, K // 2),
        tensor(cutlass.BFloat16, 16, N), cutlass.Int32(16), runtime.make_fake_stream(),
        tiles, N, shared, stages, width,
    )  # fmt: skip
    return done.__ptx__, shared


def _bfloat16(values: Any) -> Any:
    return to_bf16(values.astype(np.float32)).astype(np.uint16)


def examined(ptx: str, shared: int) -> tuple[Result, list[int]]:
    """Run it in all schedules; also the wrong values of each, of operands with exact sums."""
    chance = np.random.default_rng(0)
    weight, tokens = (chance.integers(-1, 2, (rows, K)) for rows in (N, 16))
    out = np.zeros((16, N), np.uint16)
    given = [*(_bfloat16(one).view(np.int32) for one in (weight, tokens)), out, np.int32(TOKENS)]
    (name,) = kernels_of(ptx)
    result = run(ptx, name, N // 16, 256, given, shared=shared, schedules=SCHEDULES)
    right = _bfloat16(tokens @ weight.T)[:TOKENS]
    runs = range(len(SCHEDULES))
    return result, [int(np.sum(result.after(out, number)[:TOKENS] != right)) for number in runs]


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="for the clone")
    parser.add_argument("--file", type=Path, help=f"a local copy of {PATH}")
    given = parser.parse_args()
    os.environ.update(CUTE_DSL_ARCH="sm_121a", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_LINEINFO="1")
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ["CUTE_DSL_DUMP_DIR"] = str(given.work)
    text = (given.file or fetched(SGLANG, given.work / "sglang") / PATH).read_text("utf-8")
    changed, count = STORES.subn(BARRIER + " " * 8, text)
    if count != 1:
        raise SystemExit(f"{PATH}: {count} places for the barrier, not one")
    sys.modules |= {name: MagicMock() for name in ABSENT}
    sys.path.insert(0, str(given.work))
    print(f"wrong of {N * TOKENS} values in {', '.join(SCHEDULES)}\n")
    print("| kernel | stages | races | wrong values |\n|---|---|---|---|")
    for title, name, source in (
        ("as filed", "as_filed", text), ("with the barrier", "with_barrier", changed),
    ):  # fmt: skip
        kernel = module(source, name, given.work)
        for stages in STAGES:
            result, wrong = examined(*compiled(kernel, stages))
            print(f"| {title} | {stages} | {len(result.races)} | {wrong} |")


if __name__ == "__main__":
    main()
