"""Run an installed vLLM's own quantised layers on this machine's GPU, and check the numbers.

This file runs under the image's interpreter, in a process of its own for each kind of kernel: a
kernel that traps takes the CUDA context with it.  It imports the standard library, its siblings,
torch and vLLM.

    python device_probe.pyz < request.json > events.jsonl

A layer is made as a model makes it: vLLM's ``ReplicatedLinear`` or fused experts under its ModelOpt
quantisation, filled as a checkpoint fills it, finished by its own
``process_weights_after_loading``, and called.  So repacking, swizzling, padding, quantisation and
the product are all the release's own code.

Request (every key but ``kind`` may be left out)::

    {"kind": "nvfp4-linear" | "nvfp4-moe" | "fp8-linear" | "reference",
     "linear_backend": "auto", "moe_backend": "auto", "env": {"NAME": "value, or null to unset"},
     "activations": "fp4" | "fp8" | "bf16", "shapes": [[m, n, k], ...], "roundings": 1,
     "device": "cuda", "simulate": null | {a request of dispatch_probe.py, for tests on a CPU}}

``activations`` is the selected kernel's operand type, ``roundings`` how often it rounds a
result.  For ``nvfp4-moe``, ``shapes`` are ``[tokens, hidden, intermediate]``.  ``reference`` asks
no vLLM: torch multiplies the dequantised operands on the same device, which shows whether the
device meets the bounds, before a kernel is blamed.

Events, one JSON object per line, flushed at once, so that they survive a crash::

    {"event": "selected", "kernel": "...", "lines": ["..."]}   {"event": "note", "text": "..."}
    {"event": "case", "name": "random", "shape": "17x96x256", "problems": [], "worst": 0.9, ...}
    {"event": "kernels", "names": ["..."]}
    {"event": "error", "stage": "...", "type": "...", "message": "...", "tail": ["..."]}
    {"event": "end"}
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
import types
from typing import TYPE_CHECKING, Any, TextIO

from builder.probes import dispatch_device, dispatch_kinds, dispatch_probe, simulated_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# -------------------------------------------------------------------------------- vLLM's own layers

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
            kernel = getattr(holder, name, None)
            if kernel is not None:
                return kernel.__name__ if inspect.isclass(kernel) else kernel_name(kernel)
    return type(method).__name__


def kernel_name(kernel: Any) -> str:
    """The name of an enumeration member, or of an object's class."""
    return str(kernel) if hasattr(kernel, "value") else type(kernel).__name__


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
            values[f"{name}_weight_scale_2"] = Fused.global_scale(name, weight.factor)
            values[f"{name}_input_scale"] = float("nan") if kind == "w4a16-moe" else 1.0
        return values

    @staticmethod
    def global_scale(name: str, factor: Any) -> Any:
        """A global scale in a checkpoint's form: of each expert, for gate and up one each."""
        if isinstance(factor, float):
            return factor
        each = factor.flatten()
        return each[:, None].expand(-1, 2) if name == "w13" else each

    def __call__(self, tokens: Any) -> Any:
        """The experts' output for some tokens."""
        torch = importlib.import_module("torch")
        context = importlib.import_module("vllm.forward_context").set_forward_context
        x = tokens.x.to(self.device, torch.bfloat16)
        logits = tokens.logits().to(self.device)
        with context(None, self.config, num_tokens=len(x)):
            return self.layer(hidden_states=x, router_logits=logits)


# -------------------------------------------------------------------------------------- the request


