"""Kernels of clusters on a GPU and in the executor, bit by bit.

    python -m benchmarks.hopper.clusters write cases.json   # what the executor leaves: any machine
    python -m benchmarks.hopper.clusters gpu cases.json     # needs numpy and the NVIDIA driver

The kernels are those of `tests/unit/ptx/test_ptx_clusters.py`, for SM90: each other's shared
memory, the cluster's barrier, mbarriers of another block, copies and multicasts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

#: The words of which the case with a tensor map loads a row.
TILE = np.arange(64, dtype=np.uint32).reshape(2, 32)
THREADS, BLOCKS, CLUSTER = 32, 4, 2
DIRECTIVES = f".explicitcluster .reqnctapercluster {CLUSTER}, 1, 1"
#: CU_TENSOR_MAP_DATA_TYPE_UINT32.
UINT32 = 2


def bodies() -> dict[str, str]:
    """The kernels without an error, by their names."""
    from tests.unit.ptx import test_ptx_async as waits
    from tests.unit.ptx import test_ptx_clusters as cases

    meet, relaxed = cases.MEET, cases.MEET_RELAXED
    states = waits.STATES.replace("mov.b32 %r9, dynamic;", "mov.b32 %r9, %r7; mov.b32 %r8, 0;")
    states += "mov.b32 %r20, %r8;"
    return {
        **{
            f"exchange {n}": cases.EXCHANGE.format(first=meet, last=meet, read=read)
            for n, read in enumerate((cases.READ, cases.GENERIC))
        },
        "special registers": cases.NUMBER,
        "atomics": cases.COUNT.format(first=meet, last=meet, order="relaxed.cluster"),
        "mbarrier of another block": cases.HAND_OVER.format(order="release"),
        "st.async": cases.SEND.format(begin=relaxed, bytes=256, wait=cases.WAIT),
        **{f"red.async.{name}": cases.SUM.format(operation=name) for name in cases.SUMS},
        "copy": cases.COPY.format(fence="fence.proxy.async.shared::cta;", signal="%r12"),
        "multicast": cases.MULTICAST.format(mask=3, meet=relaxed, last=meet),
        **{
            f"mbarrier.arrive{drop}": states.format(drop=drop, bytes=waits.COMPLETE)
            for drop in ("", "_drop")
        },
        "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r3;",
    }


def write(into: Path) -> None:
    """Run each kernel in the executor; write its text and what it left."""
    from builder.ptx.api import TensorMap, run
    from tests.unit.ptx.test_ptx_clusters import END, HEAD

    head = HEAD.format(directives=DIRECTIVES, parameters=", .param .align 64 .b8 map0[128]")
    cases = {}
    for name, body in bodies().items():
        out = np.zeros(THREADS * BLOCKS, np.uint32)
        result = run(head + body + END, "k", BLOCKS, THREADS, [out, TensorMap(TILE, (1, 32))])
        result.check()
        cases[name] = head + body + END, result[out].tobytes().hex()
    into.write_text(json.dumps(cases, indent=0), encoding="utf-8")


def on_gpu(cuda: Any, text: str, tile: int) -> str:
    """What a kernel leaves, as hexadecimal."""
    text = text.replace(".version 9.0", ".version 8.3").replace("sm_121a", "sm_90a")
    loaded, kernel, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    out = np.zeros(THREADS * BLOCKS, np.uint32)
    cuda("cuModuleLoadData", ctypes.byref(loaded), text.encode() + b"\0")
    cuda("cuModuleGetFunction", ctypes.byref(kernel), loaded, b"k")
    cuda("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(out.nbytes))
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(memory), tile)
    cuda("cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
    cuda("cuCtxSynchronize")
    cuda("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), memory, ctypes.c_size_t(out.nbytes))
    return out.tobytes().hex()


def compare(cases: dict[str, tuple[str, str]]) -> None:
    """Print which kernels leave other bits on the GPU."""
    from benchmarks.hopper.run import Driver

    cuda, memory, space = Driver(), ctypes.c_uint64(), (ctypes.c_uint8 * 192)()
    tile = ctypes.addressof(space) + -ctypes.addressof(space) % 64
    cuda("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(TILE.nbytes))
    cuda("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(TILE.ctypes.data), ctypes.c_size_t(TILE.nbytes))
    pair = ctypes.c_uint64 * 2
    cuda(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(tile), UINT32, 2, memory, pair(32, 2), pair(128),
        (ctypes.c_uint32 * 2)(32, 1), (ctypes.c_uint32 * 2)(1, 1), 0, 0, 0, 0,
    )  # fmt: skip
    different = [name for name, (text, bits) in cases.items() if on_gpu(cuda, text, tile) != bits]
    print(f"{len(cases)} kernels, {len(different)} differ", *different, sep="\n")


def main() -> None:
    """One of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("write", "gpu"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.step == "write":
        write(options.file)
    else:
        compare(json.loads(options.file.read_text("utf-8")))


if __name__ == "__main__":
    main()
