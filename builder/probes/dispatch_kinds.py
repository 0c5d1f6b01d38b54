"""Queries each vLLM release for its kernel: one function for each kind of layer.

Part of the dispatch probe (see ``dispatch_probe.py``): it runs under the target's interpreter, and
imports nothing but the standard library and what the target has.  Each function goes through the
release's own entry point and returns vLLM's name for the choice, and its implementation.
If a release has no entry point (the choice is part of a layer's code), that code is run up
to the call of the kernel, which is not made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Json = dict[str, Any]

_LAYERS = "vllm.model_executor.layers"
_LINEAR = "vllm.model_executor.kernels.linear"
_ORACLE = f"{_LAYERS}.fused_moe.oracle.nvfp4"
_SCHEMES = f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors"
_FP8 = f"{_LAYERS}.quantization.fp8"
_NVFP4_UTILS = f"{_LAYERS}.quantization.utils.nvfp4_utils"

#: A linear layer's weight, (output, input): multiples of every kernel's granularity.
WEIGHT_SHAPE = (2048, 2048)
#: ``quantization_config`` of a checkpoint whose linear weights are NVFP4 and whose activations stay
#: 16 bits wide, as compressed-tensors writes it.
W4A16_CHECKPOINT: Json = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
            },
        }
    },
}


class NotAskableError(Exception):
    """The release has no such setting or entry point, so it cannot be queried."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The entry points' inputs from a request; the linear backend reaches them through vLLM."""

    moe_backend: str = "auto"


def quantization(name: str) -> Any:
    """A module of the release's quantisation code."""
    return importlib.import_module(f"{_LAYERS}.quantization.utils.{name}")


def _linear(name: str) -> Any:
    """A function of the release's linear kernels; None if it has none of that name."""
    return getattr(importlib.import_module(_LINEAR), name, None)


def _takes(name: str, parameter: str) -> bool:
    entry = _linear(name)
    return entry is not None and parameter in inspect.signature(entry).parameters


def _a16_is_chosen() -> bool:
    """Whether the release chooses a kernel for 16-bit activations (from 0.23.0 on)."""
    return _takes("init_nvfp4_linear_kernel", "use_a16")


def _fp8_is_chosen() -> bool:
    """Whether the release chooses among kernels for block scales (from 0.20.0 on)."""
    return _takes("init_fp8_linear_kernel", "weight_shape")


def known_arguments(target: Callable[..., Any], values: Json) -> Json:
    """The entries of ``values`` that the release's callable accepts."""
    return {name: values[name] for name in inspect.signature(target).parameters if name in values}


# --- running a layer's code up to the call of its kernel -----------------------------------------


class ReachedError(BaseException):
    """The layer's code reached the call of a kernel; it must not catch this."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _stop_at(name: str) -> Callable[..., NoReturn]:
    def reached(*_args: object, **_kwargs: object) -> NoReturn:
        raise ReachedError(name)

    return reached


def watch(owner: Any, prefix: str) -> None:
    """Replace functions of a module or object by name prefix, so that a call ends the run."""
    for name in dir(owner):
        if name.startswith(prefix) and callable(getattr(owner, name)):
            setattr(owner, name, _stop_at(name))


def kernel_reached(call: Callable[[], object]) -> str:
    """The watched function that ``call`` reaches.

    Raises:
        NotAskableError: it ended without reaching one.
    """
    try:
        call()
    except ReachedError as reached:
        return reached.name
    raise NotAskableError("this release's layer calls no kernel that is known here")


# --- NVFP4 linear --------------------------------------------------------------------------------


def select_nvfp4_linear(_question: Question) -> tuple[str, str]:
    """NVFP4 weights and activations: a class from 0.20.0 on, an enumeration's member before."""
    entry = _linear("init_nvfp4_linear_kernel")
    if entry is not None:
        name = type(entry()).__name__
        return name, name
    backend = str(importlib.import_module(_NVFP4_UTILS).select_nvfp4_linear_backend())
    return backend, backend


def select_w4a16_linear(_question: Question) -> tuple[str, str]:
    """NVFP4 weights, 16-bit activations: chosen from 0.23.0 on, written into the scheme before."""
    if _a16_is_chosen():
        name = type(_linear("init_nvfp4_linear_kernel")(use_a16=True)).__name__
        return name, name
    torch = importlib.import_module("torch")
    config = importlib.import_module(_SCHEMES).CompressedTensorsConfig
    linear = torch.nn.Linear(16, 16, bias=False, device="meta")
    scheme = config.from_config(W4A16_CHECKPOINT).get_scheme(linear, "model.layers.0.mlp.down_proj")
    watch(importlib.import_module(type(scheme).__module__), "apply_")
    return kernel_reached(lambda: scheme.apply_weights(_AnyLayer(), None)), type(scheme).__name__


class _AnyLayer(types.SimpleNamespace):
    """A layer in which every attribute is None: for code that only passes them to a kernel."""

    def __getattr__(self, name: str) -> None:
        return None


# --- NVFP4 experts -------------------------------------------------------------------------------


