"""Kept launches for a machine with a Hopper GPU: ``python -m benchmarks.hopper.pack FROM INTO``.

FROM is the directory that ``SPARK_BUILD_KEEP_LAUNCHES`` named.  INTO gets a folder for each launch:
the kernel, compiled for ``sm_90a``, its memory, its parameters, and what the executor makes of it.
``run.py`` goes beside them; it needs only numpy and the driver there.

``--late odd`` (``even``, ``high``, ``low``) lets these of the four MMA warps of a MoE kernel wait
before they store a part of the output, ``--late copy`` the warp that copies an output tile to
global memory, and ``--rolled`` slows the MMA down: other schedules of the same kernel.
``--without`` takes out lines of the PTX, such as a barrier.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.hopper.translate import for_hopper, functions_of
from builder.ptx.grid import Schedule
from builder.ptx.launchfile import read_launch
from builder.ptx.memory import TensorMap
from builder.ptx.runs import program_of, run_once

if TYPE_CHECKING:
    from builder.ptx.launchfile import LaunchFile

ARCH = "-arch=sm_90a"
#: Bytes of a tensor map (CUDA driver API, CUtensorMap).
MAP = 128
#: CUtensorMapDataType by the bits of an element: UINT8, UINT16 and UINT32; copies do not care for
#: more.
_TYPES = {8: 0, 16: 1, 32: 2}
#: Which bit of the thread's number, and what it is in the warps that wait.
_LATE = {"odd": (32, "ne"), "even": (32, "eq"), "high": (64, "ne"), "low": (64, "eq")}
_WAIT = (
    "{{ .reg .pred late; .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 thread, thread, {bit}; "
    "setp.{test}.u32 late, thread, 0; @late nanosleep.u32 20000; }}"
)
COPY = "copy"
_STORE = "st.shared.b32"
#: The copy of an output tile to global memory, and the wait before it.
_COPY = re.compile(r"(?m)^(?=[^/\n]*cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta)")
_COPY_WAIT = "nanosleep.u32 20000;\n"
#: The end of the stores of one part of the output.
_FENCE = "fence.proxy.async.shared::cta;"


def late(ptx: str, warps: str) -> str:
    """The kernel with some warps waiting before each run of stores that a fence ends.

    Raises:
        ValueError: it has no such stores.
    """
    bit, test = _LATE[warps]
    lines = ptx.split("\n")
    first: list[int] = []
    stores: int | None = None  # where the latest run of stores began
    before = ""
    for number, text in enumerate(map(str.strip, lines)):
        if text.startswith(_STORE):
            stores = stores if before.startswith(_STORE) else number
        elif text.startswith(("bar.", "bra")):
            stores = None
        elif text == _FENCE and stores is not None:
            first.append(stores)
            stores = None
        before = text
    if not first:
        raise ValueError("it does not store its output to shared memory by st.shared.b32")
    for at in reversed(first):
        lines.insert(at, _WAIT.format(bit=bit, test=test))
    return "\n".join(lines)


def late_copy(ptx: str) -> str:
    """The kernel with a wait before each copy of an output tile to global memory.

    Raises:
        ValueError: it has no such copy.
    """
    text, count = _COPY.subn(_COPY_WAIT, ptx)
    if not count:
        raise ValueError("it does not copy its output by cp.async.bulk.tensor")
    return text


def without(ptx: str, pattern: str) -> str:
    """The kernel without the lines that match.

    Raises:
        ValueError: there are none.
    """
    text, count = re.subn(rf"(?m)^.*{pattern}.*$", "", ptx)
    if not count:
        raise ValueError(f"no line matches {pattern!r}")
    return text


def pack(file: LaunchFile, source: Path, into: Path, nvcc: str, functions: str, ptx: str) -> None:
    """Write one launch; ``ptx`` is its kernel, maybe changed."""
    into.mkdir(parents=True)
    maps = {n: TensorMap.of(raw) for n, raw in enumerate(file.parameters) if len(raw) == MAP}
    text = for_hopper(ptx, functions, {n for n, one in maps.items() if one.bits == 4})
    (into / "kernel.ptx").write_text(text)
    command = [nvcc, ARCH, "-cubin", "-o", str(into / "kernel.cubin"), str(into / "kernel.ptx")]
    subprocess.run(command, check=True)
    for number, array in enumerate(file.memory):
        (into / f"memory-{number}.bin").write_bytes(bytes(array.data))
    assert file.expected is not None, "a launch of the level has a result"
    np.save(into / "exact.npy", file.expected.exact)
    np.save(into / "bound.npy", file.expected.bound)
    program = program_of(file, source)
    memory = run_once(file, program, Schedule("eager"), watch=False).memory
    place = _place(file, file.expected.address)
    size = 2 * int(np.prod(file.expected.shape))
    left = memory.regions[place["memory"]].data[place["offset"] :][:size]
    (into / "executor.bin").write_bytes(left.tobytes())
    document = {
        "name": file.name,
        "entry": program.kernel.name,
        "grid": file.grid,
        "block": file.block,
        "shared": file.shared,
        "parameters": [_parameter(file, raw, maps.get(n)) for n, raw in enumerate(file.parameters)],
        "memories": len(file.memory),
        "result": place,
    }
    (into / "launch.json").write_text(json.dumps(document, indent=1))


def _place(file: LaunchFile, address: int) -> dict[str, int]:
    """Where an address of the launch lies; empty where it is in no array of it."""
    for number, array in enumerate(file.memory):
        if array.address <= address < array.address + len(array.data):
            return {"memory": number, "offset": address - array.address}
    return {}


def _parameter(file: LaunchFile, raw: bytes, tensor: TensorMap | None) -> dict[str, Any]:
    if tensor is None:
        words = range(0, len(raw) - 7, 8)
        places = {at: _place(file, int.from_bytes(raw[at : at + 8], "little")) for at in words}
        found = [{"at": at, **place} for at, place in places.items() if place]
        return {"hex": raw.hex(), "pointers": found}
    share = 2 if tensor.bits == 4 else 1
    return {
        **_place(file, tensor.address),
        "type": _TYPES[tensor.bits * share],
        "swizzle": tensor.swizzle,
        "dims": [tensor.dims[0] // share, *tensor.dims[1:]],
        "strides": list(tensor.strides),
        "box": [tensor.box[0] // share, *tensor.box[1:]],
    }


def software(nvcc: str, *, rolled: bool) -> str:
    """The functions that stand for what Hopper lacks, as PTX."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "software.ptx"
        source = Path(__file__).with_name("software.cu")
        command = [nvcc, ARCH, "-ptx", "-rdc=true", "-o", str(made), str(source)]
        command += ["-DROLLED"] if rolled else []
        subprocess.run(command, check=True)
        return functions_of(made.read_text())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("into", type=Path)
    parser.add_argument("--nvcc", default="nvcc", help="of CUDA 13.0 or later")
    parser.add_argument("--late", choices=(*_LATE, COPY), default="", help="warps that wait")
    parser.add_argument("--rolled", action="store_true", help="a slower MMA")
    parser.add_argument("--without", default="", help="a regular expression for lines to take out")
    parser.add_argument("--only", default="", help="a regular expression for the launches' names")
    given = parser.parse_args()
    functions = software(given.nvcc, rolled=given.rolled)
    of_several, packed = False, 0
    for path in sorted(given.source.rglob("launch.json")):
        file = read_launch(path)
        name = "-".join(path.parent.relative_to(given.source).parts)
        if file.expected is None or of_several:
            print(f"{name}: {file.name}: not packed, one of several launches of a call", flush=True)
        elif re.search(given.only, file.name):
            ptx = late_copy(file.ptx) if given.late == COPY else file.ptx
            ptx = late(ptx, given.late) if given.late in _LATE else ptx
            ptx = without(ptx, given.without) if given.without else ptx
            pack(file, path, given.into / name, given.nvcc, functions, ptx)
            print(f"{name}: {file.name}", flush=True)
            packed += 1
        of_several = file.expected is None
    if not packed:
        raise SystemExit(f"error: no launch below {given.source} was packed")
    shutil.copy(Path(__file__).with_name("run.py"), given.into)


if __name__ == "__main__":
    main()
