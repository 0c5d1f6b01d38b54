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
     "seconds": 120.0,
     "ask": [{"kind": KIND, "env": {...}, "linear_backend": "auto", "moe_backend": "auto",
              "linear_backend_per_quant": {...}, "model_type": "llama"}],
     "choices": [KIND, ...]}

A KIND is one of `dispatch_kinds.KINDS`. ``pretend_nvcc`` and ``pretend_triton`` stand for a
compiler and a package that FlashInfer needs to count as usable, and ``extensions``
for modules that a target does not have for this machine; use them if a sandbox leaves them
out, never for an image. ``env`` of an ask is added to the request's for that ask only.
``choices`` adds an ask for every explicit choice that the release offers for a kind. Each ask runs
in its own forked child, so that vLLM's "log this once" caches and cached environment of one ask
cannot hide the lines of another, and a crash or an endless loop spoils no other answer: a child
without an answer after ``seconds`` is killed.  vLLM is imported once, before the first fork.

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

import ast
import collections
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import typing
from select import select as select_ready
from typing import TYPE_CHECKING, Any, NoReturn, cast

from builder.probes import dispatch_device, dispatch_kinds
from builder.probes.dispatch_device import Probe
from builder.probes.dispatch_kinds import NotAskableError
from builder.probes.simulated_device import apply_environment, claim_stdout, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# ---------------------------------------------------------------------------- settings of a release

Json = dict[str, Any]

#: The flag that decides a kind of layer, and the release's type that lists its values.
FLAGS = {
    "nvfp4-linear": ("linear_backend", "LinearBackend"),
    "nvfp4-moe": ("moe_backend", "MoEBackend"),
    "fp8-linear": ("linear_backend", "LinearBackend"),
    "fp8-block": ("linear_backend", "LinearBackend"),
    "w4a16-linear": ("linear_backend", "LinearBackend"),
    "w4a16-moe": ("moe_backend", "MoEBackend"),
}
#: Variables that decide a kind of layer in the releases that read them; None means each of
#: the values that the release itself lists for the variable.
VARIABLES: dict[str, tuple[dict[str, str | None], ...]] = {
    "nvfp4-linear": (
        {"VLLM_NVFP4_GEMM_BACKEND": None},
        {"VLLM_USE_FBGEMM": "1"},
        {"VLLM_USE_NVFP4_CT_EMULATIONS": "1"},
    ),
    "nvfp4-moe": (
        {"VLLM_USE_FLASHINFER_MOE_FP4": "0"},
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1"},
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": None},
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    ),
    "fp8-linear": ({"VLLM_TEST_FORCE_FP8_MARLIN": "1"},),
    "fp8-block": (
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
        {"VLLM_USE_DEEP_GEMM": "0"},
    ),
    "w4a16-linear": ({"VLLM_NVFP4_GEMM_BACKEND": None},),
    "w4a16-moe": (
        {"VLLM_USE_FLASHINFER_MOE_FP4": "0"},
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
        {"VLLM_B12X_MOE_FP4_FORCE_A16": "1"},
    ),
}
#: Backends from packages that vLLM requires: an image has them, but a sandbox may not.
PACKAGES = {"humming": "humming"}
#: From 0.30.0 on: a backend for each scheme, ahead of the one for all.
PER_QUANT = "linear_backend_per_quant"
#: A value that no variable accepts, so that a release's error lists the valid ones.
_NO_VALUE = "no-such-value"


def kernel_config(ask: Json) -> Any:
    """The release's own kernel configuration with the request's backends.

    Creating it is part of the query: a release rejects unknown backends here.
    """
    config_type = importlib.import_module("vllm.config.kernel").KernelConfig
    parameters = inspect.signature(config_type).parameters
    chosen: Json = {}
    for setting in ("linear_backend", "moe_backend"):
        value = ask.get(setting, "auto")
        package = PACKAGES.get(value)
        if package and importlib.util.find_spec(package) is None:
            raise NotAskableError(f"the package {package} is not installed here")
        if setting in parameters:
            chosen[setting] = value
        elif value != "auto":
            raise NotAskableError(f"this release has no {setting} setting")
    if PER_QUANT in ask:
        chosen[PER_QUANT] = ask[PER_QUANT]
    return config_type(**chosen)


def vllm_config(kernel: Any, probe: Probe, model_type: str | None = None) -> Any:
    """The release's configuration object around ``kernel``.

    Its checks use executors and models, which a sandbox may not be able to import; then the
    object is created without them, with only the fields that selection reads.  Some releases read
    the model's configuration too: ``model_type`` simulates a model of that type with 16-bit
    activations.
    """
    config = importlib.import_module("vllm.config")
    try:
        whole = config.VllmConfig(kernel_config=kernel)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        whole = object.__new__(config.VllmConfig)
        whole.__dict__.update(
            kernel_config=kernel,
            model_config=None,
            parallel_config=config.ParallelConfig(),
            compilation_config=config.CompilationConfig(),
        )
        probe.note(f"vllm.config.VllmConfig: made without its own checks ({reason})")
    if model_type is not None:
        torch = importlib.import_module("torch")
        text = types.SimpleNamespace(model_type=model_type)
        model = types.SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, hf_config=text)
        whole.__dict__["model_config"] = model
        probe.note(f"model configuration: only a type ({model_type}) and bfloat16")
    return whole


# --- what a release offers -----------------------------------------------------------------------


def flag_values(kind: str) -> list[str]:
    """Values of the release's flag for this kind, except ``auto``; none without a flag."""
    kernel = importlib.import_module("vllm.config.kernel")
    values = typing.get_args(getattr(kernel, FLAGS[kind][1], None))
    return [value for value in values if value != "auto"]


