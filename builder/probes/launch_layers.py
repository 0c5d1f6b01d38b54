"""Runs vLLM's own NVFP4 layers up to the kernel, whose launch is recorded.

Runs under the target's interpreter beside ``launch_probe.py``.  Weights in a checkpoint's form go
through the release's ``process_weights_after_loading`` and its ``apply``, on the CPU.  Operators
that only exist for a GPU have reference implementations; everything that vLLM passes to FlashInfer
(packing, swizzled scales, padding, factors) comes from vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import types
from typing import TYPE_CHECKING, Any

from builder.probes import device_cases, device_probe, launch_cases
from builder.probes import nvfp4_reference as reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.probes.launch_cases import Case

torch: Any = importlib.import_module("torch")

#: Operators of vLLM's library that a linear layer calls, in the release's own schema.
QUANTISE = "scaled_fp4_quant.out"
SCHEMA = (
    f"{QUANTISE}(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()"
)


#: The most tokens of a batch, for which FlashInfer allocates memory.  Our choice.
MOST_TOKENS = 64


class NotSimulated(Exception):
    """The release's layer needs something that is not simulated, so there is no result."""

    stage = "layer"


def quantise(x: Any, inverse: Any, swizzle: bool, *, output: Any, output_scale: Any) -> None:
    """``scaled_fp4_quant``: codes and block scales of activations, in the requested layout."""
    quantised = reference.quantise(x.double(), 1.0 / float(inverse))
    output.copy_(reference.pack(quantised.codes))
    scales = quantised.scales.contiguous().view(torch.uint8)
    laid = launch_cases.swizzled(quantised.scales) if swizzle else scales
    output_scale.view(torch.uint8).copy_(laid)


def topk_softmax(
    weights: Any, chosen: Any, rows: Any, logits: Any, renormalise: bool = False, *more: Any
) -> None:
    """``topk_softmax``: the experts of each token, and their weights from the router."""
    if any(one is not None for one in more):
        raise NotSimulated("topk_softmax with a bias or padding")
    top = torch.softmax(logits.float(), -1).topk(weights.shape[-1])
    total = top.values.sum(-1, keepdim=True) if renormalise else 1.0
    weights.copy_(top.values / total)
    chosen.copy_(top.indices)
    rows.zero_()


class Handed:
    """Replaces FlashInfer's GEMM, to record what vLLM passes to it in the current case."""

    name = "flashinfer.mm_fp4"

    def __init__(self) -> None:
        self.case: Any = None
        self.called = False
        flashinfer: Any = importlib.import_module("flashinfer")
        self._original = flashinfer.mm_fp4
        self._signature = inspect.signature(self._original)
        flashinfer.mm_fp4 = self._mm_fp4  # the release looks it up when it calls it

    def _mm_fp4(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        given, self.called = bound.arguments, True
        shape = given["a"].shape[0], given["b"].shape[1]
        self.case.inputs = [v for v in given.values() if isinstance(v, torch.Tensor)]
        self.case.output = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        # padding is zero
        wider = (0, shape[1] - self.case.exact.shape[1])
        for name in ("exact", "bound"):
            padded = torch.nn.functional.pad(getattr(self.case, name), wider)
            setattr(self.case, name, padded)
        given["out"] = self.case.output
        return self._original(*bound.args, **bound.kwargs)


def vllm_on_cpu(ask: dict[str, Any], probe: Any) -> Any:
    """Set up vLLM to create layers on the CPU, and return its configuration.

    It stays so to the end of the process.

    Raises:
        NotSimulated: this release cannot be set up.
    """
    scratch = os.path.join(os.getcwd(), "vllm")
    os.mkdir(scratch)
    request = {
        "kind": "nvfp4-linear",
        "device": "cpu",
        "linear_backend": ask.get("linear_backend", "auto"),
        "moe_backend": ask.get("moe_backend", "auto"),
        "simulate": {"pretend_nvcc": True, "pretend_triton": True},
    }
    try:
        ready = device_probe.vllm_ready(request, lambda _event, text: probe.note(text), scratch)
        config = _FOR_GOOD.enter_context(ready)
        platforms = importlib.import_module("vllm.platforms")
        type(platforms.current_platform).dispatch_key = "CPU"  # of operators in Python
        importlib.import_module("vllm._custom_ops")  # looks which operators there are
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(SCHEMA)
        library.impl(QUANTISE, quantise, "CPU")
        _FOR_GOOD.callback(lambda: library)
        probe.note(f"torch.ops._C.{QUANTISE}: a reference, on the CPU")
        torch.ops._moe_C.topk_softmax = topk_softmax
        product = importlib.import_module("vllm.utils.flashinfer").flashinfer_mm_fp4
        product.register_kernel("cpu")(product._init_fn)
        probe.note("torch.Tensor.cuda: gives the tensor itself")
    except Exception as error:
        raise NotSimulated(f"{type(error).__name__}: {error}") from error
    if "scheduler_config" not in vars(config):
        vars(config).update(
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=MOST_TOKENS),
            device_config=types.SimpleNamespace(device=torch.device("cpu")),
        )
        probe.note(f"vLLM's configuration: the CPU, and at most {MOST_TOKENS} tokens in a batch")
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
    torch.set_grad_enabled(False)
    return config


