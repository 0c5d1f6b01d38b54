"""Sets up a query of vLLM: environment, compiler, torch, and the device.

Part of the dispatch probe (see ``dispatch_probe.py``): it runs under the target's interpreter, and
imports nothing but the standard library, its siblings, and what the target has.  Every part that
is put in place of a real one is noted in `Probe.simulated`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.probes.simulated_device import MULTIPROCESSORS, SimulatedDevice

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence


FAKE_NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {version}, V{version}.0"
"""

Json = dict[str, Any]


class NotFound(importlib.abc.MetaPathFinder):
    """The last finder: records the names of modules that do not exist.

    vLLM and FlashInfer silently treat a missing module as a missing feature, so this is
    how an incomplete sandbox is distinguished from a release that lacks a kernel.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> None:
        """Find nothing."""
        del path, target  # the interface has them
        self.names.add(fullname)


@dataclasses.dataclass
class Probe(SimulatedDevice):
    """The simulated device, and the modules that were not found."""

    stub_modules: str = "auto"
    not_found: NotFound = dataclasses.field(default_factory=NotFound)


def pretend_nvcc(probe: Probe, folder: str) -> None:
    """Put an ``nvcc`` (and ``ninja``) on PATH that only prints its version.

    FlashInfer counts as usable only if it could compile; selection never runs the
    compiler.  An image without one must be judged as it is, so this is only on request.
    """
    home = Path(folder)
    scripts = {"nvcc": FAKE_NVCC.format(version=probe.cuda_version)}
    if shutil.which("ninja") is None:
        scripts["ninja"] = "#!/bin/sh\necho 1.13.0\n"
    (home / "bin").mkdir()
    for name, text in scripts.items():
        tool = home / "bin" / name
        tool.write_text(text, encoding="utf-8")
        tool.chmod(0o755)
        probe.note(f"{name}: a stand-in on PATH that only tells its version")
    os.environ["PATH"] = os.pathsep.join([str(home / "bin"), os.environ.get("PATH", "")])
    os.environ["CUDA_HOME"] = os.environ["CUDA_PATH"] = folder


def describe_device_to_torch(probe: Probe) -> None:
    """Make torch report the simulated device's properties if it has no device.

    FlashInfer reads some of them while it is imported, and compares torch's CUDA version, which a
    CPU build does not have.
    """
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        torch.version.cuda = probe.cuda_version
        probe.note(f"torch.version.cuda: {probe.cuda_version} (a CPU build of torch)")
    if torch.cuda.is_available():
        return
    answers = {
        "get_device_properties": probe.properties(MULTIPROCESSORS),
        "get_device_capability": probe.capability,
        "get_device_name": probe.device_name,
        "current_device": 0,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_args, _value=value, **_kwargs: _value)
    probe.note(f"torch.cuda: {', '.join(answers)} answer for the simulated device")


def simulated_platform(probe: Probe, base: type, capability_type: Callable[..., Any]) -> Any:
    """A subclass of the release's own CUDA platform with a fixed device."""
    capability = capability_type(major=probe.capability[0], minor=probe.capability[1])
    answers: dict[str, Any] = {
        "get_device_capability": capability,
        "get_device_name": probe.device_name,
        "get_device_uuid": "GPU-simulated",
        "get_device_total_memory": 128 * 1024**3,
        "device_count": 1,
        "num_compute_units": MULTIPROCESSORS,
        "is_fully_connected": False,
        "is_integrated_gpu": True,
        "log_warnings": None,
    }

    def constant(value: Any) -> Any:
        return classmethod(lambda _cls, *_args, **_kwargs: value)

    namespace = {name: constant(value) for name, value in answers.items() if hasattr(base, name)}
    return type("SimulatedCudaPlatform", (base,), namespace)()


def install_platform(probe: Probe) -> None:
    """Make the simulated device vLLM's current platform, before anything uses one."""
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda = importlib.import_module("vllm.platforms.cuda")
    device = simulated_platform(probe, cuda.CudaPlatformBase, platforms.interface.DeviceCapability)
    platforms._current_platform = device
    major, minor = probe.capability
    probe.note(f"device: {probe.device_name}, compute capability {major}.{minor}")
