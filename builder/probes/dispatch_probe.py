"""Query an installed vLLM for the kernels that it would select on a simulated device.

This file and its siblings (``dispatch_*.py``, ``stub_driver.py``) run under the *target's*
interpreter (inside an image, or in a sandbox that holds vLLM's Python files, its Python
dependencies and a CPU build of torch), so they may import nothing of the builder: the standard
library, each other, and the target's packages.

    python dispatch_probe.pyz < request.json > result.json

vLLM selects kernels in ordinary Python: it reads the compute capability from its platform object,
calls a few host functions of its extension modules about their build, and tests whether
FlashInfer is usable. The probe sets the requested capability, lets
the real extension modules answer if they load, and then calls the release's own
selection entry points. Names and log lines in the result are vLLM's; every part that was
replaced is listed under ``simulated``.

Request (every key may be left out)::

    {"paths": ["dirs to put first on sys.path"], "env": {"NAME": "value, or null to unset"},
     "capability": [12, 1], "cuda_version": "13.0", "device_name": "NVIDIA GB10",
     "extensions": {"vllm._C_stable_libtorch": "that module's file for this machine"},
     "libraries": ["shared libraries to load before them"],
     "stub_modules": "auto" | "none", "pretend_nvcc": false, "pretend_triton": false,
     "ask": [{"kind": KIND, "env": {...}, "linear_backend": "auto", "moe_backend": "auto",
              "linear_backend_per_quant": {...}, "model_type": "llama"}],
     "choices": [KIND, ...]}

A KIND is one of `dispatch_kinds.KINDS`. ``pretend_nvcc`` and ``pretend_triton`` stand for a
compiler and a package that FlashInfer needs to count as usable, and ``extensions``
for modules that a target does not have for this machine; use them if a sandbox leaves them
out, never for an image. ``env`` of an ask is added to the request's for that ask only.
``choices`` adds an ask for every explicit choice that the release offers for a kind. Each ask runs
in its own forked child, so that vLLM's "log this once" caches and cached environment of one ask
cannot hide the lines of another.

Result::

    {"schema": 2, "python": "...", "versions": {"vllm": "...", ...}, "answers": [...],
     "choices": [...], "simulated": ["..."], "real": ["..."], "not_found": ["..."],
     "fatal": null | {...}}

An answer is ``{"kind", "request", "selected", "implementation", "lines", "debug", "error",
"not_applicable"}``. ``lines`` are the messages that vLLM logged at INFO or above during the call,
``debug`` those below, with the reason why a release skipped a backend. ``not_applicable`` says
why a release cannot be queried; then nothing was selected and nothing failed. ``real`` names the
extension modules that really loaded, ``not_found`` the modules that something tried to import and
nobody has. The exit status is 0 whenever a result was written.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import tempfile
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn, cast

from builder.probes import dispatch_kinds, dispatch_modules, dispatch_prepare, dispatch_settings
from builder.probes.dispatch_device import Probe
from builder.probes.dispatch_kinds import NotAskableError
from builder.probes.dispatch_settings import choices
from builder.probes.simulated_device import apply_environment, claim_stdout, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


SCHEMA = 2
DISTRIBUTIONS = ("vllm", "flashinfer-python", "nvidia-cutlass-dsl", "torch")
#: Releases from 0.24.0 on exclude some models' FP8 layers from DeepGEMM; this model is not
#: excluded.
MODEL_TYPE = "llama"
#: Child processes at the same time: one per processor, with a limit for the sake of memory.
AT_A_TIME = min(4, len(os.sched_getaffinity(0)))

Json = dict[str, Any]


@contextlib.contextmanager
def stand_in_triton(probe: Probe) -> Iterator[None]:
    """If Triton is not installed, let FlashInfer define its Triton kernels with a stand-in.

    Only during FlashInfer's import: vLLM and torch must continue without Triton, as they
    do on any machine without a GPU.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.__dict__.update(__path__=[], jit=lambda function: function, language=language)
    language.__dict__.update(constexpr=object)
    stand_ins = {"triton": triton, "triton.language": language}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
    probe.note("triton: a stand-in while FlashInfer is imported")


def warm_up(request: Json, probe: Probe) -> None:
    """Import the shared modules, and build one configuration to trigger its imports."""
    kinds = [ask.get("kind", "") for ask in request.get("ask", [])] + request.get("choices", [])
    with contextlib.suppress(Exception):
        importlib.import_module("vllm.config").VllmConfig()
    for name in dispatch_kinds.warm_modules(kinds):
        pretended = name.startswith("flashinfer") and request.get("pretend_triton")
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            if pretended:
                stack.enter_context(stand_in_triton(probe))
            importlib.import_module(name)


# --- asking, one child each --------------------------------------------------------------------


