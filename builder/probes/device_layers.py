"""Creates vLLM's own quantised layers, and loads weights like a model and a checkpoint do.

Runs beside ``device_probe.py`` under the image's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from builder.probes import dispatch_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = dict[str, Any]

#: ModelOpt's names of the quantisation in checkpoints.
QUANTISATIONS: dict[str, tuple[str, Json]] = {
    "nvfp4-linear": ("ModelOptNvFp4Config", {"quant_algo": "NVFP4", "group_size": 16}),
    "w4a16-linear": ("ModelOptNvFp4Config", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
    "nvfp4-moe": ("ModelOptNvFp4Config", {"quant_algo": "NVFP4", "group_size": 16}),
    "w4a16-moe": ("ModelOptNvFp4Config", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
    "fp8-linear": ("ModelOptFp8Config", {"quant_algo": "FP8"}),
}
#: Experts of a layer, and experts per token.
EXPERTS, TOP_K = 8, 2


class UnknownLayerError(Exception):
    """The release's layer has an unknown form, so this check cannot fill it."""


def quantisation(kind: str) -> Any:
    """The release's quantisation, configured like a checkpoint's hf_quant_config.json."""
    name, values = QUANTISATIONS[kind]
    module = importlib.import_module("vllm.model_executor.layers.quantization.modelopt")
    inner = {"kv_cache_quant_algo": None, "exclude_modules": [], **values}
    return getattr(module, name).from_config({"quant_method": "modelopt", "quantization": inner})


@contextlib.contextmanager
def making(device: str) -> Iterator[None]:
    """Create tensors on the device and in bfloat16, as when a model is loaded."""
    torch = importlib.import_module("torch")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def fill(layer: Any, values: Json) -> None:
    """Put tensors and numbers into a layer's parameters, by the last part of their names.

    Raises:
        UnknownLayerError: the release's layer has a parameter that a checkpoint of this kind would
            not fill, or of another shape.
    """
    for path, parameter in layer.named_parameters():
        name = path.rpartition(".")[2]
        if name not in values:
            raise UnknownLayerError(
                f"{type(layer).__name__} has a parameter {path}, unknown to this check"
            )
        value = values[name]
        if isinstance(value, float):
            parameter.data.fill_(value)
        elif parameter.data.shape != value.shape:
            raise UnknownLayerError(f"{path} is {tuple(parameter.shape)}, not {tuple(value.shape)}")
        else:
            parameter.data.copy_(value)


def finish(layer: Any) -> list[str]:
    """Make each quantised part convert its weights for its kernel; return its methods' names."""
    methods = []
    for module in list(layer.modules()):
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
            methods.append(method_name(method))
    return methods


def method_name(method: Any) -> str:
    """The release's name for the kernel of a quantisation method."""
    scheme = getattr(method, "scheme", None)
    for holder in (method, scheme):
        for name in ("kernel", "fp8_linear", "experts_cls", "backend"):
            found = getattr(holder, name, None)
            if found is not None:
                return found.__name__ if inspect.isclass(found) else kernel_name(found)
    return type(method).__name__


def kernel_name(found: Any) -> str:
    """The name of an enumeration member, or of an object's class."""
    return str(found) if hasattr(found, "value") else type(found).__name__


class Linear:
    """vLLM's linear layer with one case's weights: NVFP4, weights alone in FP4, or FP8."""

    def __init__(self, kind: str, case: Any, device: str) -> None:
        torch = importlib.import_module("torch")
        linear = importlib.import_module("vllm.model_executor.layers.linear")
        n, k = case.expected.exact.shape[-1], case.x.shape[-1]
        with making(device):
            self.layer = linear.ReplicatedLinear(
                k,
                n,
                bias=False,
                params_dtype=torch.bfloat16,
                quant_config=quantisation(kind),
                prefix="model.layers.0.mlp.down_proj",
            )
        fill(self.layer, self.values(kind, case))
        self.methods = finish(self.layer)
        self.x = case.x.to(device)

    @staticmethod
    def values(kind: str, case: Any) -> Json:
        """The parameters in a checkpoint's form."""
        if kind == "fp8-linear":
            weight = case.weight
            return {
                "weight": weight.values,
                "weight_scale": weight.factor,
                "input_scale": case.input_scale,
            }
        from builder.probes import nvfp4_reference

        return {
            "weight": nvfp4_reference.pack(case.weight.codes),
            "weight_scale": case.weight.scales,
            "weight_scale_2": case.weight.factor,
            "input_scale": case.input_scale,
        }

    def __call__(self) -> Any:
        """The layer's output for the case's activations."""
        output = self.layer(self.x)
        return output[0] if isinstance(output, tuple) else output


class Fused:
    """vLLM's fused experts with one set of weights."""

    made = 0

    def __init__(self, experts: Any, config: Any, device: str, kind: str = "nvfp4-moe") -> None:
        torch = importlib.import_module("torch")
        module = importlib.import_module("vllm.model_executor.layers.fused_moe")
        factory = getattr(module, "FusedMoEFactory", None) or module.FusedMoE
        count, both, hidden = experts.gate_up.codes.shape
        type(self).made += 1
        values = {
            "num_experts": count,
            "top_k": TOP_K,
            "hidden_size": hidden,
            "intermediate_size": both // 2,
            "params_dtype": torch.bfloat16,
            "renormalize": True,
            "reduce_results": False,
            "quant_config": quantisation(kind),
            "prefix": f"model.layers.{self.made}.mlp.experts",
        }
        with making(device):
            self.layer = factory(**dispatch_kinds.known_arguments(factory, values))
        fill(self.layer, self.values(experts, kind))
        self.methods = finish(self.layer)
        self.config, self.device = config, device

    @staticmethod
    def values(experts: Any, kind: str) -> Json:
        """The parameters in a checkpoint's form.

        Both input scales are 1; a weight-only checkpoint has none, so they must not be used.
        """
        from builder.probes.nvfp4_reference import pack

        values: Json = {}
        for name, weight in (("w13", experts.gate_up), ("w2", experts.down)):
            values[f"{name}_weight"] = pack(weight.codes)
            values[f"{name}_weight_scale"] = weight.scales
            values[f"{name}_weight_scale_2"] = weight.factor
            values[f"{name}_input_scale"] = float("nan") if kind == "w4a16-moe" else 1.0
        return values

    def __call__(self, tokens: Any) -> Any:
        """The experts' output for some tokens."""
        torch = importlib.import_module("torch")
        context = importlib.import_module("vllm.forward_context").set_forward_context
        x = tokens.x.to(self.device, torch.bfloat16)
        logits = tokens.logits().to(self.device)
        with context(None, self.config, num_tokens=len(x)):
            return self.layer(hidden_states=x, router_logits=logits)
