"""``device_probe.py`` on a CPU: vLLM's own layers with its emulated NVFP4 kernel.

    python emulate.py RUNTIME [none | scales | rows | nan | flat] < request.json > events.jsonl

The release's linear layer, its ModelOpt method and its emulation kernel run as they are; emulation
is written in Triton for GPUs and in torch for others, so it is told that this is another.  For
experts, the release's layer, router and method run; what they would hand to a fused kernel is
computed here from the parameters that the method prepared.  The second word breaks the result in a
way that a kernel could.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

sys.path.insert(0, sys.argv[1])
BREAK = sys.argv[2] if len(sys.argv) > 2 else "none"

from builder.probes import device_probe, dispatch_device  # noqa: E402

EMULATION = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"


class OnCpu:
    """A platform that is no GPU to whoever asks that; all else is the simulated one's."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def is_cuda_alike(self) -> bool:
        """It is not."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)


class Kernel:
    """Stands for the fused kernel: W4A16 arithmetic in FP32, each expert by itself."""

    def __init__(self, layer: Any, real: Any) -> None:
        self.layer, self.real = layer, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def dense(self, name: str) -> Any:
        """The experts' weights."""
        torch = importlib.import_module("torch")
        reference = importlib.import_module("builder.probes.nvfp4_reference")
        codes = reference.unpack(getattr(self.layer, f"{name}_weight").data)
        scales = getattr(self.layer, f"{name}_weight_scale").data.float()
        factor = getattr(self.layer, f"{name}_weight_scale_2").data.float().reshape(len(codes), -1)
        values = reference.decode_e2m1(codes) * scales.repeat_interleave(16, dim=-1)
        if BREAK == "scales":
            values = reference.decode_e2m1(codes) * scales.roll(1, -1).repeat_interleave(16, dim=-1)
        return (values * factor[:, :1, None]).to(torch.float64)

    def apply(
        self, x: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> Any:
        """What the experts give."""
        torch = importlib.import_module("torch")
        up, down = self.dense("w13"), self.dense("w2")
        out = torch.zeros_like(x, dtype=torch.float64)
        for row in range(len(x)):
            for weight, expert in zip(topk_weights[row], topk_ids[row], strict=True):
                first, second = (up[int(expert)] @ x[row].double()).chunk(2)
                if BREAK == "rows":
                    first, second = second, first
                inner = first * torch.sigmoid(first) * second
                out[row] += float(weight) * (down[int(expert)] @ inner)
        return broken(out.to(x.dtype))


def broken(output: Any) -> Any:
    """The output as the second word of the command wants it."""
    if BREAK == "nan":
        output[..., -1] = float("nan")
    if BREAK == "flat":
        output.fill_(1.0)
    return output


def holds_fp8(module: Any) -> bool:
    """Whether a finished layer holds FP8 weights."""
    weight = getattr(module, "weight", None)
    return str(getattr(weight, "dtype", "")) == "torch.float8_e4m3fn"


def multiply(layer: Any, x: Any, _bias: Any = None) -> Any:
    """A finished FP8 layer's product, in FP32; vLLM turns the weight over for some kernels."""
    weight = layer.weight.float() * float(layer.weight_scale.max())
    weight = weight if weight.shape[0] == x.shape[-1] else weight.T
    return (x.float() @ weight).to(x.dtype)


def topk_softmax(weights: Any, indices: Any, _rows: Any, logits: Any, *rest: Any, **_: Any) -> None:
    """What the router asks of vLLM's extension."""
    torch = importlib.import_module("torch")
    chosen = torch.softmax(logits.float(), dim=-1).topk(weights.shape[-1])
    weights.copy_(chosen.values)
    indices.copy_(chosen.indices)
    if rest and rest[0] is True:
        weights.div_(weights.sum(-1, keepdim=True))


def finish(layer: Any) -> list[str]:
    """The release's own finish, on this machine."""
    for name, parameter in layer.named_parameters():
        if BREAK == "scales" and name.endswith("weight_scale") and "w13" not in name:
            bits = parameter.data.view(importlib.import_module("torch").uint8)
            bits.copy_(bits.roll(1, -1))
    emulation: Any = importlib.import_module(EMULATION)
    if hasattr(emulation, "current_platform") and not isinstance(emulation.current_platform, OnCpu):
        emulation.current_platform = OnCpu(emulation.current_platform)
    methods: list[str] = REAL_FINISH(layer)
    for module in layer.modules():
        method: Any = getattr(module, "quant_method", None)
        if holds_fp8(module):
            method.apply = multiply
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = Kernel(module, method.moe_kernel)
    return methods


def prepare(request: Any, probe: Any, scratch: str) -> Any:
    """The release prepared, its operators registered for this machine."""
    kept = REAL_PREPARE(request, probe, scratch)
    platform = importlib.import_module("vllm.platforms").current_platform
    type(platform).dispatch_key = "CPU"
    operators: Any = importlib.import_module("vllm._custom_ops")
    operators.topk_softmax = topk_softmax
    return kept


def call(self: Any) -> Any:
    """A linear layer's output, broken where that is wanted."""
    return broken(REAL_CALL(self))


REAL_FINISH, REAL_PREPARE = device_probe.finish, dispatch_device.prepare
REAL_CALL = device_probe.Linear.__call__
device_probe.finish, dispatch_device.prepare = finish, prepare
device_probe.Linear.__call__ = call  # type: ignore[method-assign]

if __name__ == "__main__":
    if BREAK == "rows":
        cases = importlib.import_module("builder.probes.device_probe")
        values = cases.Linear.values

        def swapped(kind: str, case: Any) -> Any:
            """The weight's rows in another order than its scales'."""
            made = values(kind, case)
            return {**made, "weight": made["weight"].roll(1, 0)}

        cases.Linear.values = staticmethod(swapped)
    device_probe.main()
