"""vLLM's own NVFP4 linear layer in front of the kernel whose launch is recorded.

Runs under the target's interpreter beside ``launch_probe.py``.  Weights as a checkpoint has them go
through the release's ``process_weights_after_loading`` and its ``apply``, on the CPU.  Operators
that only exist for a GPU are answered by references; what vLLM hands to FlashInfer (packing,
swizzled scales, padding, factors) is its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.runtime.launch_cases import Case

launch_cases: Any = importlib.import_module("launch_cases")
reference: Any = importlib.import_module("nvfp4_reference")
torch: Any = importlib.import_module("torch")

#: Operators of vLLM's library that a linear layer calls, as the release's own schema has them.
QUANTISE = "scaled_fp4_quant.out"
SCHEMA = (
    f"{QUANTISE}(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()"
)


class NotSimulated(Exception):
    """The release's layer needs something that is not simulated: nothing was found out about it."""

    stage = "layer"


def quantise(x: Any, inverse: Any, swizzle: bool, *, output: Any, output_scale: Any) -> None:
    """``scaled_fp4_quant``: codes and block scales of activations, in the layout asked for."""
    made = reference.quantise(x.double(), 1.0 / float(inverse))
    output.copy_(reference.pack(made.codes))
    scales = made.scales.contiguous().view(torch.uint8)
    laid = launch_cases.swizzled(made.scales) if swizzle else scales
    output_scale.view(torch.uint8).copy_(laid)


class Handed:
    """Listens at FlashInfer's GEMM: what vLLM hands to it are the inputs of the case that runs."""

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


@contextlib.contextmanager
def on_cpu(ask: dict[str, Any], probe: Any) -> Iterator[None]:
    """vLLM ready to make layers, its operators for GPUs answered on the CPU.

    Raises:
        NotSimulated: this release cannot be prepared so.
    """
    device_probe = importlib.import_module("device_probe")
    scratch = os.path.join(os.getcwd(), "vllm")
    os.mkdir(scratch)
    request = {
        "kind": "nvfp4-linear",
        "device": "cpu",
        "linear_backend": ask.get("linear_backend", "auto"),
        "simulate": {"pretend_nvcc": True, "pretend_triton": True},
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(
                device_probe.vllm_ready(request, lambda _event, text: probe.note(text), scratch)
            )
            importlib.import_module("vllm._custom_ops")  # looks which operators there are
            library = torch.library.Library("_C", "FRAGMENT")
            library.define(SCHEMA)
            library.impl(QUANTISE, quantise, "CPU")
            probe.note(f"torch.ops._C.{QUANTISE}: a reference, on the CPU")
            product = importlib.import_module("vllm.utils.flashinfer").flashinfer_mm_fp4
            product.register_kernel("cpu")(product._init_fn)
            probe.note("torch.Tensor.cuda: gives the tensor itself")
        except Exception as error:
            raise NotSimulated(f"{type(error).__name__}: {error}") from error
        torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
        gc.freeze()  # tensors that a launch may reach are made later
        yield


def linear_cases(ask: dict[str, Any], probe: Any) -> Iterator[Case]:
    """Calls of vLLM's NVFP4 linear layer, for each shape one with every value and one with few.

    The sums are exact in both, so no two scales can change places within a bound.
    """
    layers = importlib.import_module("device_layers")
    with on_cpu(ask, probe), torch.no_grad():
        handed = Handed()
        for shape in ask["shapes"]:
            draw = launch_cases.ExactCases("fp4", seed=int(ask.get("seed", 0)))
            for made in (draw.ordinary(*shape), draw.single(*shape)):
                try:
                    layer = layers.Linear("nvfp4-linear", made, "cpu")
                except (ImportError, layers.UnknownLayerError) as error:
                    raise NotSimulated(f"{type(error).__name__}: {error}") from error
                handed.case = _case(layer, made, handed)
                yield handed.case


def _case(layer: Any, made: Any, handed: Handed) -> Any:
    methods, shape = ", ".join(layer.methods), tuple(made.expected.exact.shape)

    def call() -> None:
        handed.called = False
        output = layer()
        if not handed.called:
            raise NotSimulated(f"{methods} does not call flashinfer.mm_fp4")
        if tuple(output.shape) != shape:
            raise RuntimeError(f"the layer gives {tuple(output.shape)}, not {shape}")

    name = f"{methods}: {made.name}, {made.shape}"
    return launch_cases.Case(name, call, [], None, made.expected.exact, made.expected.bound)
