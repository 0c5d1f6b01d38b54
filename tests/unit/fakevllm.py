"""A vLLM and a torch of a few lines, with the entry points that the dispatch probe calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TORCH = """
import types
class version:
    cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
bfloat16 = "bfloat16"
ops = types.SimpleNamespace(_C=types.SimpleNamespace())
class library:
    class Library:
        def __init__(self, namespace, kind):
            self.operators = getattr(ops, namespace)
        def define(self, signature):
            pass
        def impl(self, name, function, key):
            setattr(self.operators, name, function)
"""
PLATFORMS = """
from vllm.platforms import interface
_current_platform = None
"""
INTERFACE = """
class DeviceCapability:
    def __init__(self, major, minor):
        self.major, self.minor = major, minor
"""
CUDA = """
import vllm._C
class CudaPlatformBase:
    @classmethod
    def get_device_capability(cls):
        raise RuntimeError("no device")
"""
CONFIG = """
import contextlib
from vllm.config.kernel import KernelConfig
current = None
class VllmConfig:
    def __init__(self, kernel_config=None):
        self.kernel_config, self.model_config = kernel_config, None
@contextlib.contextmanager
def set_current_vllm_config(config):
    global current
    current = config
    yield
"""
KERNEL = """
import dataclasses
from typing import Literal
LinearBackend = Literal["auto", "cutlass", "marlin", "humming"]
MoEBackend = Literal["auto", "marlin"]
@dataclasses.dataclass
class KernelConfig:
    linear_backend: str = "auto"
    def __post_init__(self):
        if self.linear_backend == "rejected":
            raise ValueError("rejected is no backend")
"""
ENVS = """
import os
def choose():
    value = os.environ.get("VLLM_NVFP4_GEMM_BACKEND")
    if value not in (None, "cutlass", "marlin"):
        raise ValueError(f"Invalid value {value!r}. Valid options: ['cutlass', 'marlin'].")
    return value
environment_variables = {"VLLM_NVFP4_GEMM_BACKEND": choose}
"""
LINEAR = """
import logging, os, sys
import torch
import vllm.config, vllm.envs, vllm.platforms
logger = logging.getLogger("vllm.linear")
class CutlassKernel: pass
class MarlinKernel: pass
KERNELS = {"cutlass": CutlassKernel, "marlin": MarlinKernel}
def init_nvfp4_linear_kernel():
    print("noise on stdout")
    named = vllm.envs.choose() or vllm.config.current.kernel_config.linear_backend
    if os.environ.get("CRASH"):
        os.kill(os.getpid(), int(os.environ["CRASH"]))
    if os.environ.get("EXIT"):
        os._exit(int(os.environ["EXIT"]))
    while os.environ.get("LOOP"):
        pass
    capability = vllm.platforms._current_platform.get_device_capability()
    good = torch.ops._C.cutlass_scaled_mm_supports_fp4(capability.major * 10 + capability.minor)
    if named == "auto":
        named = "cutlass" if good else "marlin"
    logger.debug("passed over: nothing")
    logger.info("Using %s for NVFP4 GEMM", KERNELS[named].__name__)
    return KERNELS[named]()
"""
FILES = {
    "torch/__init__.py": TORCH,
    "vllm/__init__.py": "",
    "vllm/platforms/__init__.py": PLATFORMS,
    "vllm/platforms/interface.py": INTERFACE,
    "vllm/platforms/cuda.py": CUDA,
    "vllm/config/__init__.py": CONFIG,
    "vllm/config/kernel.py": KERNEL,
    "vllm/envs.py": ENVS,
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/kernels/__init__.py": "",
    "vllm/model_executor/kernels/linear/__init__.py": LINEAR,
    "vllm/third_party/__init__.py": "",
}


def write_fake_vllm(root: Path, changes: Mapping[str, bytes | None] | None = None) -> Path:
    """Write the tree with some files changed or added; None is one that only RECORD names."""
    files: dict[str, bytes | None] = {path: text.encode() for path, text in FILES.items()}
    files |= changes or {}
    info = "vllm-0.20.1.dist-info"
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.1\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files).encode()
    return write_tree(root, {path: data for path, data in files.items() if data is not None})
