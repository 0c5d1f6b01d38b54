"""A filed race in a released CuTe DSL kernel: top-k of FlashInfer (TensorRT-LLM #18338).

    pip install nvidia-cutlass-dsl==4.6.2
    python -m benchmarks.topk_race --work WORK

It takes the kernel from FlashInfer's wheels on the package index and compiles it for ``sm_100a``,
the least that it needs: as released, and with the barrier that TensorRT-LLM's pull request 18339
gave its copy.  Both run on a row whose hint is one value, as at a cold start.  Nothing of it is
stored here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from builder.common.pypi import PackageIndex
from builder.layers.catalog import Selection
from builder.pipeline.bases import ReleasedTrees
from builder.ptx.api import Result, run
from builder.ptx.source import kernels_of

RELEASES = ("0.7.4",)
FOLDER = "flashinfer/topk_varlen/kernels"
FILES = ("gvr_topk_decode.py", "block_scan.py")
#: What every thread reads before thread 0 writes it again; the barrier belongs behind it.
READ = re.compile(
    r"^( +)v_lo = s_thr\[1\]\n +v_hi = s_thr\[2\]\n(?= +if v_hi <= [^\n]*:\n +if tidx == 0:)",
    re.MULTILINE,
)
SCHEDULES = ("eager", "random:1", "random:2")
#: Values of a row, and how many of them are wanted; threads of its block, and enough shared memory.
ROW, WANTED, THREADS, SHARED = 1024, 512, 512, 100 << 10


def released(release: str, work: Path) -> str:
    """A package with the kernel of a release; its name."""
    name = f"topk_{release.replace('.', '_')}"
    trees = ReleasedTrees(
        package="flashinfer-python", selection=Selection((), ()), index=PackageIndex()
    )
    tree = trees.tree(release)
    (work / name).mkdir(parents=True, exist_ok=True)
    (work / name / "__init__.py").touch()
    for file in FILES:
        data = tree.read(f"{FOLDER}/{file}")
        if data is None:
            raise SystemExit(f"FlashInfer {release} has no {FOLDER}/{file}")
        (work / name / file).write_bytes(data)
    return name


def barred(name: str, work: Path) -> str:
    """The package with the barrier; its name."""
    barrier, new = f"{name}_barrier", work / f"{name}_barrier"
    new.mkdir(exist_ok=True)
    for file in ("__init__.py", *FILES):
        text = (work / name / file).read_text("utf-8")
        if file == FILES[0]:
            text, count = READ.subn(r"\g<0>\1cute.arch.barrier()\n", text)
            if count != 1:
                raise SystemExit(f"{name}/{file}: {count} places for the barrier, not one")
        (new / file).write_text(text, "utf-8")
    return barrier


def compiled(name: str) -> str:
    """The PTX of a package's kernel, for one row."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    kernel: Any = importlib.import_module(f"{name}.gvr_topk_decode").GvrTopKKernel(
        cutlass.Float32, WANTED, num_threads=THREADS, return_output_values=False, compress_ratio=4,
        min_blocks_per_mp=1,  # with more the DSL asks the driver about shared memory
    )  # fmt: skip

    def tensor(dtype: Any, *shape: int) -> Any:
        order = tuple(reversed(range(len(shape))))
        return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    done = cute.compile(
        kernel, tensor(cutlass.Float32, 1, ROW), tensor(cutlass.Int32, 1, WANTED),
        tensor(cutlass.Int32, 1), None, tensor(cutlass.Int32, 1, WANTED), None,
        runtime.make_fake_stream(),
    )  # fmt: skip
    return str(done.__ptx__)


def examined(ptx: str) -> tuple[Result, list[int]]:
    """Run it in all schedules; also how many of the largest values are missing in each."""
    values = np.random.default_rng(0).permutation(ROW).astype(np.float32)
    hint, length, out = (np.zeros(size, np.int32) for size in (WANTED, 1, WANTED))
    length[0], out[:] = ROW * 4, -1
    (name,) = kernels_of(ptx)
    given = [values, hint, length, out]
    result = run(ptx, name, 1, THREADS, given, shared=SHARED, schedules=SCHEDULES)
    largest = set(np.argsort(values)[-WANTED:])
    runs = range(len(SCHEDULES))
    return result, [len(largest - set(result.after(out, number))) for number in runs]


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="for the kernels' sources")
    parser.add_argument("--releases", nargs="+", default=RELEASES)
    given = parser.parse_args()
    os.environ.update(CUTE_DSL_ARCH="sm_100a", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_LINEINFO="1")
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ["CUTE_DSL_DUMP_DIR"] = str(given.work)
    sys.path.insert(0, str(given.work))
    print(f"missing of the {WANTED} largest in {', '.join(SCHEDULES)}\n")
    print("| FlashInfer | kernel | races | faults | missing |\n|---|---|---|---|---|")
    for release in given.releases:
        name = released(release, given.work)
        for title, package in (
            ("as released", name),
            ("with a barrier", barred(name, given.work)),
        ):
            result, missing = examined(compiled(package))
            print(
                f"| {release} | {title} | {len(result.races)} | {len(result.faults)} | {missing} |"
            )


if __name__ == "__main__":
    main()
