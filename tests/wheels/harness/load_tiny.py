"""vLLM's own configuration and loader on the generated models, on a machine without a GPU.

    python load_tiny.py RUNTIME REQUEST.json FOLDER...

Prints one JSON object a model: what vLLM takes it for, and which parameters its loader left as they
were.  Operators that a CPU does not have are stand-ins: none is called while a model is made.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, sys.argv[1])

from builder.probes import (
    dispatch_device,
    dispatch_kinds,
    dispatch_probe,
    simulated_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable

#: These ask whether an operator exists, in order to describe it; there it must not.
DESCRIBERS = ("_custom_ops.py", "_aiter_ops.py")
SENTINEL = 0xA5


def stand_in_operators(torch: Any) -> None:
    """Let models take hold of operators that are not there."""
    namespace = type(torch.ops._C)
    real = namespace.__getattr__

    def look_up(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            asking = sys._getframe(1).f_code.co_filename
            ours = self.name in ("_C", "_moe_C", "_C_cache_ops") and not name.startswith("__")
            if asking.endswith(DESCRIBERS) or not ours:
                raise
            return types.SimpleNamespace(default=object(), out=object(), __name__=name)

    namespace.__getattr__ = look_up


def configure(folder: str, probe: Any) -> tuple[Any, Any]:
    """The release's configuration for a model, and what holds it."""
    config = importlib.import_module("vllm.config")
    weights = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    load = importlib.import_module("vllm.config.load").LoadConfig()
    model = config.ModelConfig(model=folder, max_model_len=1024)
    kernel = {"linear_backend": "emulation"}
    try:
        chosen = dispatch_probe.kernel_config(kernel)
    except dispatch_kinds.NotAskableError:
        chosen = dispatch_probe.kernel_config({})
    whole = dispatch_probe.vllm_config(chosen, probe)
    whole.model_config, whole.load_config = model, load
    whole.cache_config = config.CacheConfig(block_size=16)
    whole.quant_config = weights.get_quant_config(model, load)
    return model, whole


def untouched(model: Any, tensors: Any) -> list[str]:
    """Parameters that hold what was put there before loading."""
    torch = importlib.import_module("torch")

    def raw(parameter: Any) -> Any:
        return parameter.data.reshape(-1).view(torch.uint8)

    for parameter in model.parameters():
        raw(parameter).fill_(SENTINEL)
    model.load_weights(iter(tensors.items()))
    return [n for n, p in model.named_parameters() if bool((raw(p) == SENTINEL).all())]


def make(folder: str, probe: Any) -> tuple[Any, Any]:
    """One model, and the configuration that it was made with."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("vllm.config")
    parallel = importlib.import_module("vllm.distributed.parallel_state")
    utils = importlib.import_module("vllm.model_executor.model_loader.utils")
    model, whole = configure(folder, probe)
    with config.set_current_vllm_config(whole):
        if not parallel.model_parallel_is_initialized():
            store = f"file://{tempfile.mkdtemp()}/group"
            parallel.init_distributed_environment(1, 0, store, 0, backend="gloo")
            parallel.initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        made = utils.initialize_model(vllm_config=whole, model_config=model)
        torch.set_default_dtype(torch.float32)
    return made, whole


def load(folder: str, probe: Any) -> dict[str, Any]:
    """One model, made and loaded."""
    config = importlib.import_module("vllm.config")
    tensors = importlib.import_module("safetensors.torch").load_file(f"{folder}/model.safetensors")
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    made, whole = make(folder, probe)
    with config.set_current_vllm_config(whole):
        left = untouched(made, tensors)
    methods = {
        type(m.quant_method).__name__ for m in made.modules() if getattr(m, "quant_method", None)
    }
    return {
        "quantization": whole.model_config.quantization,
        "architecture": type(made).__name__,
        "untouched": left,
        "methods": sorted(methods),
        "ids": tokenizer("t5 t6").input_ids,
    }


def main() -> None:
    """Load every model; experts first, because only they make vLLM's group for them."""
    with_each(load, sys.argv[3:])


def with_each(tell: Callable[[str, Any], dict[str, Any]], folders: list[str]) -> None:
    """Print what is told of each folder, in a vLLM that believes in a device."""
    request = json.loads(Path(sys.argv[2]).read_text())
    out = simulated_device.claim_stdout()
    probe = dispatch_device.Probe.of(request)
    with tempfile.TemporaryDirectory() as scratch:
        kept = dispatch_device.prepare(request, probe, scratch)
        torch = importlib.import_module("torch")
        stand_in_operators(torch)
        sys.modules["flashinfer.comm"] = None  # type: ignore[assignment]  # wants libcudart
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda function: function()
        for folder in folders:
            print(json.dumps(tell(folder, probe)), file=out, flush=True)
        del kept


if __name__ == "__main__":
    main()