class Events:
    """Writes events as they come."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def __call__(self, event: str, **values: Any) -> None:
        """Write one event and flush it."""
        json.dump({"event": event, **values}, self.out)
        self.out.write("\n")
        self.out.flush()

    def error(self, stage: str, error: BaseException) -> None:
        """Write an error with the end of its traceback."""
        tail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        words = dispatch_probe.describe(error)
        self("error", stage=stage, tail=tail.splitlines()[-15:], **words)


# --- vLLM, ready to make layers ----------------------------------------------------------------


@contextlib.contextmanager
def vllm_ready(request: Json, events: Callable[..., None], scratch: str) -> Iterator[Any]:
    """Set up a configuration and a parallel group of one, like a worker of vLLM."""
    probe = dispatch_device.Probe.of(request.get("simulate") or {})
    stand_ins = None
    if request.get("simulate") is not None:
        stand_ins = dispatch_device.prepare(request["simulate"], probe, scratch)
    simulated_device.apply_environment(request.get("env", {}))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch = importlib.import_module("torch")
    config = importlib.import_module("vllm.config")
    parallel = importlib.import_module("vllm.distributed.parallel_state")
    ask: Json = {
        name: request[name] for name in ("linear_backend", "moe_backend") if name in request
    }
    configuration = dispatch_probe.vllm_config(dispatch_probe.kernel_config(ask), probe)
    with config.set_current_vllm_config(configuration):
        parallel.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{scratch}/group",
            local_rank=0,
            backend="gloo",
        )
        parallel.initialize_model_parallel(1, 1)
        if request["kind"] == "fp8-linear":  # its method reads the type of the model's results
            configuration.__dict__["model_config"] = types.SimpleNamespace(dtype=torch.bfloat16)
        with contextlib.suppress(ImportError, AttributeError):
            workspace = importlib.import_module("vllm.v1.worker.workspace")
            workspace.init_workspace_manager(torch.device(request.get("device", "cuda")))
        for words in probe.simulated:
            events("note", text=words)
        yield configuration
    del stand_ins


# --- runs --------------------------------------------------------------------------------------


class Run:
    """One request on one device."""

    def __init__(self, request: Json, events: Events) -> None:
        self.request, self.events = request, events
        self.kind = str(request["kind"])
        self.device = str(request.get("device", "cuda"))
        self.activations = str(request.get("activations", "fp4"))
        self.roundings = int(request.get("roundings", 1))
        self.shapes = request.get("shapes") or [[1, 128, 128], [17, 192, 256], [130, 256, 512]]
        from builder.probes import nvfp4_reference

        self.reference = nvfp4_reference

    def judged(self, name: str, shape: str, output: Any, *expectations: Any) -> None:
        """One case, compared with each correct result for this kernel."""
        verdicts = [
            self.reference.judge(output, self.reference.rounded_again(e, self.roundings - 1))
            for e in expectations
            if e is not None
        ]
        best = min(verdicts, key=lambda v: len(v["problems"]))
        self.events("case", name=name, shape=shape, **best)

    def cases(self) -> Any:
        """Linear cases of the kind, one after the other."""
        from builder.probes import device_cases

        if self.kind == "fp8-linear":
            return device_cases.fp8_cases(self.shapes)
        return device_cases.LinearCases(self.activations).all(self.shapes)

    def linear(self, recorder: Any) -> None:
        """Every linear case through a layer of its own; the largest ordinary one is profiled."""
        largest: Any = None
        for case in self.cases():
            layer = Linear(self.kind, case, self.device)
            if largest is None:
                self.events("selected", kernel=layer.methods, lines=telling(recorder))
            self.judged(case.name, case.shape, layer(), case.expected, case.flushed)
            if largest is None or case.name == "random":
                largest = layer
        if largest is not None:
            self.profile(largest)

    def experts(self, recorder: Any, config: Any) -> None:
        """Fused experts: each set of weights with every batch of tokens."""
        from builder.probes import device_cases

        first = True
        for varied in (False, True):
            _, hidden, intermediate = self.shapes[0]
            weights = device_cases.make_experts(EXPERTS, hidden, intermediate, varied=varied)
            layer = Fused(weights, config, self.device)
            if first:
                self.events("selected", kernel=layer.methods, lines=telling(recorder))
            tokens = None
            for count, *_ in self.shapes:
                tokens = device_cases.make_tokens(count, EXPERTS, TOP_K, hidden)
                for batch in device_cases.batches(tokens, degenerate=not varied):
                    expected = device_cases.expect(weights, batch, self.activations)
                    name = f"{batch.name}{', any scales' if varied else ''}"
                    shape = f"{count}x{hidden}x{intermediate}"
                    self.judged(name, shape, layer(batch), expected)
            if first:
                self.profile(functools.partial(layer, tokens))
            first = False

    def compare_torch(self) -> None:
        """torch's own product of the dequantised operands on the device, in two precisions."""
        from builder.probes import device_cases

        torch = importlib.import_module("torch")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        for case in device_cases.LinearCases("bf16").all(self.shapes):
            right = case.weight.dense().to(self.device)
            left = case.x.to(self.device)
            full = (left.float() @ right.float().T).to(torch.bfloat16)
            self.judged(f"{case.name}, float32", case.shape, full, case.expected)
            narrow = right.to(torch.bfloat16)
            if bool((narrow.double() == right).all()):
                self.judged(f"{case.name}, bfloat16", case.shape, left @ narrow.T, case.expected)
        self.profile(lambda: left @ narrow.T)

    def profile(self, run: Callable[[], Any]) -> None:
        """Which kernels one call runs, as the profiler saw them."""
        if self.device == "cpu":
            return
        try:
            self.events("kernels", names=kernels_of(run))
        except Exception as error:
            self.events.error("profiler", error)


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call runs on the GPU; copies and fills are left out."""
    torch = importlib.import_module("torch")
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
    return sorted({e.name for e in on_device if not e.name.startswith(("Memcpy", "Memset"))})


def telling(recorder: Any) -> list[str]:
    """Logged lines that name the selected kernel."""
    return [text for text in recorder.lines if text.startswith(("Using ", "Selected "))]


def run(request: Json, events: Events) -> None:
    """Answer one request."""
    work = Run(request, events)
    recorder = dispatch_probe.Recorder()
    with tempfile.TemporaryDirectory(prefix="device-probe-") as scratch:
        if work.kind == "reference":
            work.compare_torch()
            return
        with vllm_ready(request, events, scratch) as config, dispatch_probe.attached(recorder):
            if work.kind == "nvfp4-moe":
                work.experts(recorder, config)
            else:
                work.linear(recorder)


def main() -> int:
    """Read a request from stdin, write events to stdout."""
    events = Events(simulated_device.claim_stdout())
    request = json.load(sys.stdin)
    try:
        importlib.import_module("torch").set_grad_enabled(False)
        run(request, events)
    except Exception as error:
        events.error("run", error)
    events("end")
    events.out.close()
    # not sys.exit: libraries that lost their device hang in their own clean-up
    os._exit(0)