class Recorder(logging.Handler):
    """Records the messages of vLLM's loggers, those below INFO separately."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.debug: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        kept = self.lines if record.levelno >= logging.INFO else self.debug
        kept.append(record.getMessage())


@contextlib.contextmanager
def attached(recorder: Recorder) -> Iterator[None]:
    """Record everything that vLLM logs, at any log level."""
    logger = logging.getLogger("vllm")
    logger.addHandler(recorder)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(recorder)


def select(ask: Json, probe: Probe, recorder: Recorder) -> tuple[str, str]:
    """Configure the release as requested, and call its entry point; only that call is recorded."""
    kind = str(ask.get("kind"))
    kinds = dispatch_kinds.KINDS
    if kind not in kinds:
        raise NotAskableError(f"unknown kind {kind!r}; known: {', '.join(kinds)}")
    apply_environment(ask.get("env", {}))
    kernel = dispatch_settings.kernel_config(ask)
    question = dispatch_kinds.Question(getattr(kernel, "moe_backend", "auto"))
    model_type = ask.get("model_type", MODEL_TYPE) if kind == "fp8-block" else None
    config = dispatch_settings.vllm_config(kernel, probe, model_type)
    current = importlib.import_module("vllm.config").set_current_vllm_config
    with current(config), attached(recorder):
        return kinds[kind](question)


def describe(error: BaseException) -> Json:
    """Convert an error to its form in the result."""
    return {"type": type(error).__name__, "message": str(error)}


def empty_answer(ask: Json) -> Json:
    """Make an empty answer."""
    named: Json = {"kind": ask.get("kind"), "request": ask, "selected": None}
    return {
        **named,
        "implementation": None,
        "lines": [],
        "debug": [],
        "error": None,
        "not_applicable": None,
    }


def answer(ask: Json, probe: Probe) -> Json:
    """Query vLLM once; called in a child process."""
    recorder = Recorder()
    reply = {**empty_answer(ask), "lines": recorder.lines, "debug": recorder.debug}
    try:
        reply["selected"], reply["implementation"] = select(ask, probe, recorder)
    except NotAskableError as error:
        reply["not_applicable"] = str(error)
    except Exception as error:
        traceback.print_exc()
        reply["error"] = describe(error)
    return reply


class Child:
    """A forked process that answers one query, and its pipe."""

    def __init__(self, ask: Json, probe: Probe) -> None:
        self.ask = ask
        self.reading, writing = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            self._answer(probe, writing)
        os.close(writing)

    def _answer(self, probe: Probe, writing: int) -> NoReturn:
        status = 1
        try:
            os.close(self.reading)
            reply = answer(self.ask, probe)
            payload = {
                "reply": reply,
                "simulated": probe.simulated,
                "real": dispatch_modules.real_extensions(),
                "not_found": sorted(probe.not_found.names),
            }
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                json.dump(payload, pipe)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)

    def payload(self) -> Json:
        """Wait for the answer, with the child's simulated, loaded and missing modules."""
        with os.fdopen(self.reading, encoding="utf-8") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if code == 0 and text:
            return cast("Json", json.loads(text))
        words = f"signal {-code}" if code < 0 else f"exit status {code}"
        error = {"type": "Crashed", "message": f"the child that asked ended with {words}"}
        reply = {**empty_answer(self.ask), "error": error}
        return {"reply": reply, "simulated": [], "real": [], "not_found": []}


def answers_to(asks: Sequence[Json], probe: Probe, result: Json) -> Iterator[Json]:
    """Query in child processes, several at a time; the answers are in order.

    Simulated, loaded and missing modules of the children are added to ``probe`` and ``result``.
    """
    running: collections.deque[Child] = collections.deque()
    waiting = collections.deque(asks)
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            running.append(Child(waiting.popleft(), probe))
        payload = running.popleft().payload()
        for words in payload["simulated"]:
            probe.note(words)
        result["real"] = sorted({*result["real"], *payload["real"]})
        probe.not_found.names.update(payload["not_found"])
        yield payload["reply"]


def fatal_error(error: BaseException) -> Json:
    """Describe an error that prevents every query, with the end of its traceback."""
    tail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {**describe(error), "traceback_tail": tail.splitlines()[-15:]}


def run(request: Json) -> Json:
    """Answer a whole request."""
    probe = Probe.of(request)
    result: Json = {"schema": SCHEMA, "python": platform.python_version(), "versions": {}}
    result.update(answers=[], choices=[], simulated=probe.simulated, real=[], fatal=None)
    with tempfile.TemporaryDirectory(prefix="dispatch-probe-") as scratch:
        try:
            kept = dispatch_prepare.prepare(request, probe, scratch)
            warm_up(request, probe)
            gc.freeze()  # what is imported stays: children need not look through it
            result["answers"] += answers_to(request.get("ask", []), probe, result)
            for kind in request.get("choices", []):
                (default,) = answers_to([{"kind": kind}], probe, result)
                offered = choices(kind, default["selected"])
                result["choices"] += answers_to(offered, probe, result)
            del kept
        except Exception as error:
            result["fatal"] = fatal_error(error)
    result.update(versions=versions(DISTRIBUTIONS), not_found=sorted(probe.not_found.names))
    return result


def main() -> int:
    """Read a request from stdin, write the result to stdout."""
    gc.disable()  # nothing but imports, which leave no garbage worth a third of the time
    out = claim_stdout()
    result = run(json.load(sys.stdin))
    json.dump(result, out, indent=2, sort_keys=True)
    out.write("\n")
    out.close()
    return 0