#: State that lasts for the process; and vLLM's configuration, or the error.
_FOR_GOOD = contextlib.ExitStack()
_READY: list[Any] = []


#: vLLM's name for the kernels of the package ``b12x``.
PACKAGE = "b12x"


def packages(probe: Any) -> Any:
    """What stands in front of the package ``b12x``, which is ready when this returns."""
    from builder.probes import launch_package as package

    package.ready(probe)
    return package


def ready(ask: dict[str, Any], probe: Any) -> Any:
    """vLLM's configuration, with the backends of the first request."""
    if not _READY:
        try:
            if PACKAGE in (ask.get("linear_backend"), ask.get("moe_backend")):
                package = packages(probe)
                _FOR_GOOD.enter_context(package.OrdinaryMemory())
                with package.without_triton():
                    _READY.append(vllm_on_cpu(ask, probe))
            else:
                _READY.append(vllm_on_cpu(ask, probe))
        except NotSimulated as error:
            _READY.append(error)
    if isinstance(_READY[0], NotSimulated):
        raise _READY[0]
    return _READY[0]


def linear_cases(ask: dict[str, Any], probe: Any) -> Iterator[Case]:
    """Calls of vLLM's NVFP4 linear layer, for each shape one with every value and one with few.

    The sums are exact in both, so swapped scales exceed the bound.
    """
    ready(ask, probe)
    package = ask.get("linear_backend") == PACKAGE
    handed = packages(probe).handed_gemm() if package else Handed()
    kind = ask.get("layer", "nvfp4-linear")
    for shape in ask["shapes"]:
        activations = "bf16" if kind == "w4a16-linear" else "fp4"
        draw = launch_cases.ExactCases(activations, seed=int(ask.get("seed", 0)))
        for case in (draw.ordinary(*shape), draw.single(*shape)):
            try:
                layer = device_probe.Linear(kind, case, "cpu")
            except (ImportError, device_probe.UnknownLayerError) as error:
                raise NotSimulated(f"{type(error).__name__}: {error}") from error
            handed.case = _case(layer, case, handed)
            yield handed.case


def _case(layer: Any, case: Any, handed: Any) -> Any:
    methods, shape = ", ".join(layer.methods), tuple(case.expected.exact.shape)

    def call() -> None:
        handed.called = False
        output = layer()
        if not handed.called:
            raise NotSimulated(f"{methods} does not call {handed.name}")
        if tuple(output.shape) != shape:
            raise RuntimeError(f"the layer gives {tuple(output.shape)}, not {shape}")

    name = f"{methods}: {case.name}, {case.shape}"
    return launch_cases.Case(name, call, [], None, case.expected.exact, case.expected.bound)


class HandedExperts:
    """Replaces FlashInfer's fused experts: a function, or an object in later releases."""

    def __init__(self) -> None:
        self.case: Any = None
        self.called = ""
        flashinfer: Any = importlib.import_module("flashinfer.fused_moe")
        flashinfer.b12x_fused_moe = self._listening(flashinfer.b12x_fused_moe)
        wrapper = getattr(flashinfer, "B12xMoEWrapper", None)
        if wrapper is not None:
            wrapper.run = self._listening(wrapper.run)
            wrapper.__init__ = functools.partialmethod(wrapper.__init__, device="cpu")

    def _listening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def listening(*args: Any, **kwargs: Any) -> Any:
            self.called = original.__qualname__
            output = kwargs.get("output")
            chosen = kwargs.get("token_selected_experts")
            if chosen is not None:
                kwargs["token_selected_experts"] = chosen.as_subclass(launch_cases.OnCuda)
            values = (*args, *kwargs.values())
            tensors = [v for v in values if isinstance(v, torch.Tensor) and v is not output]
            self.case.inputs = tensors
            if output is not None:
                output.fill_(float("nan"))
            self.case.output = original(*args, **kwargs)
            return self.case.output

        return listening


@functools.cache
def handed_experts() -> HandedExperts:
    """The instance of this process: vLLM keeps the function that it found first."""
    return HandedExperts()


