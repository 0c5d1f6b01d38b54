"""Make FlashInfer launch its kernels on a simulated device, and record the launches.

This file runs under the *target's* interpreter like ``codegen_probe.py``, whose setup it
uses: the standard library, its siblings, and the target's packages.

    python launch_probe.pyz < request.json > result.json

The request is that of ``codegen_probe.py`` with a ``folder`` besides, and kernels of this form::

    {"kind": "dense-b12x", "tile": [128, 128], "shapes": [[200, 384, 512]], "sms": 2,
     "inputs": "random" | "degenerate", "seed": 0}
    {"kind": "vllm-linear", "shapes": [[64, 200, 320]]}
    {"kind": "vllm-moe", "tokens": [1], "experts": 4, "hidden": 256, "intermediate": 128,
     "layer": "nvfp4-moe" | "w4a16-moe", "finer": true, "small": "down" | "up"}
    {"kind": "moe-b12x", "tokens": [1], "experts": 8, "hidden": 512, "intermediate": 128,
     "many": true, "narrow": true, "prefill": true}

``vllm-linear`` and ``vllm-moe`` go through vLLM's own layers (``launch_layers.py``), the others
call FlashInfer's functions as vLLM does.  ``sms`` is the number of SMs that the host code
sees: with few, one block processes several tiles.  With ``many`` the experts' kernel is the one for
many tokens, with ``prefill`` too the one for 96 and more rows of an expert, which the tokens must
give; with ``narrow`` the one that few tokens get where experts are at most 512 wide; with
``"mode": "w4a16"`` it leaves the activations in bfloat16.  ``finer`` activations are such that FP4
cannot hold, products of ``small`` scales those that E4M3 cannot.  The functions are called with
tensors in ordinary memory that report to be on the device.  They check, compile and launch as they
would; each launch is written below ``folder``: the PTX, the parameters, and the memory that these
point into, before the kernel runs.

Result::

    {"schema": 1, "python": "...", "versions": {...}, "simulated": [...], "fatal": null | {...},
     "kernels": [{"request": {...}, "error": null | {...}, "seconds": 1.0,
                  "launches": [{"name": "...", "folders": ["..."]}]}]}

``launches`` has an entry for each call, with a folder for each kernel that it launched, in order.
A folder holds ``launch.json`` (read by ``builder/ptx/launchfile.py``), ``kernel.ptx`` and the
memory as the host code left it; no kernel has run.  The last one has the result, ``exact.f64`` and
``bound.f64``.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from builder.probes import (
    codegen_probe,
    launch_host,
    simulated_device,
    stub_driver,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


SCHEMA = 1
Json = dict[str, Any]
#: vLLM's own layers: the functions of ``launch_layers`` that make their cases.
LAYERS = {"vllm-linear": "linear_cases", "vllm-moe": "expert_cases"}
#: The settings that are the same for all requests of one child.
APART = ("sms", "many", "narrow", "mode")
#: Kernels of the package ``b12x``, which ``launch_package`` knows, and vLLM's name for them.
PACKAGE, OF_PACKAGE = "package-", "b12x"

#: The DSL's variable for the libraries that host code is linked against.
LIBRARIES = "CUTE_DSL_LIBS"
#: Folders of the DSL's runtime library: up to 4.5, and from 4.6 on with a folder for each CUDA.
RUNTIMES = ("nvidia_cutlass_dsl/lib/libc*runtime.so", "nvidia_cutlass_dsl/cu*/lib/libc*runtime.so")


def runtime_functions() -> set[str]:
    """The functions of the installed DSL's runtime library that host code may call."""
    symbols: set[str] = set()
    for folder, pattern in itertools.product(sys.path, RUNTIMES):
        for path in sorted(Path(folder).glob(pattern)):
            symbols |= stub_driver.defined_symbols(str(path))
    return {name for name in symbols if launch_host.RUNTIME_FUNCTION.fullmatch(name)}


