"""Compiles one kernel in a child process, and collects the compiler's output.

It runs next to ``codegen_probe.py`` under the target's interpreter, with the standard library and
the target's packages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from builder.probes.codegen_kernels import KINDS, SLOW, Compiled

ANSI = re.compile(r"\x1b\[[0-9;]*m")

Json = dict[str, Any]


class Refused(Exception):
    """An error with its stage."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(str(error))
        self.stage = stage
        self.error = error


def build(ask: Json) -> BaseException | None:
    """Call one kernel's function until its compiler returns; return the compiler's error, if any.

    Raises:
        Refused: the function failed before compiling, or did not compile anything.
    """
    try:
        KINDS[ask["kind"]](ask)
    except Compiled as end:
        return end.__cause__
    except Exception as error:
        raise Refused("call", error) from error
    raise Refused("call", RuntimeError("the function returned without compiling anything"))


def describe(error: BaseException, stage: str) -> Json:
    """Convert an error to its form in the result."""
    message = ANSI.sub("", str(error)).strip()
    return {"type": type(error).__name__, "message": message[:4000], "stage": stage}


def kept_file(path: Path) -> Json:
    """One file that the compiler wrote."""
    data = path.read_bytes()
    kind = path.suffix.removeprefix(".")
    value: Json = {"name": path.name, "kind": kind, "size": len(data)}
    value["sha256"] = hashlib.sha256(data).hexdigest()
    if kind == "cubin":
        value["base64"] = base64.b64encode(data).decode("ascii")
    return value


def read_ptx(path: Path) -> Json:
    """The directives at the top of a PTX file, and the kernels in it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    version = re.search(r"^\.version\s+(\S+)", text, re.MULTILINE)
    target = re.search(r"^\.target\s+([^\s,]+)", text, re.MULTILINE)
    return {
        "ptx_version": version[1] if version else None,
        "target": target[1] if target else None,
        "entries": re.findall(r"^\.visible \.entry (\w+)", text, re.MULTILINE),
    }


def empty_reply(ask: Json) -> Json:
    """Make an empty reply."""
    nothing: Json = {"target": None, "ptx_version": None, "entries": [], "files": []}
    named = {
        "kind": ask.get("kind"),
        "request": ask,
        "compiled": False,
        "error": None,
        "loading": None,
    }
    return {**named, **nothing, "seconds": 0.0}


def compile_kernel(ask: Json, folder: Path) -> Json:
    """Compile one kernel and collect the output; called in a child process."""
    reply = empty_reply(ask)
    begun = time.monotonic()
    error: BaseException | None
    try:
        error = build(ask)
        if error is not None:
            reply["error"] = describe(error, "compile")
    except Refused as refused:
        reply["error"] = describe(refused.error, refused.stage)
    reply["seconds"] = round(time.monotonic() - begun, 2)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".ptx", ".cubin"))
    reply["files"] = [kept_file(path) for path in files]
    for path in files:
        if path.suffix == ".ptx":
            reply.update(read_ptx(path))
    finished = any(file["kind"] == "cubin" and file["size"] for file in reply["files"])
    if ask["kind"] == "mma-gate":
        finished = reply["error"] is None
    reply["compiled"] = finished
    if finished:
        reply.update(error=None, loading=reply["error"])
    elif reply["error"] is None:
        words = RuntimeError("the compiler returned and wrote no cubin")
        reply["error"] = describe(words, "compile")
    return reply


Work = Callable[[Json, Path], Json]


def run_child(ask: Json, folder: Path, answer: Path, work: Work) -> NoReturn:
    """Run a child: do the work, write the reply, exit without Python's clean-up."""
    status = 1
    try:
        folder.mkdir()
        os.chdir(folder)
        answer.write_text(json.dumps(work(ask, folder)), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def in_children(
    kernels: list[Json],
    jobs: int,
    scratch: Path,
    work: Work,
    crashed: Callable[[Json, Json], Json],
) -> list[Json]:
    """Process each kernel in a child, several at a time; the slowest first.

    ``crashed`` makes the reply if a child ended without one.
    """
    running: dict[int, int] = {}
    codes: dict[int, int] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        if child in running:
            codes[running.pop(child)] = os.waitstatus_to_exitcode(status)

    slow = [n for n, ask in enumerate(kernels) if ask["kind"] in SLOW]
    for number in sorted(range(len(kernels)), key=lambda n: n not in slow):
        while len(running) >= max(1, jobs):
            wait_for_one()
        child = os.fork()
        if child == 0:
            names = f"kernel-{number}", f"reply-{number}.json"
            folder, answer = (scratch / name for name in names)
            run_child(kernels[number], folder, answer, work)
        running[child] = number
    while running:
        wait_for_one()
    replies = []
    for number, ask in enumerate(kernels):
        answer = scratch / f"reply-{number}.json"
        if answer.exists():
            replies.append(json.loads(answer.read_text(encoding="utf-8")))
            continue
        code = codes[number]
        words = f"signal {-code}" if code < 0 else f"exit status {code}"
        message = f"the child ended with {words}"
        replies.append(crashed(ask, {"type": "Crashed", "message": message, "stage": "crash"}))
    return replies


def compile_all(kernels: list[Json], jobs: int, scratch: Path) -> list[Json]:
    """Compile each kernel in a child."""

    def crashed(ask: Json, error: Json) -> Json:
        return {**empty_reply(ask), "error": error}

    return in_children(kernels, jobs, scratch, compile_kernel, crashed)
