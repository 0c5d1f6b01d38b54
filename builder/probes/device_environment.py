"""Checks this machine's GPU, driver and memory against the image's needs.

Standard library only.  Queries ``nvidia-smi`` and, in a child process to leave no context, the
driver library itself; reads ``/proc/meminfo``.  On a GB10 memory is one pool for CPU and GPU:
``nvidia-smi`` has no figures for it, and CUDA's free memory does not include the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from builder.probes import verify_checks

LEVEL = "device"
#: GB10.
CAPABILITY = (12, 1)
#: CUDA major version -> the oldest driver that runs any of its minor versions (CUDA Toolkit release
#: notes, table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
#: Compatibility").
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
GIB = 2**30
#: What the kernels and a tiny model with CUDA graphs need.
MEMORY_NEEDED = 8 * GIB
#: Memory that other processes may use without a warning, as a desktop does.
OTHERS_ALLOWED = 4 * GIB
#: Bits of the mask of clock event reasons (NVML, nvmlClocksEventReasons) that slow the GPU down
#: because something is wrong: too hot, or the power supply does not give enough.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
#: cuDeviceGetAttribute: compute capability, and whether memory is the host's.
MAJOR, MINOR, INTEGRATED = 75, 76, 18
GPU_FIELDS = ("name", "driver_version", "temperature.gpu", "power.draw", "clocks.sm")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

Json = dict[str, Any]


class Process(NamedTuple):
    """A process that uses GPU memory; ``memory`` is in bytes, None if the driver hides it."""

    pid: int
    name: str
    memory: int | None


def value_of(cell: str) -> str | None:
    """A cell of nvidia-smi's output, or None if it has no value."""
    text = cell.strip()
    bare = text.strip("[]").lower()
    return None if bare in ("n/a", "not supported", "unknown error", "not found", "") else text


def parse_table(text: str, fields: tuple[str, ...]) -> list[dict[str, str | None]]:
    """Rows of ``--format=csv,noheader,nounits``; rows of another length are ignored."""
    rows = []
    for line in text.splitlines():
        cells = [value_of(cell) for cell in line.split(",")]
        if len(cells) == len(fields):
            rows.append(dict(zip(fields, cells, strict=True)))
    return rows


def parse_processes(text: str) -> list[Process]:
    """Rows of ``--query-compute-apps=pid,used_memory,process_name``; MiB become bytes.

    The name comes last because it may contain commas.
    """
    found = []
    for line in text.splitlines():
        cells = line.split(",", 2)
        if len(cells) == 3 and cells[0].strip().isdigit():
            memory = value_of(cells[1])
            size = int(float(memory)) * 2**20 if memory else None
            found.append(Process(int(cells[0]), cells[2].strip(), size))
    return found


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def slowdowns(mask: str | None) -> list[str] | None:
    """The reasons for low clocks, from the mask; None without a mask."""
    try:
        bits = int(mask or "", 16)
    except ValueError:
        return None
    return [words for bit, words in SLOWDOWNS.items() if bits & bit]


def version_key(text: str) -> tuple[int, ...]:
    """A dotted version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built with, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    file = Path(spec.origin).with_name("version.py")
    with contextlib.suppress(OSError):
        found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", file.read_text(), re.MULTILINE)
        return found[1] if found else None
    return None


# --- asking ------------------------------------------------------------------------------------


def call(command: list[str], timeout: float = 60) -> tuple[int, str]:
    """Exit status (-1: it did not run) and output of a command."""
    try:
        answer = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return answer.returncode, answer.stdout


def ask_smi() -> tuple[list[dict[str, str | None]], list[Process], str]:
    """GPUs and processes from nvidia-smi, and the reason if there are none."""
    words = ""
    for reasons in REASONS:  # older drivers know only the second name
        fields = (*GPU_FIELDS, reasons)
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}"]
        status, text = call([*query, "--format=csv,noheader,nounits"])
        if status == 0:
            rows = parse_table(text, (*GPU_FIELDS, "slowdown"))
            apps = ["nvidia-smi", "--query-compute-apps=pid,used_memory,process_name"]
            status, listed = call([*apps, "--format=csv,noheader,nounits"])
            return rows, parse_processes(listed) if status == 0 else [], ""
        words = text.strip().splitlines()[0] if text.strip() else f"exit status {status}"
    return [], [], f"nvidia-smi: {words}"


def driver_facts() -> Json:
    """Facts of the driver library about itself and device 0; run in a child process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"libcuda.so.1: {error}"}
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    facts: Json = {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}
    status, count = cuda.cuInit(0), ctypes.c_int()
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or not count.value:
        return {**facts, "error": f"the driver finds no device (CUDA error {status})"}
    device, number = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    for name, attribute in (("major", MAJOR), ("minor", MINOR), ("integrated", INTEGRATED)):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        facts[name] = number.value
    context = ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status == 0:
        cuda.cuCtxSetCurrent(context)
        status = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if status != 0:
        return {**facts, "error": f"no context on the device (CUDA error {status})"}
    return {**facts, "free": free.value, "total": total.value}


def ask_driver() -> Json:
    """Run :func:`driver_facts` in a child, whose context ends with it."""
    status, text = call(verify_checks.command(__name__), timeout=120)
    try:
        facts: Json = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"asking the driver ended with {status}: {text.strip()[-200:]}"}
    return facts


# --- checks ------------------------------------------------------------------------------------


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.1f} GiB"