def launch_instead(recorder: launch_host.Recorder) -> None:
    """Make the results of ``cute.compile`` callable with tensors in ordinary memory."""
    cute = importlib.import_module("cutlass.cute")
    compiling = launch_host.Compiling(cute.compile, recorder, plain_functions())
    setattr(cute, "compile", compiling)  # noqa: B010 (the module is Any in a sandbox only)
    compilers = importlib.import_module("cutlass.base_dsl.compiler")
    # it would call cuInit
    compilers.Compiler._check_cuda_dependencies_once = lambda _self, _libraries: None
    # the compiler reads the shared memory of an SM from the driver
    driver: Any = importlib.import_module("cutlass.base_dsl.runtime.cuda")
    driver.get_device_attribute = lambda which, _device=0: launch_host.ATTRIBUTES[int(which)]


def plain_functions() -> type:
    """The type of functions that are compiled without TVM FFI, patched to see one device.

    They ask cuda-python, which needs the driver, for how many to load a kernel, and have it unload
    the kernel that they were given here.
    """
    executors = importlib.import_module("cutlass.cutlass_dsl.cuda_jit_executor")
    executors.CudaDialectJitModule.unload = lambda _self: None
    plain: type = executors.CudaDialectJitCompiledFunction
    setattr(plain, "num_devices", 1)  # noqa: B010
    return plain


def use_library(path: str) -> None:
    """Link host code against the generated library.

    Up to 4.5 and from 4.7 on the variable is enough; 4.6 puts its own library in front of it when
    it is imported.
    """
    os.environ[LIBRARIES] = path
    instances = importlib.import_module("cutlass.base_dsl.dsl").DSLSingletonMeta._instances
    for dsl in instances.values():
        if dsl.envar.shared_libs != path:
            dsl.envar.shared_libs = path


def cases_of(ask: Json, probe: Any) -> Iterator[Any]:
    """The calls of a request."""
    if ask["kind"] in LAYERS:
        from builder.probes import launch_layers

        yield from getattr(launch_layers, LAYERS[ask["kind"]])(ask, probe)
    elif ask["kind"].startswith(PACKAGE):
        from builder.probes import launch_package

        yield from launch_package.KINDS[ask["kind"]](ask, probe)
    else:
        from builder.probes import launch_cases

        yield from launch_cases.KINDS[ask["kind"]](ask)


def failed(asks: list[Json], error: Json) -> list[Json]:
    """The replies to requests that were not run."""
    return [{"request": ask, "error": error, "launches": [], "seconds": 0.0} for ask in asks]


def prepare_torch(probe: Any) -> None:
    """Limit torch to one thread, as each child has one core, and let torch.empty fill its memory.

    It fills with NaN and the largest integer: uninitialised memory that a kernel reads is the same
    in each run, and visible.  This imports torch's compiler, which takes a second, so it is done
    once, before any child starts.
    """
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    probe.note("torch.empty: filled with NaN, or the largest integer")


def launch_kernels(asks: list[Json], probe: Any, library: Any, folder: Path) -> list[Json]:
    """Make every launch of some requests, one after the other, in a child process."""
    recorder = launch_host.Recorder()
    runtime = launch_host.Runtime(recorder.record)
    library.fill(runtime.callbacks())
    try:
        use_library(library.path)
        launch_instead(recorder)
    except Exception as error:
        traceback.print_exc()
        return failed(asks, codegen_probe.describe(error, "call"))
    replies = []
    for number, ask in enumerate(asks):
        recorder.begin(folder / str(number))
        replies.append(launch_kernel(ask, probe, recorder, runtime))
    replies[0]["simulated"] = probe.simulated
    return replies


def launch_kernel(
    ask: Json, probe: Any, recorder: launch_host.Recorder, runtime: launch_host.Runtime
) -> Json:
    """Make every launch of one request."""
    begun = time.monotonic()
    reply: Json = {"request": ask, "error": None}
    try:
        if "sms" in ask:
            codegen_probe.SM_COUNT = int(ask["sms"])
            codegen_probe.describe_device_to_torch(probe)
            codegen_probe.answer_for_flashinfer(probe)
        for case in cases_of(ask, probe):
            recorder.case = case
            case.call()
            if runtime.errors:
                raise runtime.errors[0]
            if not recorder.finish_call():
                raise RuntimeError(f"{case.name}: the call launched no kernel")
    except Exception as error:
        traceback.print_exc()
        first = runtime.errors[0] if runtime.errors else error
        reply["error"] = codegen_probe.describe(first, getattr(first, "stage", "call"))
        if runtime.refused:
            names = ", ".join(dict.fromkeys(runtime.refused))
            reply["error"]["message"] += f"; functions that are not simulated: {names}"
    runtime.forget()
    reply["launches"] = recorder.launches
    reply["seconds"] = round(time.monotonic() - begun, 2)
    return reply


