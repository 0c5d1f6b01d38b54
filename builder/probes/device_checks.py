"""Level ``device``: each kernel that the plan expects, run on this GPU by the image's own vLLM.

Standard library only; the work is done by ``device_probe.py`` in a process for each kind, because a
kernel that traps takes its process with it.  What is expected of each comes from ``device.json``,
which was baked in with the plan: names of the kernel in the profiler, names that it must
not show, shapes, and the kernel's operand type.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from typing import Any

from builder.probes import device_environment, device_probe, verify_checks

LEVEL = "device"
#: Seconds for one kind.  FlashInfer compiles its CUTLASS kernels when they are first called, which
#: takes minutes on the Spark's cores.
TIMEOUT = 1800.0
BOUND = "every value within its bound of the exact product"

Json = dict[str, Any]


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
    environment, trouble = device_environment.look()
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
