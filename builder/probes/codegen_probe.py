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

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, cast

from builder.probes import stub_driver
from builder.probes.codegen_child import compile_all, describe, empty_reply
from builder.probes.codegen_device import (
    Probe,
    describe_device_to_torch,
    find_source_quickly,
    remember_source,
    set_environment,
)
from builder.probes.codegen_kernels import (
    EVERY_TILE,
    KINDS,
    import_flashinfer,
    stop_after_compiling,
    tiles_offered,
)
from builder.probes.simulated_device import add_paths, claim_stdout, versions

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

Json = dict[str, Any]


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


def spread_out(ask: Json, said: Json | None) -> list[Json] | Json:
    """The kernels of a request, or the error that prevents compiling any."""
    if said and ask["kind"] not in WITHOUT_FLASHINFER:
        return said
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
    said = prepare(request, probe)
    stop_after_compiling()
    outcomes = [spread_out(ask, said) for ask in asks]
    kernels = {key_of(k): k for kept in outcomes if isinstance(kept, list) for k in kept}
    done = compile_all(list(kernels.values()), int(request.get("jobs", 2)), scratch)
    replies = dict(zip(kernels, done, strict=True))
    return [gather(ask, kept, replies) for ask, kept in zip(asks, outcomes, strict=True)]


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
    out = claim_stdout()
    result = run(cast("Json", json.load(sys.stdin)))
    json.dump(result, out, sort_keys=True)
    out.write("\n")
    out.close()
    return 0