def apart(count: int, part: float) -> Any:
    """A global scale for each expert: a part, or that times a power of two."""
    return part * 2.0 ** torch.arange(count).double()[:, None, None]


def shared(weight: Any, part: Any) -> Any:
    """The same weight with another global scale: a power of two is exact."""
    scales = (weight.scales.float() / part).to(weight.scales.dtype)
    return reference.Nvfp4(weight.codes, scales, weight.factor * part)


#: The scale for all of a checkpoint's down projection; and the size of its block scales times that,
#: over what they are else: 5/4 times 2**-9 and more.
PART, SMALL = 2.0**-13, 1.25 * 2.0**-4


def as_checkpoints_have(weight: Any) -> Any:
    """The same weight with scales as small as in a real model.

    E4M3 represents the block scales, but not all of their products with the global scale, where its
    steps are 2**-9.
    """
    scales = weight.scales.float() * (weight.factor * SMALL / PART)
    return reference.Nvfp4(weight.codes, scales.to(weight.scales.dtype), PART)


#: The scale for all of gate and up, and what up is multiplied with: then the products of its scales
#: are 2**-11, which E4M3 does not have.  Gate stays large, so that silu is exact.
BOTH_PART, SMALL_UP = 2.0**-7, 2.0**-11


def with_small_up(experts: Any) -> tuple[Any, Any]:
    """Experts whose up projection has small scales, and equivalent ones."""
    old, down = experts.gate_up, experts.down
    gate, up = (old.scales.float() * old.factor / BOTH_PART).chunk(2, dim=1)
    scales = torch.cat([gate, up * SMALL_UP], dim=1).to(old.scales.dtype)
    both = reference.Nvfp4(old.codes, scales, BOTH_PART)
    same = reference.Nvfp4(down.codes, down.scales, down.factor * SMALL_UP)
    return dataclasses.replace(experts, gate_up=both), dataclasses.replace(experts, down=same)


def _few(count: int, experts: int, top_k: int, hidden: int, *, finer: bool) -> Any:
    """Tokens of four values: the scales between are so small that dense ones do not fit."""
    values = device_cases.FINER if finer else device_cases.VALUES
    return device_cases.make_tokens(count, experts, top_k, hidden, values=values)


def expert_cases(ask: dict[str, Any], probe: Any) -> Iterator[Case]:
    """Calls of vLLM's NVFP4 experts for some numbers of tokens."""
    probe.note("torch.ops._moe_C.topk_softmax: a reference, on the CPU")
    config = ready(ask, probe)
    package = ask.get("moe_backend") == PACKAGE
    if not package:
        launch_cases.as_for_wide_experts()
    forced = launch_cases.a16_is_forced()
    if forced:
        launch_cases.as_for_a16_experts()
    finer = bool(ask.get("finer", forced))
    handed = packages(probe).handed_experts() if package else handed_experts()
    count, hidden, inner = (int(ask[name]) for name in ("experts", "hidden", "intermediate"))
    small = ask.get("small")
    make_experts = device_cases.make_experts if small else device_cases.dense_experts
    experts = make_experts(count, hidden, inner, finer=finer)
    # with small scales the rounding is what counts, and each expert has the same
    parts = (2.0**-2, 2.0**-3) if small else (apart(count, 2.0**-2), apart(count, 2.0**-3))
    down = experts.down
    down = as_checkpoints_have(down) if small == "down" else shared(down, parts[1])
    experts = same = device_cases.Experts(shared(experts.gate_up, parts[0]), down)
    if small == "up":
        experts, same = with_small_up(experts)
    try:
        layer = device_probe.Fused(experts, config, "cpu", ask.get("layer", "nvfp4-moe"))
    except (ImportError, device_probe.UnknownLayerError) as error:
        raise NotSimulated(f"{type(error).__name__}: {error}") from error
    for number in ask["tokens"]:
        make_tokens = _few if small else device_cases.dense_tokens
        tokens = make_tokens(number, count, device_probe.TOP_K, hidden, finer=finer)
        tokens = tokens if small else device_cases.with_unequal_shares(tokens, whole=True)
        expected = launch_cases.exactly(same, tokens)

        def call(tokens: Any = tokens) -> None:
            handed.called = ""
            layer(tokens)
            if not handed.called:
                raise NotSimulated(f"{', '.join(layer.methods)} does not call FlashInfer's b12x")

        shape = f"{number} tokens, {count} experts, {hidden}x{inner}"
        name = f"{', '.join(layer.methods)}: {tokens.name}, {shape}"
        handed.case = launch_cases.Case(name, call, [], None, expected.exact, expected.bound)
        yield handed.case