def check_driver(driver: str | None, facts: Json, wanted: str | None) -> list[Json]:
    """Is the driver new enough for the CUDA that torch was built with?"""
    if not wanted:
        reason = (
            "torch is missing or was built without CUDA, so the required CUDA version is unknown"
        )
        return [verify_checks.not_run(LEVEL, "driver", "new enough for torch's CUDA", reason)]
    major = version_key(wanted)[0]
    oldest = OLDEST_DRIVER.get(major)
    checks = []
    if driver and oldest:
        good = version_key(driver) >= version_key(oldest)
        expected = f">= {oldest} (torch is built for CUDA {wanted})"
        reason = "" if good else "update the driver of the host"
        checks.append(
            verify_checks.check(
                LEVEL, "driver", good, expected, driver, where="nvidia-smi", reason=reason
            )
        )
    has = version_key(facts.get("cuda", "0"))
    reason = ""
    if has[0] >= major and has < version_key(wanted):
        reason = "older minor version: it runs compiled code, but cannot compile newer PTX"
    expected = f"CUDA {major} or later"
    seen = f"CUDA {facts.get('cuda', '?')}"
    good = has[0] >= major
    checks.append(
        verify_checks.check(
            LEVEL, "cuda", good, expected, seen, where="libcuda.so.1", reason=reason
        )
    )
    return checks


def check_memory(facts: Json, meminfo: dict[str, int]) -> Json:
    """Is there enough memory, and if not, who uses it?"""
    free, available = int(facts["free"]), meminfo.get("MemAvailable", 0)
    swap = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    seen = f"{gib(free)} of {gib(facts['total'])} free"
    unified = bool(facts.get("integrated"))
    if unified:
        seen += f"; unified: {gib(available)} available to the system, {gib(swap)} swapped out"
    good = free >= MEMORY_NEEDED
    reason = ""
    if unified and available > free + 2 * GIB:
        reason = (
            f"{gib(available - free)} more would be free without the page cache, which CUDA does "
            "not count: sync; echo 3 > /proc/sys/vm/drop_caches on the host"
        )
    return dict(
        verify_checks.check(
            LEVEL,
            "memory",
            good,
            f"at least {gib(MEMORY_NEEDED)} free",
            seen,
            where="cuMemGetInfo, /proc/meminfo",
            reason=reason,
        )
    )


def check_processes(processes: list[Process]) -> Json:
    """Do other processes use memory that a server would count on for its KV cache?"""
    known = sum(process.memory or 0 for process in processes)
    listed = ", ".join(
        f"{p.name or '?'} (pid {p.pid}): {gib(p.memory) if p.memory is not None else 'unknown'}"
        for p in processes
    )
    return dict(
        verify_checks.check(
            LEVEL,
            "other processes",
            known <= OTHERS_ALLOWED,
            f"other processes use at most {gib(OTHERS_ALLOWED)} of GPU memory",
            listed or "none",
            where="nvidia-smi, which in a container may not see the host's processes",
        )
    )


def check_slowdown(gpu: dict[str, str | None]) -> Json:
    """Is the GPU throttled now?"""
    expected = "only idleness or the power limit reduces the clocks"
    held = slowdowns(gpu.get("slowdown"))
    if held is None:
        reason = "nvidia-smi gives no clock event reasons here"
        return dict(verify_checks.not_run(LEVEL, "slowdown", expected, reason))
    now = [
        f"{gpu[field]} {unit}"
        for field, unit in (("clocks.sm", "MHz"), ("temperature.gpu", "C"), ("power.draw", "W"))
        if gpu.get(field)
    ]
    seen = "; ".join([", ".join(held) or "none", *now])
    reason = "benchmark figures would be those of a throttled GPU: check cooling and power supply"
    return dict(
        verify_checks.check(
            LEVEL,
            "slowdown",
            not held,
            expected,
            seen,
            where="nvidia-smi",
            reason=reason if held else "",
        )
    )


def judge(
    smi: tuple[list[dict[str, str | None]], list[Process], str],
    facts: Json,
    meminfo: dict[str, int],
    wanted: str | None,
) -> list[Json]:
    """All checks of the environment, from the collected facts."""
    gpus, processes, trouble = smi
    gpu = gpus[0] if gpus else {}
    checks = check_driver(gpu.get("driver_version"), facts, wanted)
    seen = f"{facts['major']}.{facts['minor']} ({gpu.get('name') or 'a GPU'})"
    good = (facts["major"], facts["minor"]) == CAPABILITY
    reason = (
        ""
        if good
        else "the image is made for GB10; here its kernels may fail, or others may be selected"
    )
    checks.append(
        verify_checks.check(
            LEVEL, "capability", good, "12.1 (GB10)", seen, where="libcuda.so.1", reason=reason
        )
    )
    checks.append(check_memory(facts, meminfo))
    if gpus:
        checks += [check_processes(processes), check_slowdown(gpu)]
    else:
        expected = "nvidia-smi answers"
        checks.append(verify_checks.not_run(LEVEL, "other processes", expected, trouble))
        checks.append(verify_checks.not_run(LEVEL, "slowdown", expected, trouble))
    return checks


def look() -> tuple[list[Json], str]:
    """The environment's checks, and the reason if there is no usable GPU (else empty)."""
    facts = ask_driver()
    if "error" in facts:
        return [], str(facts["error"])
    meminfo: dict[str, int] = {}
    with contextlib.suppress(OSError):
        meminfo = parse_meminfo(Path("/proc/meminfo").read_text())
    return judge(ask_smi(), facts, meminfo, cuda_of_torch()), ""


def main() -> int:
    """Print the driver's answers."""
    print(json.dumps(driver_facts()))
    return 0
