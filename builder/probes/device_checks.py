"""Level ``device``: this machine's GPU, driver and memory, then each kernel that the plan expects.

Standard library only.  Queries ``nvidia-smi`` and, in a child process to leave no context, the
driver library itself; reads ``/proc/meminfo``.  On a GB10 memory is one pool for CPU and GPU:
``nvidia-smi`` has no figures for it, and CUDA's free memory does not include the page cache.

Kernels are run by the image's own vLLM: ``device_probe.py`` does that in a process for each kind,
because a kernel that traps takes its process with it.  What is expected of each comes from
``device.json``, which was baked in with the plan: names of the kernel in the profiler, names that
it must not show, shapes, and the kernel's operand type.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from builder.probes import device_probe, verify_checks

# -------------------------------------------------------------------------------------- the machine

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
    processes = []
    for line in text.splitlines():
        cells = line.split(",", 2)
        if len(cells) == 3 and cells[0].strip().isdigit():
            memory = value_of(cells[1])
            size = int(float(memory)) * 2**20 if memory else None
            processes.append(Process(int(cells[0]), cells[2].strip(), size))
    return processes


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(size) * 1024 for name, size in rows}


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
        match = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", file.read_text(), re.MULTILINE)
        return match[1] if match else None
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
    reasons = slowdowns(gpu.get("slowdown"))
    if reasons is None:
        reason = "nvidia-smi gives no clock event reasons here"
        return dict(verify_checks.not_run(LEVEL, "slowdown", expected, reason))
    now = [
        f"{gpu[field]} {unit}"
        for field, unit in (("clocks.sm", "MHz"), ("temperature.gpu", "C"), ("power.draw", "W"))
        if gpu.get(field)
    ]
    seen = "; ".join([", ".join(reasons) or "none", *now])
    reason = "benchmark figures would be those of a throttled GPU: check cooling and power supply"
    return dict(
        verify_checks.check(
            LEVEL,
            "slowdown",
            not reasons,
            expected,
            seen,
            where="nvidia-smi",
            reason=reason if reasons else "",
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


# ------------------------------------------------------------------------------------------ kernels

#: Seconds for one kind.  FlashInfer compiles its CUTLASS kernels when they are first called, which
#: takes minutes on the Spark's cores.
TIMEOUT = 1800.0
BOUND = "every value within its bound of the exact product"


class Probe:
    """One run of the probe: its events, and how it ended."""

    def __init__(self, request: Json, *, command: list[str] | None = None, timeout: float) -> None:
        self.events: list[Json] = []
        self.ended = ""
        self.tail: list[str] = []
        self._run(request, command or verify_checks.command(device_probe.__name__), timeout)

    def of(self, event: str) -> list[Json]:
        """Events of one name."""
        return [item for item in self.events if item["event"] == event]

    def _run(self, request: Json, command: list[str], timeout: float) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            late = threading.Event()

            def expire() -> None:
                late.set()
                kill_group(process.pid)

            timer = threading.Timer(timeout, expire)
            timer.start()
            try:
                self._read(process, request)
            finally:
                timer.cancel()
                kill_group(process.pid)
                status = process.wait()
            if late.is_set():
                self.ended = f"did not end within {timeout:.0f} s"
            elif not self.of("end"):
                words = f"signal {-status}" if status < 0 else f"exit status {status}"
                self.ended = f"ended with {words}"
            errors.seek(0)
            self.tail = errors.read().splitlines()[-12:]

    def _read(self, process: subprocess.Popen[str], request: Json) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request))
            process.stdin.close()
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))


def kill_group(pid: int) -> None:
    """End a process with its own session, and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# --- from events to checks ---------------------------------------------------------------------


def case_check(kind: str, case: Json) -> Json:
    """The check of one input."""
    problems = case["problems"]
    worst, relative = case.get("worst"), case.get("relative")
    seen = "; ".join(problems) if problems else f"largest error {worst:.2g} of its bound"
    if not problems and relative is not None:
        seen += f", {relative:.2g} of the whole"
    name = f"{kind} {case['name']} {case['shape']}"
    return dict(verify_checks.check(LEVEL, name, not problems, BOUND, seen))


def executed_check(kind: str, kernel: Json, names: list[str]) -> Json:
    """Did the expected kernels run, and none of another backend?"""
    wanted, never = kernel["names"], kernel["never"]
    expected = f"a kernel named {' or '.join(wanted)}"
    if never:
        expected += f", none named {' or '.join(never)}"
    name, where = f"{kind} executed", "torch.profiler (CUPTI)"
    bad = [n for n in names if any(re.search(pattern, n, re.IGNORECASE) for pattern in never)]
    if not wanted and not bad:
        reason = f"no kernel names are known for {kernel['line']!r}"
        return dict(verify_checks.not_run(LEVEL, name, expected, reason, where))
    if not names:
        reason = "the profiler saw no kernel on the GPU: CUPTI is not usable here"
        return dict(verify_checks.not_run(LEVEL, name, expected, reason, where))
    hits = [n for n in names if any(re.search(pattern, n) for pattern in wanted)]
    shown = bad or hits or names
    seen = "; ".join(short(n) for n in shown[:4])
    return dict(
        verify_checks.check(LEVEL, name, bool(hits) and not bad, expected, seen, where=where)
    )


