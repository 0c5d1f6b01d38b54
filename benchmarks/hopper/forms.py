"""Every form of an instruction on registers, on a GPU and in the executor, bit by bit.

    python -m benchmarks.hopper.forms write forms.json     # the kernels: any machine
    python -m benchmarks.hopper.forms gpu forms.json gpu.json          # needs numpy and the driver
    python -m benchmarks.hopper.forms executor forms.json executor.json
    python -m benchmarks.hopper.forms compare gpu.json executor.json

The forms are those of `builder.ptx.supported`, of the kinds that access no memory.  Each is a
kernel of 128 threads, whose operands are special values of every type and random bits.  A form
that the GPU's own instruction set lacks is left out of the comparison, and counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("integers", "floating point", "comparison and selection", "conversion")
THREADS, SEED = 128, 5
#: float32, halves in pairs, float64's upper words, integers.
SPECIAL = (
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000),
    *(0x3FC00000, 0x40200000, 0x477FE000, 0x47800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000),
    *(0x7FC00000, 0x7FFFFFFF, 0x3C003C00, 0x7C00FC00, 0x7E000001, 0x03FF8000, 0x7F80FF80),
    *(0x3FF00000, 0x7FF00000, 0xC0000000, 0x0000001F, 0x00000020, 0xFFFFFFFF, 0x7FFFFFFE),
)
_HEAD = """.version {version}
.target {target}
.address_size 64
"""
#: Operands are those of `supported.instruction`: the n-th has the number 4 n + 1.
_KERNEL = """.visible .entry k{number}(.param .u64 given, .param .u64 left)
{{
.reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<40>, %w<8>; .reg .b64 %l<40>, %at<4>;
ld.param.u64 %at1, [given]; ld.param.u64 %at2, [left]; mov.u32 %w1, %tid.x;
mul.wide.u32 %at3, %w1, 16; add.s64 %at1, %at1, %at3; add.s64 %at2, %at2, %at3;
ld.global.v4.b32 {{%r5, %r9, %r13, %r17}}, [%at1];
mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b64 %l1, 0; mov.b16 %h1, 0;
setp.ne.u32 %p1, 0, 0; setp.ne.u32 %p2, 0, 0;
{operands}
{body}
selp.b32 %w2, 65536, 0, %p1; selp.b32 %w3, 131072, 0, %p2; cvt.u32.u16 %w4, %h1;
or.b32 %w2, %w2, %w3; or.b32 %w2, %w2, %w4;
mov.b64 {{%w3, %w4}}, %l1; mul.lo.u32 %w4, %w4, 0x9e3779b1; xor.b32 %w3, %w3, %w4;
st.global.v4.b32 [%at2], {{%r1, %r2, %w2, %w3}};
ret;
}}
"""
_OPERANDS = (
    "\n".join(
        f"cvt.u16.u32 %h{n}, %r{n}; mov.b64 %l{n}, {{%r{m}, %r{n}}}; setp.lt.s32 %p{n}, %r{n}, 0;"
        for n, m in ((5, 9), (9, 13), (13, 17), (17, 5))
    )
    + "\nsetp.lt.s32 %p21, %r17, 0;"
)


def given() -> Any:
    """The operands: four words for each thread."""
    draw = np.random.default_rng(SEED)
    words = draw.integers(0, 2**32, (THREADS, 4), dtype=np.uint32)
    special = draw.choice(np.array(SPECIAL, np.uint32), (THREADS, 4))
    return np.where(draw.random((THREADS, 4)) < 0.6, special, words)


def write(into: Path) -> None:
    """Write the forms that the executor has."""
    from builder.ptx.supported import FORMS, _lines, _tried, instruction

    bodies: dict[str, str] = {}
    for kind in KINDS:
        for line in _lines(FORMS[kind]):
            operands = line.partition(" ")[2]
            known = _tried(kind, line).known
            bodies |= {f"{name} {operands}": instruction(name, operands) for name in known}
    # a table of zeros gives only zeros
    bodies = {
        name: body.replace(", 0", ", 0xe8") if name.startswith("lop3") else body
        for name, body in bodies.items()
    }
    into.write_text(json.dumps(bodies, indent=0), encoding="utf-8")


def module(bodies: dict[int, str], version: str, target: str) -> str:
    """PTX with a kernel for each body."""
    kernels = (
        _KERNEL.format(number=n, body=body, operands=_OPERANDS) for n, body in bodies.items()
    )
    return _HEAD.format(version=version, target=target) + "".join(kernels)


def on_gpu(bodies: list[str]) -> list[str | None]:
    """What each leaves, as hexadecimal; None where the GPU's compiler refuses it."""
    from benchmarks.hopper.run import Driver

    cuda = Driver()
    memory = [ctypes.c_uint64(), ctypes.c_uint64()]
    words = given()
    for one in memory:
        cuda("cuMemAlloc_v2", ctypes.byref(one), ctypes.c_size_t(words.nbytes))
    cuda("cuMemcpyHtoD_v2", memory[0], ctypes.c_void_p(words.ctypes.data), words.nbytes)
    found: dict[int, str] = {}

    def tried(numbers: list[int]) -> None:
        text = module({n: bodies[n] for n in numbers}, "8.8", "sm_90a").encode() + b"\0"
        loaded = ctypes.c_void_p()
        if cuda._cuda.cuModuleLoadData(ctypes.byref(loaded), text):
            half = len(numbers) // 2
            for part in (numbers[:half], numbers[half:]) if half else ():
                tried(part)
            return
        for n in numbers:
            kernel, out = ctypes.c_void_p(), np.zeros((THREADS, 4), np.uint32)
            cuda("cuModuleGetFunction", ctypes.byref(kernel), loaded, f"k{n}".encode())
            pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in memory))
            cuda("cuLaunchKernel", kernel, 1, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
            cuda("cuCtxSynchronize")
            cuda("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), memory[1], out.nbytes)
            found[n] = out.tobytes().hex()
        cuda("cuModuleUnload", loaded)

    for first in range(0, len(bodies), 32):
        tried([*range(first, min(first + 32, len(bodies)))])
    return [found.get(n) for n in range(len(bodies))]


def in_executor(body: str, words: Any = None) -> str:
    """What a form leaves in the executor, as hexadecimal."""
    from builder.ptx.api import run

    words, out = given() if words is None else words, np.zeros((THREADS, 4), np.uint32)
    text = module({0: body}, "9.1", "sm_121a")
    result = run(text, "k0", 1, THREADS, {"given": words, "left": out}, schedules=("eager",))
    result.check()
    return result[out].tobytes().hex()


def compare(gpu: dict[str, str | None], executor: dict[str, str]) -> None:
    """Print which forms differ, in how many threads, with the first of them."""
    counts: Counter[str] = Counter()
    for name, bits in gpu.items():
        if bits is None:
            counts["not on this GPU"] += 1
            continue
        theirs, ours = (
            np.frombuffer(bytes.fromhex(one), np.uint32).reshape(THREADS, 4)
            for one in (bits, executor[name])
        )
        wrong = np.flatnonzero((theirs != ours).any(1))
        counts["different" if len(wrong) else "the same"] += 1
        if len(wrong):
            n = wrong[0]
            words = [" ".join(f"{word:08x}" for word in one[n]) for one in (given(), theirs, ours)]
            print(f"{name}: {len(wrong)} threads; of {words[0]}: {words[1]}, executor {words[2]}")
    print(dict(counts))


def main() -> None:
    """One of the four steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("write", "gpu", "executor", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.step == "write":
        write(options.files[0])
        return
    first = json.loads(options.files[0].read_text("utf-8"))
    if options.step == "compare":
        compare(first, json.loads(options.files[1].read_text("utf-8")))
        return
    if options.step == "gpu":
        left: list[str | None] = on_gpu([*first.values()])
    else:
        with ProcessPoolExecutor() as pool:
            left = [*pool.map(in_executor, first.values(), chunksize=16)]
    options.files[1].write_text(json.dumps(dict(zip(first, left, strict=True))), encoding="utf-8")


if __name__ == "__main__":
    main()