def variable_values(name: str) -> list[str]:
    """Values that the release lists for a variable, read from its error for a wrong one."""
    reader = importlib.import_module("vllm.envs").environment_variables[name]
    before = os.environ.get(name)
    os.environ[name] = _NO_VALUE
    try:
        reader()
    except ValueError as error:
        listed = re.search(r"\[.*\]", str(error))
        return [str(value) for value in ast.literal_eval(listed[0])] if listed else []
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return []


def _settings(kind: str) -> Iterator[dict[str, str]]:
    known = importlib.import_module("vllm.envs").environment_variables
    for pattern in VARIABLES[kind]:
        if any(name not in known for name in pattern):
            continue
        open_names = [name for name, value in pattern.items() if value is None]
        fixed = {name: value for name, value in pattern.items() if value is not None}
        if not open_names:
            yield fixed
        for name in open_names:
            for value in variable_values(name):
                yield {**fixed, name: value}


def excluded_models() -> list[str]:
    """Model types that the release excludes from DeepGEMM on this device."""
    with contextlib.suppress(ImportError, AttributeError):
        module = importlib.import_module("vllm.utils.deep_gemm")
        types_ = sorted(module._DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES)
        return [name for name in types_ if module.should_auto_disable_deep_gemm(name)]
    return []


def choices(kind: str, default: str | None) -> list[Json]:
    """An ask for every explicit choice that the release offers for a kind of layer.

    ``default`` is its own selection: disabling that shows the next candidate.
    """
    asks: list[Json] = [{"kind": kind, "env": settings} for settings in _settings(kind)]
    if default is not None and default.endswith("Kernel"):
        asks.append({"kind": kind, "env": {"VLLM_DISABLED_KERNELS": default}})
    flag = FLAGS[kind][0]
    asks += [{"kind": kind, flag: value} for value in flag_values(kind)]
    config = importlib.import_module("vllm.config.kernel").KernelConfig
    if flag == "linear_backend" and PER_QUANT in inspect.signature(config).parameters:
        asks.append({"kind": kind, PER_QUANT: {"nvfp4_w4a4": "flashinfer_b12x"}})
    if kind == "fp8-block":
        asks += [{"kind": kind, "model_type": name} for name in excluded_models()]
    return asks


# ------------------------------------------------------------------------------------------ queries

SCHEMA = 2
DISTRIBUTIONS = ("vllm", "flashinfer-python", "nvidia-cutlass-dsl", "torch")
#: Releases from 0.24.0 on exclude some models' FP8 layers from DeepGEMM; this model is not
#: excluded.
MODEL_TYPE = "llama"
#: Child processes at the same time: one per processor, with a limit for the sake of memory.
AT_A_TIME = min(4, len(os.sched_getaffinity(0)))
#: Seconds for one ask.  It takes a tenth of one, and twenty times as long on an emulated processor.
SECONDS = 120.0


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
        lines = self.lines if record.levelno >= logging.INFO else self.debug
        lines.append(record.getMessage())


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
    kernel = kernel_config(ask)
    question = dispatch_kinds.Question(getattr(kernel, "moe_backend", "auto"))
    model_type = ask.get("model_type", MODEL_TYPE) if kind == "fp8-block" else None
    config = vllm_config(kernel, probe, model_type)
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
    """A forked process that answers one query within some seconds, and its pipe."""

    def __init__(self, ask: Json, probe: Probe, seconds: float = SECONDS) -> None:
        self.ask = ask
        self.seconds = seconds
        self.begun = time.monotonic()
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
                "real": dispatch_device.real_extensions(),
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
        text = self._text()
        if text is None:
            os.kill(self.process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if code == 0 and text:
            return cast("Json", json.loads(text))
        words = f"signal {-code}" if code < 0 else f"exit status {code}"
        words = f"ended with {words}" if text is not None else f"took more than {self.seconds:g} s"
        error = {"type": "Crashed", "message": f"the child that asked {words}"}
        reply = {**empty_answer(self.ask), "error": error}
        return {"reply": reply, "simulated": [], "real": [], "not_found": []}

    def _text(self) -> str | None:
        """What the child wrote until it closed the pipe; None if it has no more time."""
        parts: list[bytes] = []
        with os.fdopen(self.reading, "rb", buffering=0) as pipe:
            while True:
                left = self.begun + self.seconds - time.monotonic()
                if not select_ready([pipe], [], [], max(0.0, left))[0]:
                    return None
                part = pipe.read(1 << 16)
                if not part:
                    return b"".join(parts).decode()
                parts.append(part)


def answers_to(asks: Sequence[Json], probe: Probe, result: Json, seconds: float) -> Iterator[Json]:
    """Query in child processes, several at a time; the answers are in order.

    Simulated, loaded and missing modules of the children are added to ``probe`` and ``result``.
    """
    running: collections.deque[Child] = collections.deque()
    waiting = collections.deque(asks)
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            running.append(Child(waiting.popleft(), probe, seconds))
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
    seconds = float(request.get("seconds", SECONDS))
    with tempfile.TemporaryDirectory(prefix="dispatch-probe-") as scratch:
        try:
            stand_ins = dispatch_device.prepare(request, probe, scratch)
            warm_up(request, probe)
            gc.freeze()  # what is imported stays: children need not look through it
            result["answers"] += answers_to(request.get("ask", []), probe, result, seconds)
            for kind in request.get("choices", []):
                (default,) = answers_to([{"kind": kind}], probe, result, seconds)
                offered = choices(kind, default["selected"])
                result["choices"] += answers_to(offered, probe, result, seconds)
            del stand_ins
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
