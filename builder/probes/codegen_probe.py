"""Compile the kernels that FlashInfer would compile on a simulated device.

This file runs under the *target's* interpreter (inside an image, or in a sandbox with
FlashInfer's Python files, the CuTe DSL and torch), so it imports its siblings, the standard
library, and the target's packages.

    python codegen_probe.pyz < request.json > result.json

FlashInfer's b12x kernels are Python: they are compiled by the CuTe DSL when first called, and the
compiler needs no device. The probe calls the functions that vLLM calls (``mm_fp4`` with the
b12x backend, ``b12x_fused_moe``) on tensors in ordinary memory, lets them check, choose and build
what they would on SM121, and ends each call as soon as the compiler has returned. What it wrote to
disk (PTX, cubin) is the result. If the DSL also loads what it compiled, that fails without
a driver, after the cubin is on disk; only a missing cubin is a failure. The package
``b12x``, which newer vLLM can use instead, compiles its kernels with the same DSL.

Request (every key but ``kernels`` may be left out)::

    {"paths": ["dirs to put first on sys.path"], "env": {"NAME": "value, or null to unset"},
     "arch": "sm_121a", "capability": [12, 1], "cuda_version": "13.0",
     "device_name": "NVIDIA GB10", "pretend_triton": false, "jobs": 2,
     "kernels": [{"kind": "mma-gate"},
                 {"kind": "dense-b12x", "tokens": 512, "tile": [128, 128], "n": 2048, "k": 2048},
                 {"kind": "dense-b12x-tiles"},
                 {"kind": "dense-b12x-package", "tokens": 512},
                 {"kind": "moe-b12x", "tokens": 64, "experts": 8, "top_k": 2, "hidden": 512,
                  "intermediate": 256}]}

``mma-gate`` only builds the MMA's description, which needs neither torch nor FlashInfer: the
cheapest test whether this DSL accepts the architecture. A dense kernel without ``tile`` is
the one that FlashInfer itself selects for that many tokens. ``dense-b12x-tiles`` means a dense
kernel of every tile that FlashInfer's tuner may choose. Each kernel is compiled in a forked
child of its own, ``jobs`` at a time; repeated kernels are compiled once.

Result::

    {"schema": 1, "python": "...", "versions": {"nvidia-cutlass-dsl": "...", ...},
     "kernels": [...], "simulated": ["..."], "fatal": null | {...}}

A kernel is ``{"kind", "request", "compiled", "entries", "target", "ptx_version", "files", "error",
"loading", "seconds"}``. ``files`` are ``{"name", "kind": "ptx" | "cubin", "size", "sha256"}``, a
cubin also with ``base64``. ``error`` is ``{"type", "message", "stage"}``, the stage being
``import``, ``call`` (FlashInfer refused before compiling), ``compile`` or ``crash``; ``loading`` is
one of the same form that came after the cubin was written. For every tile there is
``{"kind", "request", "compiled", "error", "each": [...]}``, a kernel for each tile. The exit status
is 0 whenever a result was written.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import linecache
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from builder.probes import stub_driver
from builder.probes.simulated_device import (
    MULTIPROCESSORS,
    SimulatedDevice,
    add_paths,
    apply_environment,
    claim_stdout,
    versions,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# ----------------------------------------------------------------------------- the simulated device

#: One thread block cluster per SM, as the driver would answer; it only affects a grid's size.
SM_COUNT = MULTIPROCESSORS

Json = dict[str, Any]


@dataclasses.dataclass
class Probe(SimulatedDevice):
    """The simulated device, with the target architecture."""

    arch: str = "sm_121a"


def set_environment(request: Json, probe: Probe, scratch: str) -> None:
    """Set the request's variables, then those that make the DSL keep its output.

    The DSL reads them once, when it is imported, so the output folder is a relative path:
    each child has its own working directory. Up to 4.4 it knows ``KEEP_PTX`` and ``KEEP_CUBIN``,
    later also ``KEEP``, which replaces them.
    """
    apply_environment(request.get("env", {}))
    os.environ["CUTE_DSL_ARCH"] = probe.arch
    os.environ.update(CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_KEEP_CUBIN="1")
    os.environ["CUTE_DSL_DUMP_DIR"] = "."
    os.environ.update(CUTE_DSL_CACHE_DIR=scratch, CUTE_DSL_DISABLE_FILE_CACHING="1")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch


def describe_device_to_torch(probe: Probe) -> None:
    """Make torch report the simulated device's properties, whether it has a device or not."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        torch.version.cuda = probe.cuda_version
        probe.note(f"torch.version.cuda: {probe.cuda_version} (a CPU build of torch)")
    answers: dict[str, Any] = {
        "get_device_properties": probe.properties(SM_COUNT, uuid="GPU-simulated"),
        "get_device_capability": probe.capability,
        "get_device_name": probe.device_name,
        "current_device": 0,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": False,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_args, _value=value, **_kwargs: _value)
    probe.note(f"torch.cuda: {', '.join(answers)} answer for {probe.device_name}")


def answer_for_flashinfer(probe: Probe) -> None:
    """Replace FlashInfer's queries of a real device, in every module that imported the function.

    Its own ``get_compute_capability`` refuses a tensor that is not on a GPU.
    """
    answers: dict[str, Any] = {
        "get_compute_capability": probe.capability,
        "get_max_active_clusters": SM_COUNT,
        "get_num_sm": SM_COUNT,
        "get_device_sm_count": SM_COUNT,
    }
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "flashinfer"]
    for name, value in answers.items():
        holders = [m for m in modules if inspect.isroutine(vars(m).get(name)) or wrapped(m, name)]
        for module in holders:
            setattr(module, name, lambda *_args, _value=value, **_kwargs: _value)
        if holders:
            probe.note(f"flashinfer {name}: {value}")
    share_scratch_buffers(modules, probe)


