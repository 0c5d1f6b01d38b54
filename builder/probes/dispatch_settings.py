"""Settings of a vLLM release: its configuration for a query, and the choices that it offers.

Part of the dispatch probe (see ``dispatch_probe.py``): it runs under the target's interpreter, and
imports nothing but the standard library and what the target has.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import types
import typing
from typing import TYPE_CHECKING, Any

from builder.probes.dispatch_kinds import NotAskableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.probes.dispatch_device import Probe

Json = dict[str, Any]

#: The flag that decides a kind of layer, and the release's type that lists its values.
FLAGS = {
    "nvfp4-linear": ("linear_backend", "LinearBackend"),
    "nvfp4-moe": ("moe_backend", "MoEBackend"),
    "fp8-linear": ("linear_backend", "LinearBackend"),
    "fp8-block": ("linear_backend", "LinearBackend"),
    "w4a16-linear": ("linear_backend", "LinearBackend"),
    "w4a16-moe": ("moe_backend", "MoEBackend"),
}
#: Variables that decide a kind of layer in the releases that read them; None means each of
#: the values that the release itself lists for the variable.
VARIABLES: dict[str, tuple[dict[str, str | None], ...]] = {
    "nvfp4-linear": (
        {"VLLM_NVFP4_GEMM_BACKEND": None},
        {"VLLM_USE_FBGEMM": "1"},
        {"VLLM_USE_NVFP4_CT_EMULATIONS": "1"},
    ),
    "nvfp4-moe": (
        {"VLLM_USE_FLASHINFER_MOE_FP4": "0"},
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1"},
        {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": None},
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    ),
    "fp8-linear": ({"VLLM_TEST_FORCE_FP8_MARLIN": "1"},),
    "fp8-block": (
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
        {"VLLM_USE_DEEP_GEMM": "0"},
    ),
    "w4a16-linear": ({"VLLM_NVFP4_GEMM_BACKEND": None},),
    "w4a16-moe": (
        {"VLLM_USE_FLASHINFER_MOE_FP4": "0"},
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
        {"VLLM_B12X_MOE_FP4_FORCE_A16": "1"},
    ),
}
#: Backends from packages that vLLM requires: an image has them, but a sandbox may not.
PACKAGES = {"humming": "humming"}
#: From 0.30.0 on: a backend for each scheme, ahead of the one for all.
PER_QUANT = "linear_backend_per_quant"
#: A value that no variable accepts, so that a release's error lists the valid ones.
_NO_VALUE = "no-such-value"


def kernel_config(ask: Json) -> Any:
    """The release's own kernel configuration with the request's backends.

    Creating it is part of the query: a release rejects unknown backends here.
    """
    config_type = importlib.import_module("vllm.config.kernel").KernelConfig
    parameters = inspect.signature(config_type).parameters
    chosen: Json = {}
    for setting in ("linear_backend", "moe_backend"):
        value = ask.get(setting, "auto")
        package = PACKAGES.get(value)
        if package and importlib.util.find_spec(package) is None:
            raise NotAskableError(f"the package {package} is not installed here")
        if setting in parameters:
            chosen[setting] = value
        elif value != "auto":
            raise NotAskableError(f"this release has no {setting} setting")
    if PER_QUANT in ask:
        chosen[PER_QUANT] = ask[PER_QUANT]
    return config_type(**chosen)


def vllm_config(kernel: Any, probe: Probe, model_type: str | None = None) -> Any:
    """The release's configuration object around ``kernel``.

    Its checks use executors and models, which a sandbox may not be able to import; then the
    object is created without them, with only the fields that selection reads.  Some releases read
    the model's configuration too: ``model_type`` simulates a model of that type with 16-bit
    activations.
    """
    config = importlib.import_module("vllm.config")
    try:
        made = config.VllmConfig(kernel_config=kernel)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        made = object.__new__(config.VllmConfig)
        made.__dict__.update(
            kernel_config=kernel,
            model_config=None,
            parallel_config=config.ParallelConfig(),
            compilation_config=config.CompilationConfig(),
        )
        probe.note(f"vllm.config.VllmConfig: made without its own checks ({reason})")
    if model_type is not None:
        torch = importlib.import_module("torch")
        text = types.SimpleNamespace(model_type=model_type)
        model = types.SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text, hf_config=text)
        made.__dict__["model_config"] = model
        probe.note(f"model configuration: only a type ({model_type}) and bfloat16")
    return made


# --- what a release offers -----------------------------------------------------------------------


def flag_values(kind: str) -> list[str]:
    """Values of the release's flag for this kind, except ``auto``; none without a flag."""
    kernel = importlib.import_module("vllm.config.kernel")
    values = typing.get_args(getattr(kernel, FLAGS[kind][1], None))
    return [value for value in values if value != "auto"]


def variable_values(name: str) -> list[str]:
    """Values that the release lists for a variable, read from its error for a wrong one."""
    reader = importlib.import_module("vllm.envs").environment_variables[name]
    before = os.environ.get(name)
    os.environ[name] = _NO_VALUE
    try:
        reader()
    except ValueError as error:
        listed = re.search(r"\[.*\]", str(error))
        return [str(value) for value in ast.literal_eval(listed[0])] if listed else []
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return []


def _settings(kind: str) -> Iterator[dict[str, str]]:
    known = importlib.import_module("vllm.envs").environment_variables
    for pattern in VARIABLES[kind]:
        if any(name not in known for name in pattern):
            continue
        open_names = [name for name, value in pattern.items() if value is None]
        fixed = {name: value for name, value in pattern.items() if value is not None}
        if not open_names:
            yield fixed
        for name in open_names:
            for value in variable_values(name):
                yield {**fixed, name: value}


def excluded_models() -> list[str]:
    """Model types that the release excludes from DeepGEMM on this device."""
    with contextlib.suppress(ImportError, AttributeError):
        module = importlib.import_module("vllm.utils.deep_gemm")
        types_ = sorted(module._DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES)
        return [name for name in types_ if module.should_auto_disable_deep_gemm(name)]
    return []


def choices(kind: str, default: str | None) -> list[Json]:
    """An ask for every explicit choice that the release offers for a kind of layer.

    ``default`` is its own selection: disabling that shows the next candidate.
    """
    asks: list[Json] = [{"kind": kind, "env": settings} for settings in _settings(kind)]
    if default is not None and default.endswith("Kernel"):
        asks.append({"kind": kind, "env": {"VLLM_DISABLED_KERNELS": default}})
    flag = FLAGS[kind][0]
    asks += [{"kind": kind, flag: value} for value in flag_values(kind)]
    config = importlib.import_module("vllm.config.kernel").KernelConfig
    if flag == "linear_backend" and PER_QUANT in inspect.signature(config).parameters:
        asks.append({"kind": kind, PER_QUANT: {"nvfp4_w4a4": "flashinfer_b12x"}})
    if kind == "fp8-block":
        asks += [{"kind": kind, "model_type": name} for name in excluded_models()]
    return asks
