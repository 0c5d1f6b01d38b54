"""The kernels to compile, each by the function of FlashInfer or b12x that vLLM calls.

It runs next to ``codegen_probe.py`` under the target's interpreter, with the standard library and
the target's packages.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from builder.probes.codegen_device import (
    TRITON,
    Probe,
    StubModule,
    answer_for_flashinfer,
    describe_device_to_torch,
    stand_in_triton,
)

if TYPE_CHECKING:
    import types
    from collections.abc import Callable


Json = dict[str, Any]


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
    found: dict[Any, Json] = {}
    for layer in LAYERS:
        for tile, _cluster, swapped, *_rest in runner.get_valid_tactics(
            [*dense_arguments(layer, "meta"), None], None
        ):
            ask = {"kind": "dense-b12x", **layer, "tile": list(tile)}
            found.setdefault((tuple(tile), swapped), {**ask, "swap_ab": True} if swapped else ask)
    if not found:
        raise RuntimeError("FlashInfer's b12x GEMM offers no tile at all")
    return list(found.values())


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