def moe_config(moe_backend: str) -> Any:
    """The release's configuration of a mixture-of-experts layer: SiLU-gated, 128 experts, top 8."""
    torch = importlib.import_module("torch")
    config = importlib.import_module(f"{_LAYERS}.fused_moe.config")
    activation = importlib.import_module(f"{_LAYERS}.fused_moe.activation")
    values: Json = {
        "num_experts": 128,
        "experts_per_token": 8,
        "hidden_dim": 2048,
        "intermediate_size": 768,
        "intermediate_size_per_partition": 768,
        "num_local_experts": 128,
        "num_logical_experts": 128,
        "activation": activation.MoEActivation.SILU,
        "device": "cuda",
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
        "moe_backend": moe_backend,
    }
    return config.FusedMoEConfig(**known_arguments(config.FusedMoEConfig, values))


def _select_moe(question: Question, activation_key: Any) -> tuple[str, str]:
    backend, experts = importlib.import_module(_ORACLE).select_nvfp4_moe_backend(
        config=moe_config(question.moe_backend),
        weight_key=quantization("quant_utils").kNvfp4Static,
        activation_key=activation_key,
    )
    return str(backend.value), getattr(experts, "__name__", str(experts))


def select_nvfp4_moe(question: Question) -> tuple[str, str]:
    """NVFP4 experts: the backend's value, and the class that implements it."""
    return _select_moe(question, quantization("quant_utils").kNvfp4Dynamic)


def select_w4a16_moe(question: Question) -> tuple[str, str]:
    """Experts with NVFP4 weights and 16-bit activations."""
    return _select_moe(question, None)


# --- FP8 linear ----------------------------------------------------------------------------------


def _init_fp8(activation_key: Any, weight_key: Any, method: str) -> tuple[str, str]:
    torch = importlib.import_module("torch")
    values: Json = {
        "activation_quant_key": activation_key,
        "weight_quant_key": weight_key,
        "weight_shape": WEIGHT_SHAPE,
        "input_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
        "module_name": method,
    }
    entry = _linear("init_fp8_linear_kernel")
    name = type(entry(**known_arguments(entry, values))).__name__
    return name, name


def select_fp8_linear(_question: Question) -> tuple[str, str]:
    """One static scale per tensor, as in ModelOpt checkpoints."""
    key = quantization("quant_utils").kFp8StaticTensorSym
    return _init_fp8(key, key, "ModelOptFp8LinearMethod")


def select_fp8_block(_question: Question) -> tuple[str, str]:
    """Weights with a scale a 128x128 block: chosen from 0.20.0 on, in the layer's method before."""
    if _fp8_is_chosen():
        keys = quantization("quant_utils")
        return _init_fp8(keys.kFp8Dynamic128Sym, keys.kFp8Static128BlockSym, "Fp8LinearMethod")
    fp8 = importlib.import_module(_FP8)
    config = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
    )
    method = fp8.Fp8LinearMethod(config)
    watch(fp8, "apply_fp8_marlin")
    if hasattr(method, "fp8_linear"):  # in 0.19 Marlin is a kernel class that the method asks
        watch(method.fp8_linear, "apply_weights")
    if hasattr(method, "w8a8_block_fp8_linear"):
        chosen = method.w8a8_block_fp8_linear
        name = chosen.w8a8_blockscale_op.__name__
        watch(chosen, "_run_")
        chosen.w8a8_blockscale_op = getattr(chosen, name)
    torch = importlib.import_module("torch")
    layer = _AnyLayer(weight=torch.empty(WEIGHT_SHAPE, dtype=torch.float8_e4m3fn))
    tokens = torch.empty((16, WEIGHT_SHAPE[1]), dtype=torch.bfloat16)
    reached = kernel_reached(lambda: method.apply(layer, tokens))
    if reached == "apply_weights":
        reached = type(method.fp8_linear).__name__
    elif reached.startswith("_run_"):
        reached = f"{type(method.w8a8_block_fp8_linear).__name__}.{reached}"
    return reached, type(method).__name__


KINDS: dict[str, Callable[[Question], tuple[str, str]]] = {
    "nvfp4-linear": select_nvfp4_linear,
    "nvfp4-moe": select_nvfp4_moe,
    "fp8-linear": select_fp8_linear,
    "fp8-block": select_fp8_block,
    "w4a16-linear": select_w4a16_linear,
    "w4a16-moe": select_w4a16_moe,
}


def warm_modules(kinds: Iterable[str]) -> Iterator[str]:
    """Modules that several queries import, in import order.

    Imported before the first fork, so that the children need not do it one by one.  The last ones
    depend on the parameters of the release's entry points, so the others are imported first.
    """
    wanted = set(kinds)
    moe = {"nvfp4-moe", "w4a16-moe"} & wanted
    if wanted - moe:
        yield from (_LINEAR, _NVFP4_UTILS)
    if {"nvfp4-linear", "w4a16-linear"} & wanted:
        yield "flashinfer.gemm"
    if moe:
        yield from (_ORACLE, "flashinfer.fused_moe")
    with contextlib.suppress(Exception):  # what cannot be imported says so to who asks for it
        if "fp8-block" in wanted and not _fp8_is_chosen():
            yield _FP8
        if "w4a16-linear" in wanted and not _a16_is_chosen():
            yield _SCHEMES
