"""Compute Sanitizer on a GPU, on the programs of `benchmarks.race_suites`.

    python -m benchmarks.hopper.sanitizer write FOLDER hecbench gpurepair --suites /tmp/suites
    python3 benchmarks/hopper/sanitizer.py gpu FOLDER   # needs numpy, the driver, compute-sanitizer

``write`` compiles each program to PTX for SM90 and puts its launches, with their arguments, into
the folder: ``--suites`` has a clone of each suite.  ``gpu`` has ``racecheck`` examine each launch,
``synccheck`` those of Weft, and prints what they report.  The sanitizer's racecheck is for shared
memory only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
SHARED_LIMIT = 8
#: Seconds for a program: those that wait for ever are ended.
PATIENCE = 20


def write(folder: Path, clones: Path, suites: list[str]) -> None:
    """Compile the programs, and write their launches."""
    from benchmarks import race_suites

    race_suites.NVCC = tuple(
        "-arch=compute_90" if word.startswith("-arch") else word for word in race_suites.NVCC
    )
    folder.mkdir(parents=True, exist_ok=True)
    cases: list[dict[str, Any]] = []
    for suite in suites:
        for program in race_suites.SUITES[suite].programs(clones / suite):
            try:
                ptx = race_suites.compiled(program, folder / "ptx")
            except RuntimeError as error:
                print(f"{suite} {program.name}: {error}")
                continue
            kernels = re.findall(r"\.entry\s+([\w$]+)", ptx)
            for kernel in (name for name in kernels if re.search(program.kernel, name)):
                given = program.given or race_suites.arguments(ptx, kernel)
                arrays = [
                    np.frombuffer(one, np.uint8) if isinstance(one, bytes) else np.asarray(one)
                    for one in given
                ]
                for grid, block in program.launches:
                    name = f"{len(cases):03}"
                    (folder / f"{name}.ptx").write_text(ptx)
                    np.savez_compressed(folder / f"{name}.npz", *arrays)
                    cases.append(
                        {
                            "case": name, "suite": suite, "program": program.name,
                            "racy": program.racy, "kernel": kernel, "shared": program.shared,
                            "grid": _three(grid), "block": _three(block),
                            "pointers": [
                                isinstance(one, np.ndarray) and one.ndim > 0 for one in given
                            ],
                        }
                    )  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    print(f"{len(cases)} launches")


def _three(size: Any) -> list[int]:
    sizes = [size] if isinstance(size, int) else [*size]
    return [*sizes, 1, 1][:3]


def launch(folder: Path, name: str) -> None:
    """Launch a case once.

    Raises:
        SystemExit: the driver refuses it, or the kernel fails.
    """
    case = next(
        one for one in json.loads((folder / "cases.json").read_text()) if one["case"] == name
    )
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *words: Any) -> None:
        if code := getattr(cuda, function)(*words):
            raise SystemExit(f"{function}: {code}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), (folder / f"{name}.ptx").read_bytes() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(kernel), module, case["kernel"].encode())
    call("cuFuncSetAttribute", kernel, SHARED_LIMIT, case["shared"])
    values: list[Any] = []
    with np.load(folder / f"{name}.npz") as arrays:
        for key, pointer in zip(arrays.files, case["pointers"], strict=True):
            data = np.ascontiguousarray(arrays[key])
            if pointer:
                address = ctypes.c_uint64()
                call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
                words = data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes)
                call("cuMemcpyHtoD_v2", address, *words)
                values.append(address)
            else:
                values.append(ctypes.create_string_buffer(data.tobytes(), max(data.nbytes, 8)))
    places = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
    table = (ctypes.c_void_p * len(places))(*places)
    sizes = (*case["grid"], *case["block"], case["shared"])
    call("cuLaunchKernel", kernel, *sizes, None, table, None)
    call("cuCtxSynchronize")


def examine(folder: Path) -> None:
    """Have the sanitizer examine each case; print a row for each program, and the sums."""
    programs: dict[tuple[str, str, bool], list[str]] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        key = case["suite"], case["program"], case["racy"]
        programs.setdefault(key, []).append(_report(folder, case))
    sums: dict[str, dict[str, int]] = {}
    for (suite, program, racy), reports in programs.items():
        failed = any(one.startswith("failed") for one in reports)
        reported = any(one not in ("0 hazards", "0 errors") for one in reports)
        column = ("found" if reported else "missed") if racy else "alarm" if reported else "silent"
        column = "not run" if failed else column
        sums.setdefault(suite, {}).setdefault(column, 0)
        sums[suite][column] += 1
        print(f"{suite} | {program} | {column} | {'; '.join(reports)}", flush=True)
    print(json.dumps(sums))


def _report(folder: Path, case: dict[str, Any]) -> str:
    tool = "synccheck" if case["suite"] == "weft" else "racecheck"
    own = (sys.executable, __file__, "launch", str(folder), case["case"])
    words = ("compute-sanitizer", "--tool", tool, *own)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return "does not end"
    text = done.stdout + done.stderr
    found = re.search(r"SUMMARY: (\d+ (?:hazard|error)s?)", text)
    if "cuLaunchKernel:" in text or "cuModule" in text or not found:
        return f"failed: {text[-200:]!r}"
    return found[1]


def main() -> None:
    """Write or examine cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["write", "gpu", "launch"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--suites", type=Path, help="a folder with a clone of each suite")
    given = parser.parse_args()
    if given.action == "write":
        write(given.folder, given.suites, given.names)
    elif given.action == "launch":
        launch(given.folder, given.names[0])
    else:
        examine(given.folder)


if __name__ == "__main__":
    main()
