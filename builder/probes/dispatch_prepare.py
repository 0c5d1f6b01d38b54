"""Prepares the dispatch probe's process: the simulated device, and the modules it needs.

Part of the dispatch probe (see ``dispatch_probe.py``): it runs under the target's interpreter, and
imports nothing but the standard library, its siblings, and what the target has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.probes import dispatch_device, dispatch_modules
from builder.probes.simulated_device import add_paths, apply_environment

if TYPE_CHECKING:
    from builder.probes.dispatch_device import Probe

Json = dict[str, Any]


def prepare(request: Json, probe: Probe, scratch: str) -> list[object]:
    """Set up everything for the first query; the caller must keep the returned objects alive.

    Raises:
        ModuleNotFoundError: the target has no vLLM.
    """
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", scratch)
    add_paths([str(path) for path in request.get("paths", [])])
    apply_environment(request.get("env", {}))
    if request.get("pretend_nvcc"):
        dispatch_device.pretend_nvcc(probe, scratch)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed for this interpreter", name="vllm")
    package = Path(next(iter(spec.submodule_search_locations)))
    sys.meta_path.append(probe.not_found)
    offered = {str(name): str(path) for name, path in request.get("extensions", {}).items()}
    libraries = [str(path) for path in request.get("libraries", [])]
    dispatch_modules.prepare_modules(probe, package, scratch, offered, libraries)
    dispatch_device.describe_device_to_torch(probe)
    dispatch_device.install_platform(probe)
    return dispatch_modules.define_host_functions(probe)
