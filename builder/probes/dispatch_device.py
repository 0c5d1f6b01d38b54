"""Sets up a query of vLLM: environment, compiler, torch, the device, and vLLM's extension modules.

Part of the dispatch probe (see ``dispatch_probe.py``): it runs under the target's interpreter, and
imports nothing but the standard library, its siblings, and what the target has.

vLLM imports its extension modules for the operators that they register; kernel selection asks a few
of those what the library was built for.  Real ones are used if they load without a CUDA driver,
else empty ones.  Every part that is put in place of a real one is noted in `Probe.simulated`.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import ctypes
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from builder.probes import stub_driver
from builder.probes.simulated_device import (
    MULTIPROCESSORS,
    SimulatedDevice,
    add_paths,
    apply_environment,
)

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping, Sequence

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


# -------------------------------------------------------------------------------- extension modules

#: Libraries of vLLM's stable-ABI modules that a CPU build of torch lacks.
TORCH_CUDA = ("libtorch_cuda.so", "libc10_cuda.so")
#: The pattern of CUDA's functions, and the library that is generated for undefined ones.
CUDA_FUNCTION = re.compile(r"(cu|nccl|nvrtc|nvshmem)\w+")
REST = "libspark_build_cuda.so"

#: The DeepGEMM package in vLLM's wheels from 0.20.0 on.
BUNDLED = "vllm.third_party.deep_gemm"

# Host functions: they use a number (12.1 is 121) and how the library was compiled, never
# at a device. These are the answers of a library built with CUDA 12.8 or newer for SM12x; the
# modules of the released wheels, loaded beside a stub of the driver, give the same.
HOST_FUNCTIONS: dict[str, Callable[[int], bool]] = {
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: capability >= 90,
}


# --- libraries -----------------------------------------------------------------------------------


def stand_in_for_cuda(probe: Probe, module: str, scratch: str) -> None:
    """Generate the libraries of a module that a sandbox's torch lacks.

    A CPU build lacks torch's CUDA libraries.  For a CUDA build, stand-ins for CUDA's libraries
    define the functions that torch needs, but a module may need more.  Only for modules that are
    offered to a sandbox; an image has the torch that it needs.
    """
    needed = stub_driver.needed_libraries(module)
    lacking = [name for name in needed if name in TORCH_CUDA and not stub_driver.loads(name)]
    known: list[Any] = [ctypes.CDLL(None)]
    for name in (n for n in needed if n not in lacking):
        with contextlib.suppress(OSError):
            known.append(ctypes.CDLL(name))
    undefined = stub_driver.undefined_symbols(module)
    missing = sorted(n for n in undefined if not any(hasattr(library, n) for library in known))
    if not lacking:
        missing = [name for name in missing if CUDA_FUNCTION.fullmatch(name)]
        lacking = [REST] if missing else []
    for name in lacking:
        path = stub_driver.write_library(scratch, name, missing)
        if stub_driver.loads(path):
            words = ", ".join(missing) or "nothing"
            probe.note(f"{name}: a generated stand-in that defines {words}")
        missing = []


# --- modules -------------------------------------------------------------------------------------


class ExtensionLoader(importlib.abc.Loader):
    """Loads an extension module, or an empty one if it cannot be loaded."""

    def __init__(self, probe: Probe, real: importlib.machinery.ModuleSpec | None) -> None:
        self.probe = probe
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Create the real module; if that fails, record the reason and create an empty one."""
        reason = "not installed"
        if self.real is not None and self.real.loader is not None:
            try:
                return self.real.loader.create_module(self.real)
            except (ImportError, OSError) as error:
                reason = str(error).partition("\n")[0]
        self.real = None
        self.probe.note(f"{spec.name}: an empty module ({reason})")
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Finish the real module; an empty one is finished."""
        if self.real is not None and self.real.loader is not None:
            self.real.loader.exec_module(module)


class ExtensionFinder(importlib.abc.MetaPathFinder):
    """The first finder, only for vLLM's operator libraries."""

    def __init__(
        self, probe: Probe, names: frozenset[str], offered: Mapping[str, str], scratch: str
    ) -> None:
        self.probe = probe
        self.names = names
        self.offered = offered
        self.scratch = scratch

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the named extension modules, even if its file is missing."""
        del target  # the interface has it
        if fullname not in self.names:
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if fullname in self.offered:
            file = self.offered[fullname]
            stand_in_for_cuda(self.probe, file, self.scratch)
            own = importlib.machinery.ExtensionFileLoader(fullname, file)
            real = importlib.util.spec_from_file_location(fullname, file, loader=own)
        loader = ExtensionLoader(self.probe, real)
        if real is None or real.origin is None:
            return importlib.machinery.ModuleSpec(fullname, loader)
        return importlib.util.spec_from_file_location(fullname, real.origin, loader=loader)


class BundledLoader(importlib.abc.Loader):
    """Loads a package with compiled code; without the code, one in which every name exists.

    vLLM tests whether it can be imported, and looks up names in it; selection calls none.
    """

    def __init__(
        self, probe: Probe, real: importlib.machinery.ModuleSpec, files: Sequence[str]
    ) -> None:
        self.probe = probe
        self.real = real
        self.files = files

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the real package; if its compiled code does not load here, make every name exist.

        Any other error is the release's own, and decides what it selects.
        """
        reason = "its compiled code is not installed for this machine"
        if any(os.path.isfile(path) for path in self.files) and self.real.loader is not None:
            try:
                self.real.loader.exec_module(module)
            except (ImportError, OSError) as error:
                reason = str(error).partition("\n")[0]
            else:
                return
        self.probe.note(f"{module.__name__}: a stand-in that has every name ({reason})")
        module.__dict__["__getattr__"] = _any_name