def share_scratch_buffers(modules: Iterable[types.ModuleType], probe: Probe) -> None:
    """Let FlashInfer take its scratch buffers from torch, not from a memory pool of each stream.

    From 0.7.4 on it has one buffer for each stream; here is one stream.
    """
    for module in modules:
        if hasattr(module, "_get_stream_cache_buf"):
            utils = importlib.import_module("flashinfer.utils")
            vars(module)["_get_stream_cache_buf"] = vars(utils)["_get_cache_buf"]
            probe.note("flashinfer _get_stream_cache_buf: its _get_cache_buf, for the one stream")


def wrapped(module: types.ModuleType, name: str) -> bool:
    """Whether a module's attribute is a function behind ``functools.cache``."""
    return callable(vars(module).get(name)) and hasattr(vars(module)[name], "__wrapped__")


class StubModule(types.ModuleType):
    """A module in which every attribute exists, and every call is a decorator or does nothing."""

    __version__ = "3.0.0"
    __path__: list[str] = []  # noqa: RUF012 (the interface of a package)

    def __getattr__(self, name: str) -> StubModule:
        """Have everything but Python's own special names."""
        if name.startswith("__"):
            raise AttributeError(name)
        return StubModule(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a single function unchanged; otherwise return a decorator."""
        alone = len(args) == 1 and not kwargs and callable(args[0])
        if not alone:
            return self
        with contextlib.suppress(AttributeError):
            args[0].fn = args[0]  # what a kernel of Triton has its function as
        return args[0]


TRITON = ("triton", "triton.language")


@contextlib.contextmanager
def stand_in_triton(probe: Probe, wanted: bool) -> Iterator[None]:
    """If Triton is not installed, let FlashInfer define its Triton kernels with a stand-in.

    Only while FlashInfer is imported: torch must continue without Triton.
    """
    if not wanted or importlib.util.find_spec("triton") is not None:
        yield
        return
    sys.modules.update({name: StubModule(name) for name in TRITON})
    try:
        yield
    finally:
        for name in TRITON:
            sys.modules.pop(name, None)
    probe.note("triton: a stand-in while FlashInfer is imported")


def find_source_quickly() -> None:
    """Give the DSL source locations without the slow search of Python up to 3.12.

    The DSL notes the source line of each operation by ``inspect.getframeinfo``, which looks
    backwards for a ``def`` through the whole file, ten million times for one MoE kernel. From
    Python 3.13 on it does not; the names of locations do not reach the machine code.
    """
    original = inspect.findsource

    def findsource(object: Any) -> tuple[list[str], int]:  # noqa: A002 (its name in inspect)
        thing = object
        code = thing.f_code if inspect.isframe(thing) else thing
        if not inspect.iscode(code):
            return original(thing)
        lines = linecache.getlines(code.co_filename)
        if not lines:
            raise OSError("could not get source code")
        return lines, min(code.co_firstlineno, len(lines)) - 1

    if sys.version_info < (3, 13):
        inspect.findsource = findsource


#: The DSL's own function for the same purpose, from 4.8 on; and the one that it asks about the
#: module of every frame.
LOCATIONS, LOCATE, OWN = "cutlass._mlir_helpers.op", "_fast_frameinfo", "_is_framework_module"


def remember_source() -> None:
    """Make the DSL look up each place in its callers' code only once.

    It looks up every operation, and kernels pass the same places many times.
    The answers are the same.
    """
    inspect.getframeinfo = remembered(inspect.getframeinfo)
    module: Any = sys.modules.get(LOCATIONS)
    if hasattr(module, LOCATE):
        setattr(module, LOCATE, remembered(getattr(module, LOCATE)))
    if hasattr(module, OWN):
        setattr(module, OWN, functools.cache(getattr(module, OWN)))


def remembered(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a frame for each place in the code."""
    known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def answer(frame: Any, *context: int) -> Any:
        if context or not inspect.isframe(frame):
            return ask(frame, *context)
        place = id(frame.f_code), frame.f_lasti
        entry = known.get(place)
        if entry is None:
            # keep the code object too, so that its id is not reused
            entry = known[place] = frame.f_code, ask(frame)
        return entry[1]

    return answer


# ------------------------------------------------------------------------------------------ kernels


class Compiled(BaseException):
    """Ends a call after the compiler returned; it is not an error, so that nobody catches it."""


MOE = "flashinfer.fused_moe.cute_dsl"
#: Imported before the first fork. The second row is what a call would import later, when the
#: stand-in for Triton is gone; if a release lacks one of these, its use fails later.
MODULES = ("flashinfer", "flashinfer.gemm.gemm_base", "flashinfer.fused_moe", "cutlass.cute")
LATER = (
    f"{MOE}.b12x_moe",
    f"{MOE}.blackwell_sm12x.moe_dispatch",
    f"{MOE}.blackwell_sm12x.triton_compact",
    "flashinfer.cute_dsl.utils",
    "flashinfer.gemm.gemm_mm_fp4_cute_dsl",
    "flashinfer.gemm.kernels.dense_blockscaled_gemm_sm120_b12x",
    "flashinfer.gemm.kernels.dense_blockscaled_gemm_sm120",
)


def import_flashinfer(request: Json, probe: Probe) -> None:
    """Import the kernels' modules, after the simulated device is set up."""
    describe_device_to_torch(probe)
    with stand_in_triton(probe, bool(request.get("pretend_triton"))):
        for name in MODULES:
            importlib.import_module(name)
        for name in LATER:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    answer_for_flashinfer(probe)


def stop_after_compiling() -> None:
    """Make ``cute.compile`` end the call: this machine cannot launch the result."""
    cute = importlib.import_module("cutlass.cute")
    compiler = cute.compile

    def compile_and_stop(*args: Any, **kwargs: Any) -> NoReturn:
        try:
            compiler(*args, **kwargs)
        except Exception as error:
            raise Compiled from error
        raise Compiled

    setattr(cute, "compile", compile_and_stop)  # noqa: B010 (the module is Any in a sandbox only)


def build_mma(_ask: Json) -> None:
    """Build the NVFP4 warp MMA, in whose constructor the DSL checks the architecture."""
    cutlass = importlib.import_module("cutlass")
    warp = importlib.import_module("cutlass.cute.nvgpu.warp")
    try:
        warp.MmaMXF4NVF4Op(cutlass.Float4E2M1FN, cutlass.Float32, cutlass.Float8E4M3FN)
    except Exception as error:
        raise Compiled from error
    raise Compiled


def dense_arguments(ask: Json, device: str = "cpu") -> tuple[Any, ...]:
    """Activations and weights of one NVFP4 linear layer, in the form that vLLM passes."""
    torch = importlib.import_module("torch")
    tokens, n, k = (int(ask.get(name, size)) for name, size in DENSE_SIZES.items())
    rows = (tokens + 127) // 128 * 128

    def zeros(height: int, width: int, dtype: Any = torch.uint8) -> Any:
        return torch.zeros(height, width, dtype=dtype, device=device)

    a, b = zeros(tokens, k // 2), zeros(n, k // 2).T
    a_scale, b_scale = zeros(rows, k // 16), zeros(n, k // 16).T
    alpha, out = torch.ones(1, device=device), zeros(tokens, n, torch.bfloat16)
    return a, b, a_scale, b_scale, alpha, torch.bfloat16, out, 16, False


DENSE_SIZES = {"tokens": 512, "n": 2048, "k": 2048}


def build_dense(ask: Json) -> None:
    """FlashInfer's b12x GEMM, by the function that vLLM calls, or with a given tile."""
    arguments = dense_arguments(ask)
    tile = ask.get("tile")
    if tile is None:
        flashinfer = importlib.import_module("flashinfer")
        flashinfer.mm_fp4(*arguments, backend="b12x")
        return
    gemm = importlib.import_module("flashinfer.gemm.gemm_base")
    torch = importlib.import_module("torch")
    runner = gemm._b12x_gemm_fp4_runner(12, 1, False, torch.bfloat16, True)
    tactic = (tuple(tile), (1, 1), bool(ask.get("swap_ab")), False, "sm120", None)
    runner.forward([*arguments, None], tactic=tactic)


#: Layers for which FlashInfer lists its tuner's tiles: together they cover everything that its
#: rules distinguish. Whether a kernel prefetches is another choice, with the same machine code.
LAYERS: tuple[Json, ...] = (
    {"tokens": 512},
    {"tokens": 1},
    {"tokens": 64, "n": 1024},
    {"tokens": 1, "n": 1024, "k": 4096},
    {"tokens": 1, "n": 512, "k": 4096},
    {"tokens": 1, "n": 256, "k": 8192},
)


def tiles_offered() -> list[Json]:
    """Requests for the dense kernel with every tile that FlashInfer may choose, tuned or not.

    The tensors have no memory: filling it would start threads, which a forked child waits for.
    """
    gemm = importlib.import_module("flashinfer.gemm.gemm_base")
    torch = importlib.import_module("torch")
    runner = gemm._b12x_gemm_fp4_runner(12, 1, False, torch.bfloat16, True)
    requests: dict[Any, Json] = {}
    for layer in LAYERS:
        for tile, _cluster, swapped, *_rest in runner.get_valid_tactics(
            [*dense_arguments(layer, "meta"), None], None
        ):
            ask = {"kind": "dense-b12x", **layer, "tile": list(tile)}
            requests.setdefault(
                (tuple(tile), swapped), {**ask, "swap_ab": True} if swapped else ask
            )
    if not requests:
        raise RuntimeError("FlashInfer's b12x GEMM offers no tile at all")
    return list(requests.values())


MOE_SIZES = {"tokens": 64, "experts": 8, "top_k": 2, "hidden": 512, "intermediate": 256}


def build_moe(ask: Json) -> None:
    """FlashInfer's fused b12x experts, by the function that vLLM calls: SiLU-gated, W4A4."""
    torch = importlib.import_module("torch")
    entry = importlib.import_module("flashinfer").b12x_fused_moe
    to_mma = importlib.import_module("flashinfer.cute_dsl.utils").convert_sf_to_mma_layout
    tokens, experts, top_k, hidden, inner = (int(ask.get(n, s)) for n, s in MOE_SIZES.items())

    def weight(rows: int, columns: int) -> tuple[Any, Any]:
        packed = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
        scales = torch.zeros(experts * rows, columns // 16, dtype=torch.float8_e4m3fn)
        return packed, to_mma(scales, m=rows, k=columns, num_groups=experts)

    w1, w1_scale = weight(2 * inner, hidden)
    w2, w2_scale = weight(hidden, inner)
    chosen = torch.arange(tokens * top_k, dtype=torch.int32).reshape(tokens, top_k) % experts
    entry(
        x=torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        token_selected_experts=chosen,
        token_final_scales=torch.zeros(tokens, top_k),
        w1_weight=w1,
        w1_weight_sf=w1_scale,
        w1_alpha=torch.ones(experts),
        fc2_input_scale=torch.ones(experts),
        w2_weight=w2,
        w2_weight_sf=w2_scale,
        w2_alpha=torch.ones(experts),
        num_experts=experts,
        top_k=top_k,
        num_local_experts=experts,
        output_dtype=torch.bfloat16,
        output=torch.zeros(tokens, hidden, dtype=torch.bfloat16),
    )


# --- the package b12x ----------------------------------------------------------------------------


def build_package(ask: Json) -> None:
    """The package's own NVFP4 GEMM, by the function that vLLM calls."""
    torch = importlib.import_module("torch")
    api = import_package(ask)
    tokens, n, k = (int(ask.get(name, size)) for name, size in DENSE_SIZES.items())
    rows = (tokens + 127) // 128 * 128
    a = torch.zeros(tokens, k // 2, dtype=torch.uint8)
    b = torch.zeros(n, k // 2, dtype=torch.uint8)
    a_scale, b_scale = (
        torch.zeros(height, k // 16, dtype=torch.float8_e4m3fn) for height in (rows, n)
    )
    api.mm_nvfp4(a, a_scale, b, b_scale, torch.ones(1), out_dtype=torch.bfloat16)


#: What the package imports of Triton.
PACKAGE_TRITON = (
    *TRITON,
    "triton.language.extra",
    "triton.language.extra.cuda",
    "triton.language.extra.cuda.libdevice",
)


def import_package(ask: Json, *, session: bool = False) -> Any:
    """Import the package's GEMM as on a machine with the device.

    Call it in a child, whose state it changes. Without Triton, torch has to be
    imported completely first: it would use the stand-in as the real one. With ``session``, the
    package prepares what a call needs; without it, it only compiles.
    """
    torch = importlib.import_module("torch")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.device = lambda *_args: contextlib.nullcontext()
    if ask.get("stand_in") and importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch._inductor.utils")
        sys.modules.update({name: StubModule(name) for name in PACKAGE_TRITON})
    api = importlib.import_module("b12x.gemm.blockscaled.api")
    if session:
        return api
    with contextlib.suppress(ImportError):  # from 1.5 on; until then the call itself compiles
        compile_without_session(importlib.import_module("b12x.gemm.blockscaled._preparation"))
    return api


def compile_without_session(preparation: types.ModuleType) -> None:
    """Make the package compile what a call needs, without preparing device memory.

    A plan lists the jobs for its session's compiler processes; they run here.
    """
    torch = importlib.import_module("torch")
    linear = importlib.import_module("b12x.gemm.blockscaled._linear")
    detect = importlib.import_module("b12x.preparation.device").detect_device
    device = torch.device("cuda", 0)
    plan_for = vars(preparation)["heuristic_plan"]

    def compile_jobs(plan: Any, _name: str, _device: Any) -> None:
        for job in plan._compile_jobs(None, detect(device)):
            module, _, factory = job.factory.partition(":")
            getattr(importlib.import_module(module), factory)(*job.args, **dict(job.kwargs))

    vars(preparation)["heuristic_plan"] = lambda query, _device: plan_for(query, device)
    vars(linear)["require_prepared"] = compile_jobs


KINDS: dict[str, Callable[[Json], None]] = {
    "mma-gate": build_mma,
    "dense-b12x": build_dense,
    "dense-b12x-package": build_package,
    "moe-b12x": build_moe,
}
#: They take several times as long as the others.
SLOW = ("moe-b12x", "dense-b12x-package")
#: Stands for several kernels.
EVERY_TILE = "dense-b12x-tiles"


# --------------------------------------------------------------------------- one kernel, in a child

ANSI = re.compile(r"\x1b\[[0-9;]*m")


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


# -------------------------------------------------------------------------------------- the request

SCHEMA = 1
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "flashinfer-python",
    "b12x",
    "apache-tvm-ffi",
    "torch",
)


def check_kinds(kernels: list[Json]) -> None:
    """Refuse an unknown kind before compiling the others."""
    known = (*KINDS, EVERY_TILE)
    for ask in kernels:
        if ask.get("kind") not in known:
            raise ValueError(f"unknown kind {ask.get('kind')!r}; known: {', '.join(known)}")


#: Kernels of the package ``b12x``; those behind the first are launched too.
OF_PACKAGE = ("dense-b12x-package", "package-dense", "package-dense-a16")
#: Kernels that need no FlashInfer: if its import fails, only the others fail.
WITHOUT_FLASHINFER = ("mma-gate", *OF_PACKAGE)


def prepare(request: Json, probe: Probe) -> Json | None:
    """Import what the kernels need; return the error of FlashInfer's import, if any."""
    importlib.import_module("cutlass.cute.nvgpu.warp")
    remember_source()
    kinds = {ask["kind"] for ask in request["kernels"]}
    if kinds & {*OF_PACKAGE}:
        describe_device_to_torch(probe)
        probe.note("package b12x: told that a device is there; its session prepares no memory")
    if kinds <= {*WITHOUT_FLASHINFER}:
        return None
    try:
        import_flashinfer(request, probe)
    except Exception as error:
        traceback.print_exc()
        return describe(error, "import")
    return None


def spread_out(ask: Json, refusal: Json | None) -> list[Json] | Json:
    """The kernels of a request, or the error that prevents compiling any."""
    if refusal and ask["kind"] not in WITHOUT_FLASHINFER:
        return refusal
    if ask["kind"] != EVERY_TILE:
        return [ask]
    try:
        return tiles_offered()
    except Exception as error:
        traceback.print_exc()
        return describe(error, "call")


def gather(ask: Json, outcome: list[Json] | Json, replies: dict[str, Json]) -> Json:
    """The reply to a request, from the replies for its kernels."""
    if isinstance(outcome, dict):
        return {**empty_reply(ask), "error": outcome}
    each = [replies[key_of(kernel)] for kernel in outcome]
    if ask["kind"] != EVERY_TILE:
        return each[0]
    whole = {"kind": ask["kind"], "request": ask, "error": None, "each": each}
    return {**whole, "compiled": all(reply["compiled"] for reply in each)}


def key_of(ask: Json) -> str:
    """A key that is equal for equal requests."""
    return json.dumps(ask, sort_keys=True)


def compile_requested(request: Json, probe: Probe, scratch: Path) -> list[Json]:
    """Answer each of the request's kernels."""
    asks = [dict(ask) for ask in request.get("kernels", [])]
    if request.get("pretend_triton"):
        for ask in asks:
            if ask["kind"] == "dense-b12x-package":
                ask["stand_in"] = True
    refusal = prepare(request, probe)
    stop_after_compiling()
    outcomes = [spread_out(ask, refusal) for ask in asks]
    kernels = {key_of(k): k for outcome in outcomes if isinstance(outcome, list) for k in outcome}
    gc.freeze()  # what is imported stays: children need not look through it
    done = compile_all(list(kernels.values()), int(request.get("jobs", 2)), scratch)
    replies = dict(zip(kernels, done, strict=True))
    return [gather(ask, outcome, replies) for ask, outcome in zip(asks, outcomes, strict=True)]


def run(request: Json) -> Json:
    """Answer a whole request."""
    probe = Probe.of(request)
    result: Json = {"schema": SCHEMA, "python": platform.python_version(), "versions": {}}
    result.update(kernels=[], simulated=probe.simulated, fatal=None)
    kernels: list[Json] = request.get("kernels", [])
    with tempfile.TemporaryDirectory(prefix="codegen-probe-") as scratch:
        try:
            check_kinds(kernels)
            set_environment(request, probe, scratch)
            add_paths([str(path) for path in request.get("paths", [])])
            if libraries := stub_driver.dsl_libraries():
                stub_driver.load_driver(probe.note, scratch, libraries)
            find_source_quickly()
            result["kernels"] = compile_requested(request, probe, Path(scratch))
        except Exception as error:
            traceback.print_exc()
            result["fatal"] = describe(error, "import")
    result["versions"] = versions(DISTRIBUTIONS)
    return result


def main() -> int:
    """Read a request from stdin, write the result to stdout."""
    gc.disable()  # imports leave no garbage, and a kernel's child ends after one compilation
    out = claim_stdout()
    result = run(cast("Json", json.load(sys.stdin)))
    json.dump(result, out, sort_keys=True)
    out.write("\n")
    out.close()
    return 0
