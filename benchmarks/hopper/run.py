"""Run packed launches on the GPU of this machine: ``python run.py FOLDER [--times N]``.

Each launch runs N times on fresh memory.  A line of JSON for each says in how many runs values were
outside of their bounds, how many different results there were, and in how many values the first
differs from the executor's.  Needs numpy and the NVIDIA driver.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

#: CUfunction_attribute: the most dynamic shared memory of a block.
_MAX_DYNAMIC_SHARED = 8


class Driver:
    """The CUDA driver API."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; an error ends the run."""
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise SystemExit(f"{name}: {code} {text.value!r}")


class Launch:
    """One packed launch."""

    def __init__(self, cuda: Driver, folder: Path) -> None:
        self.cuda = cuda
        self.form = json.loads((folder / "launch.json").read_text())
        module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        cuda("cuModuleLoadData", ctypes.byref(module), (folder / "kernel.cubin").read_bytes())
        entry = self.form["entry"].encode()
        cuda("cuModuleGetFunction", ctypes.byref(self.kernel), module, entry)
        cuda("cuFuncSetAttribute", self.kernel, _MAX_DYNAMIC_SHARED, self.form["shared"])
        names = [f"memory-{number}.bin" for number in range(self.form["memories"])]
        self.contents = [(folder / name).read_bytes() for name in names]
        self.memories = [self._allocate(len(content)) for content in self.contents]
        self.parameters = [self._parameter(one) for one in self.form["parameters"]]
        self.exact = np.load(folder / "exact.npy").reshape(-1)
        self.bound = np.load(folder / "bound.npy").reshape(-1)
        self.executor = np.frombuffer((folder / "executor.bin").read_bytes(), np.uint16)

    def _allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 16)))
        return address.value

    def _parameter(self, form: dict[str, Any]) -> ctypes.Array[ctypes.c_uint8]:
        if "dims" in form:
            return self._tensor_map(form, self.memories[form["memory"]] + form["offset"])
        raw = bytearray.fromhex(form["hex"])
        for one in form["pointers"]:
            address = self.memories[one["memory"]] + one["offset"]
            raw[one["at"] : one["at"] + 8] = address.to_bytes(8, "little")
        return (ctypes.c_uint8 * len(raw)).from_buffer(raw)

    def _tensor_map(self, form: dict[str, Any], address: int) -> ctypes.Array[ctypes.c_uint8]:
        space = (ctypes.c_uint8 * 192)()  # a tensor map is 128 bytes at a multiple of 64
        start = -ctypes.addressof(space) % 64
        rank = len(form["dims"])
        self.cuda(
            "cuTensorMapEncodeTiled",
            ctypes.byref(space, start), form["type"], rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*form["dims"]),
            (ctypes.c_uint64 * rank)(*form["strides"]),
            (ctypes.c_uint32 * rank)(*form["box"]),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0, form["swizzle"], 0, 0,
        )  # fmt: skip
        return (ctypes.c_uint8 * 128).from_buffer(space, start)

    def run(self) -> Any:
        """The bits of the result of one run."""
        for address, content in zip(self.memories, self.contents, strict=True):
            size = ctypes.c_size_t(len(content))
            self.cuda("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, size)
        pointers = [ctypes.addressof(one) for one in self.parameters]
        given = (ctypes.c_void_p * len(pointers))(*pointers)
        sizes = (*self.form["grid"], *self.form["block"], self.form["shared"])
        self.cuda("cuLaunchKernel", self.kernel, *sizes, None, given, None)
        self.cuda("cuCtxSynchronize")
        bits = np.zeros(self.exact.size, np.uint16)
        place = self.form["result"]
        source = ctypes.c_uint64(self.memories[place["memory"]] + place["offset"])
        target, size = ctypes.c_void_p(bits.ctypes.data), ctypes.c_size_t(bits.nbytes)
        self.cuda("cuMemcpyDtoH_v2", target, source, size)
        return bits

    def wrong(self, bits: Any) -> int:
        """How many of these bfloat16 values are outside of their bounds."""
        values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return int((~(np.abs(values - self.exact) <= self.bound)).sum())


def report(launch: Launch, name: str, times: int) -> dict[str, Any]:
    """Run a launch, and say what came out."""
    runs = [launch.run() for _ in range(times)]
    wrong = [launch.wrong(bits) for bits in runs]
    return {
        "launch": name,
        "name": launch.form["name"],
        "values": launch.exact.size,
        "runs": times,
        "wrong runs": sum(map(bool, wrong)),
        "most wrong values": max(wrong),
        "different results": len({hashlib.sha256(bits).digest() for bits in runs}),
        "values unlike the executor": int((runs[0] != launch.executor).sum()),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=300)
    given = parser.parse_args()
    cuda = Driver()
    for path in sorted(given.folder.glob("*/launch.json")):
        launch = Launch(cuda, path.parent)
        print(json.dumps(report(launch, path.parent.name, given.times)), flush=True)


if __name__ == "__main__":
    main()