def short(name: str, limit: int = 160) -> str:
    """A kernel's name, which can be thousands of characters of template arguments."""
    return name if len(name) <= limit else f"{name[: limit - 3]}..."


def selected_check(kind: str, line: str, selected: Json) -> Json:
    """Did the release's own layer select what the profile expects?"""
    lines = selected["lines"]
    good = any(line in text for text in lines)
    methods = ", ".join(dict.fromkeys(map(str, selected["kernel"])))
    seen = next((text for text in lines if line in text), "; ".join(lines) or methods)
    where = f"log of vllm; the layer's kernel is {methods}"
    return dict(verify_checks.check(LEVEL, f"{kind} selected", good, line, seen, where=where))


def error_check(kind: str, probe: Probe) -> Json | None:
    """The check for a run that ended early."""
    expected = "every case runs"
    done = probe.of("case")
    after = f" after {done[-1]['name']} {done[-1]['shape']}" if done else " before the first case"
    for error in probe.of("error"):
        words = f"{error['type']}: {' '.join(str(error['message']).split())[:400]}"
        if error["stage"] == "profiler":
            continue
        if error["type"] == "UnknownLayerError":
            return dict(verify_checks.not_run(LEVEL, f"{kind} ran", expected, words))
        reason = " | ".join(error["tail"][-4:])
        seen = words + after
        return dict(verify_checks.check(LEVEL, f"{kind} ran", False, expected, seen, reason=reason))
    if probe.ended:
        reason = " | ".join(probe.tail[-4:])
        seen = f"the process {probe.ended}{after}"
        return dict(verify_checks.check(LEVEL, f"{kind} ran", False, expected, seen, reason=reason))
    return None


def checks_of(kind: str, kernel: Json, probe: Probe) -> list[Json]:
    """All checks of one run."""
    checks = []
    if kernel["line"]:
        checks = [selected_check(kind, kernel["line"], item) for item in probe.of("selected")]
    checks += [case_check(kind, case) for case in probe.of("case")]
    failed = error_check(kind, probe)
    if failed is not None:
        checks.append(failed)
    elif not probe.of("case"):
        seen = "the probe ended without a case"
        checks.append(verify_checks.check(LEVEL, f"{kind} ran", False, "cases", seen))
    elif kernel["line"]:
        names = [name for item in probe.of("kernels") for name in item["names"]]
        checks.append(executed_check(kind, kernel, names))
    return checks


# --- the level ---------------------------------------------------------------------------------

#: torch's own product of the same operands, on the same GPU: it must be within the same bounds.
REFERENCE: Json = {"kind": "reference", "line": "", "names": [], "never": [], "shapes": None}


def requests(plan: Json, data: Json) -> list[tuple[Json, Json]]:
    """For each expectation of the plan: the facts about its kernel, and the probe's request."""
    flags = [*plan["serve_flags"], *plan["moe_serve_flags"]]
    asked: list[tuple[Json, Json]] = [(REFERENCE, {"kind": "reference"})]
    for kernel in data["kernels"]:
        request = {key: kernel[key] for key in ("kind", "activations", "shapes", "roundings")}
        for name in ("linear-backend", "moe-backend"):
            if f"--{name}" in flags:
                value = flags[flags.index(f"--{name}") + 1]
                request[name.replace("-", "_")] = value
        asked.append((kernel, request))
    return asked


def run(plan: Json, data: Json) -> list[Json]:
    """All checks of the level; without a GPU each is "not run", with the reason."""
    environment, trouble = look()
    if trouble:
        reason = f"no GPU here: {trouble}; on the Spark: {data['command']}"
        expected = [("environment", "a GB10")]
        expected += [(k["kind"], k["line"]) for k, _ in requests(plan, data) if k["line"]]
        return [verify_checks.not_run(LEVEL, name, line, reason) for name, line in expected]
    checks = list(environment)
    for kernel, request in requests(plan, data):
        kind = str(request["kind"])
        if kind not in ("reference", *data["kinds"]):
            reason = f"there is no device check for {kind} layers"
            checks.append(verify_checks.not_run(LEVEL, kind, kernel["line"], reason))
            continue
        verify_checks.say(f"  device: {kind} ...")
        checks += checks_of(kind, kernel, Probe(request, timeout=TIMEOUT))
    return checks