#: Functions of a stand-in for a bundled package that were called, except for setters.
USED: list[str] = []


def _any_name(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("set_"):  # it answers nothing
        return lambda *_args, **_kwargs: None
    return lambda *_args, **_kwargs: USED.append(f"{BUNDLED}.{name}")


class BundledFinder(importlib.abc.MetaPathFinder):
    """The finder for `BUNDLED`, if the wheel has compiled code for it."""

    def __init__(self, probe: Probe, files: Sequence[str]) -> None:
        self.probe = probe
        self.files = files

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the package, if the release has it."""
        del target  # the interface has it
        if fullname != BUNDLED:
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if real is None or real.origin is None:
            return None
        loader = BundledLoader(self.probe, real, self.files)
        return importlib.util.spec_from_file_location(
            fullname,
            real.origin,
            loader=loader,
            submodule_search_locations=real.submodule_search_locations,
        )


def extensions_of_platform(package: Path) -> set[str]:
    """The extension modules that the release's CUDA platform imports immediately."""
    source = (package / "platforms" / "cuda.py").read_text(encoding="utf-8")
    names = {
        alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("vllm._")
    }
    return {n for n in names if not (package / n.removeprefix("vllm.")).with_suffix(".py").exists()}


def extensions_of_wheel() -> list[tuple[str, str]]:
    """Module names and files of the operator libraries in the wheel's list of files.

    They may be missing: from Python 3.12 on ``importlib.metadata.files`` leaves out
    missing files.  By vLLM's convention these start with an underscore and have ``_C`` in their
    name.
    """
    distribution = importlib.metadata.distribution("vllm")
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    extensions = []
    for file in (PurePosixPath(row[0]) for row in rows if row):
        stem = file.name.partition(".")[0]
        if file.suffix == ".so" and stem.startswith("_") and "_C" in stem:
            extensions.append(
                (".".join([*file.parts[:-1], stem]), str(distribution.locate_file(file)))
            )
    return extensions


def prepare_modules(
    probe: Probe, package: Path, scratch: str, offered: Mapping[str, str], libraries: Sequence[str]
) -> None:
    """Load the libraries of extension modules, and install the finders for their import.

    ``offered`` are modules, by name, for a target without modules for this machine; ``libraries``
    are loaded before them.
    """
    of_wheel = extensions_of_wheel()
    files = [*(path for _, path in of_wheel), *offered.values()]
    present = [path for path in files if os.path.isfile(path)]
    present += stub_driver.dsl_libraries()
    if present:
        stub_driver.load_driver(probe.note, scratch, present)
    for path in libraries:
        stub_driver.loads(path)
    if probe.stub_modules != "auto":
        return
    operators = {name for name, _ in of_wheel if ".third_party." not in name}
    names = frozenset(extensions_of_platform(package) | operators | offered.keys())
    sys.meta_path.insert(0, ExtensionFinder(probe, names, offered, scratch))
    bundled = [path for name, path in of_wheel if name.startswith(f"{BUNDLED}.")]
    if bundled:
        sys.meta_path.insert(0, BundledFinder(probe, bundled))


def define_host_functions(probe: Probe) -> list[object]:
    """Give torch the host functions that no loaded library registered.

    The libraries returned must be kept alive: torch forgets the functions with them.
    """
    torch = importlib.import_module("torch")
    libraries: list[object] = []
    for name, answer in HOST_FUNCTIONS.items():
        if hasattr(torch.ops._C, name):
            continue
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, answer, "CompositeImplicitAutograd")
        libraries.append(library)
        probe.note(f"torch.ops._C.{name}: answers as a CUDA {probe.cuda_version} build would")
    return libraries


def real_extensions() -> list[str]:
    """List vLLM's extension modules that really loaded."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    loaded: list[str] = []
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        loader = getattr(module, "__loader__", None)
        empty = isinstance(loader, ExtensionLoader) and loader.real is None
        if name.startswith("vllm.") and file.endswith(suffixes) and not empty:
            loaded.append(name)
    return sorted(loaded)


# ---------------------------------------------------------------------------------------- all of it


def prepare(request: Json, probe: Probe, scratch: str) -> list[object]:
    """Set up everything for the first query; the caller must keep the returned objects alive.

    Raises:
        ModuleNotFoundError: the target has no vLLM.
    """
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", scratch)
    add_paths([str(path) for path in request.get("paths", [])])
    apply_environment(request.get("env", {}))
    if request.get("pretend_nvcc"):
        pretend_nvcc(probe, scratch)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed for this interpreter", name="vllm")
    package = Path(next(iter(spec.submodule_search_locations)))
    sys.meta_path.append(probe.not_found)
    offered = {str(name): str(path) for name, path in request.get("extensions", {}).items()}
    libraries = [str(path) for path in request.get("libraries", [])]
    prepare_modules(probe, package, scratch, offered, libraries)
    describe_device_to_torch(probe)
    install_platform(probe)
    return define_host_functions(probe)