def together(asks: list[Json]) -> list[list[int]]:
    """The numbers of the requests that share a child; vLLM's layers come last.

    FlashInfer caches kernels, compiled for one number of SMs, and its own settings; the DSL caches
    the source.  The layers of vLLM change more of the process.
    """
    groups: dict[str, list[int]] = {}
    for number in sorted(range(len(asks)), key=lambda number: asks[number]["kind"] in LAYERS):
        ask = asks[number]
        key = {name: ask.get(name) for name in APART}
        # what is done for the package concerns every tensor
        of_package = ask["kind"].startswith(PACKAGE) or ask.get("moe_backend") == OF_PACKAGE
        if of_package:
            key["package"] = ask["kind"] in LAYERS
        groups.setdefault(codegen_probe.key_of(key), []).append(number)
    return list(groups.values())


def slowest(asks: list[Json]) -> str:
    """The kind of the request that takes longest."""
    return str(max((ask["kind"] for ask in asks), key=lambda kind: kind in codegen_probe.SLOW))


def launch_requested(request: Json, probe: Any, library: Any) -> list[Json]:
    """Answer each of the request's kernels."""
    asks = [dict(ask) for ask in request["kernels"]]
    refusal = codegen_probe.prepare(request, probe)
    if refusal:
        return failed(asks, refusal)
    prepare_torch(probe)
    gc.collect()
    gc.freeze()  # tensors that a launch may reach are made later
    folder = Path(request["folder"])
    groups = together(asks)

    def work(group: Json, scratch: Path) -> Json:
        replies = launch_kernels(group["asks"], probe, library, folder / scratch.name)
        return {"replies": replies}

    def crashed(group: Json, error: Json) -> Json:
        return {"replies": failed(group["asks"], error)}

    work_on = [
        {"kind": slowest(given := [asks[number] for number in numbers]), "asks": given}
        for numbers in groups
    ]
    with tempfile.TemporaryDirectory(prefix="launch-probe-") as scratch:
        jobs = int(request.get("jobs", 2))
        done = codegen_probe.in_children(work_on, jobs, Path(scratch), work, crashed)
    replies: dict[int, Json] = {}
    for numbers, group in zip(groups, done, strict=True):
        replies.update(zip(numbers, group["replies"], strict=True))
    for words in (words for reply in replies.values() for words in reply.pop("simulated", ())):
        probe.note(words)
    return [replies[number] for number in range(len(asks))]


def run(request: Json) -> Json:
    """Answer a whole request."""
    probe = codegen_probe.Probe.of(request)
    result: Json = {"schema": SCHEMA, "python": platform.python_version(), "versions": {}}
    result.update(kernels=[], simulated=probe.simulated, fatal=None)
    with tempfile.TemporaryDirectory(prefix="launch-probe-") as scratch:
        try:
            codegen_probe.set_environment(request, probe, scratch)
            os.environ["CUTE_DSL_LINEINFO"] = "1"  # adds .loc and .file, and changes no code
            simulated_device.add_paths([str(path) for path in request.get("paths", [])])
            if libraries := stub_driver.dsl_libraries():
                stub_driver.load_driver(probe.note, scratch, libraries)
            library = launch_host.Library(os.path.join(scratch, "calls.so"), runtime_functions())
            os.environ[LIBRARIES] = library.path
            probe.note("the CuTe DSL's runtime library: generated, its functions record launches")
            codegen_probe.find_source_quickly()
            result["kernels"] = launch_requested(request, probe, library)
        except Exception as error:
            traceback.print_exc()
            result["fatal"] = codegen_probe.describe(error, "import")
        result["versions"] = simulated_device.versions(codegen_probe.DISTRIBUTIONS)
    return result


def main() -> int:
    """Read a request from stdin, write the result to stdout."""
    gc.set_threshold(200_000, 20, 100)
    out = simulated_device.claim_stdout()
    result = run(cast("Json", json.load(sys.stdin)))
    json.dump(result, out, sort_keys=True)
    out.write("\n")
    out.close()
    return 0
