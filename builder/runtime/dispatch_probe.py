"""Ask an installed vLLM which kernels it would choose on a device that is not there.

This file runs under the *target's* interpreter (inside an image, or in a sandbox that holds
vLLM's Python files, its Python dependencies and a CPU build of torch), so it may import nothing
of the builder: the standard library, and whatever the target has.

    python dispatch_probe.py < request.json > result.json

vLLM chooses kernels in ordinary Python: it asks its platform object for the compute capability,
asks a few host functions of its extension modules what they were built for, and looks whether
FlashInfer is usable. The probe answers the first question with the requested capability, lets
the real extension modules answer the second where they load, and then calls the release's own
selection entry points. Names and log lines in the result are vLLM's; everything that was put in
place of a real part is listed under ``simulated``.

Request (every key but ``ask`` may be left out)::

    {"paths": ["dirs to put first on sys.path"], "env": {"NAME": "value, or null to unset"},
     "capability": [12, 1], "cuda_version": "13.0", "device_name": "NVIDIA GB10",
     "driver_library": "a stub of libcuda.so.1, where the target has neither driver nor stub",
     "stub_modules": "auto" | "none", "pretend_nvcc": false, "pretend_triton": false,
     "ask": [{"kind": "nvfp4-linear" | "nvfp4-moe" | "fp8-linear", "env": {...},
              "linear_backend": "auto", "moe_backend": "auto", "use_a16": false}]}

``pretend_nvcc`` and ``pretend_triton`` stand for a compiler and a package that FlashInfer wants to
see before it counts as usable; ask for them where a sandbox leaves them out, never for an image.
``env`` of an ask is laid over the request's for that ask alone. Each ask runs in its own forked
child, so that vLLM's "log this once" caches and cached environment of one ask cannot hide the
lines of another.

Result::

    {"schema": 1, "python": "...", "versions": {"vllm": "...", ...}, "answers": [...],
     "simulated": ["..."], "real": ["..."], "not_found": ["..."], "fatal": null | {...}}

An answer is ``{"kind", "request", "selected", "implementation", "lines", "debug", "error"}``.
``lines`` are the messages that vLLM logged at INFO or above during the call, ``debug`` those below:
there a release says why it passed a backend over. ``real`` names the extension modules that really
loaded, ``not_found`` the modules that something tried to import and nobody has. The exit status is
0 whenever a result was written.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import glob
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import shutil
import site
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SCHEMA = 1
DISTRIBUTIONS = ("vllm", "flashinfer-python", "nvidia-cutlass-dsl", "torch")

# Host functions: they look at a number (12.1 is 121) and at how the library was compiled, never
# at a device. These are the answers of a library built with CUDA 12.8 or newer for SM12x.
HOST_FUNCTIONS: dict[str, Callable[[int], bool]] = {
    "cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: capability >= 90,
}

DRIVER_PLACES = (
    "/usr/local/cuda*/compat/libcuda.so.1",
    "/usr/local/cuda*/compat/lib*/libcuda.so.1",
    "/usr/local/cuda*/targets/*/lib/stubs/libcuda.so",
    "/usr/local/cuda*/lib64/stubs/libcuda.so",
    "/usr/lib/*-linux-gnu/libcuda.so.1",
)

FAKE_NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {version}, V{version}.0"
"""

Json = dict[str, Any]


class NotAskableError(Exception):
    """The release has no such setting or entry point, so the question has no answer there."""


class NotFound(importlib.abc.MetaPathFinder):
    """The last finder: is asked only for modules that nobody has, and remembers their names.

    vLLM and FlashInfer take a missing module for a missing feature and say nothing, so this is
    how an incomplete sandbox is told from a release that lacks a kernel.
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
class Probe:
    """What the request says about the device, and what has been simulated so far."""

    capability: tuple[int, int] = (12, 1)
    cuda_version: str = "13.0"
    device_name: str = "NVIDIA GB10"
    stub_modules: str = "auto"
    simulated: list[str] = dataclasses.field(default_factory=list)
    not_found: NotFound = dataclasses.field(default_factory=NotFound)

    @classmethod
    def of(cls, request: Json) -> Probe:
        """Take from the request what it says about the device."""
        major, minor = request.get("capability", (12, 1))
        probe = cls(capability=(int(major), int(minor)))
        for name in ("cuda_version", "device_name", "stub_modules"):
            setattr(probe, name, request.get(name, getattr(probe, name)))
        return probe

    def note(self, words: str) -> None:
        """Record a simulated part once."""
        if words not in self.simulated:
            self.simulated.append(words)


# --- the surroundings: environment, driver, extension modules, platform ----------------------


def apply_environment(env: dict[str, str | None]) -> None:
    """Set variables; null unsets, so that a caller can take an image's own setting away."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def add_paths(folders: list[str]) -> None:
    """Put folders first on ``sys.path`` and read their ``.pth`` files.

    A folder that pip filled is a site folder without being one to Python; the CuTe DSL is found
    through such a file.
    """
    folders = [os.path.abspath(folder) for folder in folders]
    before = [entry for entry in sys.path if entry not in folders]
    sys.path[:] = folders + before
    known = {os.path.normcase(folder) for folder in folders}
    for folder in folders:
        site.addsitedir(folder, known)
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = added + before


def pretend_nvcc(probe: Probe, folder: str) -> None:
    """Put an ``nvcc`` (and ``ninja``) on PATH that only says its version.

    FlashInfer counts as usable only where it could compile; the compiler is never run by
    selection, and an image without it must be judged as it is, hence only on request.
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


def load_driver_library(probe: Probe, offered: str | None) -> None:
    """Where no driver is installed, load a stub of it so that extension modules can load.

    The toolkit's stub and its compatibility library carry the driver's soname, so a library that
    asks for it later finds it loaded. None of their functions is called by selection.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    found = [path for place in DRIVER_PLACES for path in sorted(glob.glob(place))]
    for path in [offered, *found] if offered else found:
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            probe.note(f"driver: {path} in place of libcuda.so.1")
            return


class ExtensionLoader(importlib.abc.Loader):
    """Loads an extension module, or an empty module in its place where it cannot load.

    vLLM imports these for the operators that they register, not for names in them.
    """

    def __init__(self, probe: Probe, real: importlib.machinery.ModuleSpec | None) -> None:
        self.probe = probe
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Make the real module; failing that say why, and let an empty one be made."""
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
    """The first finder: is responsible for vLLM's operator libraries and nothing else."""

    def __init__(self, probe: Probe, names: frozenset[str]) -> None:
        self.probe = probe
        self.names = names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the named extension modules, there or not."""
        del target  # the interface has it
        if fullname not in self.names:
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = ExtensionLoader(self.probe, real)
        if real is None or real.origin is None:
            return importlib.machinery.ModuleSpec(fullname, loader)
        return importlib.util.spec_from_file_location(fullname, real.origin, loader=loader)


def extensions_of_platform(package: Path) -> set[str]:
    """The extension modules that the release's CUDA platform imports at once."""
    source = (package / "platforms" / "cuda.py").read_text(encoding="utf-8")
    names = {
        alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("vllm._")
    }
    return {n for n in names if not (package / n.removeprefix("vllm.")).with_suffix(".py").exists()}


def extensions_of_wheel() -> set[str]:
    """The operator libraries that the wheel's own list of files names, whether there or not.

    By vLLM's convention these start with an underscore and have ``_C`` in their name. What lies
    under ``third_party`` is imported for the names in it, and does without.
    """
    names: set[str] = set()
    for file in importlib.metadata.files("vllm") or ():
        stem = file.name.partition(".")[0]
        if file.suffix == ".so" and stem.startswith("_") and "_C" in stem:
            names.add(".".join([*file.parts[:-1], stem]))
    return {name for name in names if name.startswith("vllm.") and "third_party" not in name}


def watch_imports(probe: Probe, package: Path) -> None:
    """Install the finders: one for extension modules, one for what nobody has."""
    sys.meta_path.append(probe.not_found)
    if probe.stub_modules == "auto":
        names = frozenset(extensions_of_platform(package) | extensions_of_wheel())
        sys.meta_path.insert(0, ExtensionFinder(probe, names))


def define_host_functions(probe: Probe) -> list[object]:
    """Give torch the host functions that no loaded library registered.

    The libraries returned must be kept alive: torch forgets the functions with them.
    """
    torch = importlib.import_module("torch")
    kept: list[object] = []
    for name, answer in HOST_FUNCTIONS.items():
        if hasattr(torch.ops._C, name):
            continue
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, answer, "CompositeImplicitAutograd")
        kept.append(library)
        probe.note(f"torch.ops._C.{name}: answers as a CUDA {probe.cuda_version} build would")
    return kept


def describe_device_to_torch(probe: Probe) -> None:
    """Let torch tell the simulated device's properties where it has no device of its own.

    FlashInfer reads some of them while it is imported, and compares torch's CUDA version, which a
    CPU build does not have.
    """
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        torch.version.cuda = probe.cuda_version
        probe.note(f"torch.version.cuda: {probe.cuda_version} (a CPU build of torch)")
    if torch.cuda.is_available():
        return
    properties = types.SimpleNamespace(
        name=probe.device_name,
        major=probe.capability[0],
        minor=probe.capability[1],
        multi_processor_count=48,
        total_memory=128 * 1024**3,
        is_integrated=1,
        warp_size=32,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=99 * 1024,
        shared_memory_per_multiprocessor=100 * 1024,
        L2_cache_size=24 * 1024**2,
    )
    answers = {
        "get_device_properties": properties,
        "get_device_capability": probe.capability,
        "get_device_name": probe.device_name,
        "current_device": 0,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_args, _value=value, **_kwargs: _value)
    probe.note(f"torch.cuda: {', '.join(answers)} answer for the simulated device")


def simulated_platform(probe: Probe, base: type, capability_type: Callable[..., Any]) -> Any:
    """A subclass of the release's own CUDA platform that knows its device without asking it."""
    capability = capability_type(major=probe.capability[0], minor=probe.capability[1])
    answers: dict[str, Any] = {
        "get_device_capability": capability,
        "get_device_name": probe.device_name,
        "get_device_uuid": "GPU-simulated",
        "get_device_total_memory": 128 * 1024**3,
        "device_count": 1,
        "num_compute_units": 48,
        "is_fully_connected": False,
        "is_integrated_gpu": True,
        "log_warnings": None,
    }

    def constant(value: Any) -> Any:
        return classmethod(lambda _cls, *_args, **_kwargs: value)

    namespace = {name: constant(value) for name, value in answers.items() if hasattr(base, name)}
    return type("SimulatedCudaPlatform", (base,), namespace)()


def install_platform(probe: Probe) -> None:
    """Make the simulated device vLLM's current platform, before anything has asked for one."""
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda = importlib.import_module("vllm.platforms.cuda")
    device = simulated_platform(probe, cuda.CudaPlatformBase, platforms.interface.DeviceCapability)
    platforms._current_platform = device
    major, minor = probe.capability
    probe.note(f"device: {probe.device_name}, compute capability {major}.{minor}")


def prepare(request: Json, probe: Probe, scratch: str) -> list[object]:
    """Everything that must be in place before the first question."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", scratch)
    add_paths([str(path) for path in request.get("paths", [])])
    apply_environment(request.get("env", {}))
    if request.get("pretend_nvcc"):
        pretend_nvcc(probe, scratch)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed for this interpreter", name="vllm")
    load_driver_library(probe, request.get("driver_library"))
    watch_imports(probe, Path(next(iter(spec.submodule_search_locations))))
    describe_device_to_torch(probe)
    install_platform(probe)
    return define_host_functions(probe)


# --- vLLM's configuration ----------------------------------------------------------------------


def known_arguments(target: Callable[..., Any], values: Json) -> Json:
    """Those of ``values`` that the release's callable takes."""
    return {name: values[name] for name in inspect.signature(target).parameters if name in values}


def kernel_config(ask: Json) -> Any:
    """The release's own kernel configuration holding the ask's backends.

    Building it is part of the question: a release rejects a backend that it does not know here.
    """
    config_type = importlib.import_module("vllm.config.kernel").KernelConfig
    parameters = inspect.signature(config_type).parameters
    chosen: Json = {}
    for setting in ("linear_backend", "moe_backend"):
        value = ask.get(setting, "auto")
        if setting in parameters:
            chosen[setting] = value
        elif value != "auto":
            raise NotAskableError(f"this release has no {setting} setting")
    return config_type(**chosen)


def vllm_config(kernel: Any, probe: Probe) -> Any:
    """The release's configuration object around ``kernel``.

    Its checks look at executors and models, which a sandbox may not be able to import; then the
    object is made without them, holding only what selection reads.
    """
    config = importlib.import_module("vllm.config")
    try:
        return config.VllmConfig(kernel_config=kernel)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        bare = object.__new__(config.VllmConfig)
        bare.__dict__.update(
            kernel_config=kernel,
            model_config=None,
            parallel_config=config.ParallelConfig(),
            compilation_config=config.CompilationConfig(),
        )
        probe.note(f"vllm.config.VllmConfig: made without its own checks ({reason})")
        return bare


# --- the questions -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Question:
    """What the entry points take from an ask; the linear backend reaches them through vLLM."""

    moe_backend: str
    use_a16: bool


def select_nvfp4_linear(question: Question) -> tuple[str, str]:
    """NVFP4 linear layers: a kernel class from 0.20.0 on, an enumeration member before."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    entry = getattr(linear, "init_nvfp4_linear_kernel", None)
    known = {} if entry is None else known_arguments(entry, {"use_a16": question.use_a16})
    if question.use_a16 and not known:
        raise NotAskableError("this release does not choose a kernel for W4A16 NVFP4 layers")
    if entry is not None:
        name = type(entry(**known)).__name__
        return name, name
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.nvfp4_utils")
    backend = str(utils.select_nvfp4_linear_backend())
    return backend, backend


def moe_config(moe_backend: str) -> Any:
    """A mixture-of-experts layer in the release's own terms: SiLU-gated, 128 experts, top 8."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    values: Json = {
        "num_experts": 128,
        "experts_per_token": 8,
        "hidden_dim": 2048,
        "intermediate_size": 768,
        "intermediate_size_per_partition": 768,
        "num_local_experts": 128,
        "num_logical_experts": 128,
        "activation": activation.MoEActivation.SILU,
        "device": "cuda",
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
        "moe_backend": moe_backend,
    }
    return config.FusedMoEConfig(**known_arguments(config.FusedMoEConfig, values))


def select_nvfp4_moe(question: Question) -> tuple[str, str]:
    """NVFP4 experts: the backend's value, and the class that implements it."""
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.nvfp4")
    quant = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    backend, experts = oracle.select_nvfp4_moe_backend(
        config=moe_config(question.moe_backend),
        weight_key=quant.kNvfp4Static,
        activation_key=None if question.use_a16 else quant.kNvfp4Dynamic,
    )
    return str(backend.value), getattr(experts, "__name__", str(experts))


def select_fp8_linear(_question: Question) -> tuple[str, str]:
    """Static per-tensor FP8 linear layers, as ModelOpt checkpoints have them."""
    torch = importlib.import_module("torch")
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    quant = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    values: Json = {
        "activation_quant_key": quant.kFp8StaticTensorSym,
        "weight_quant_key": quant.kFp8StaticTensorSym,
        "weight_shape": (2048, 2048),
        "input_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
        "module_name": "ModelOptFp8LinearMethod",
    }
    entry = linear.init_fp8_linear_kernel
    name = type(entry(**known_arguments(entry, values))).__name__
    return name, name


KINDS: dict[str, Callable[[Question], tuple[str, str]]] = {
    "nvfp4-linear": select_nvfp4_linear,
    "nvfp4-moe": select_nvfp4_moe,
    "fp8-linear": select_fp8_linear,
}


# Imported before the first fork, so that the children need not do it again one by one. What
# cannot be imported here fails again in the child that needs it, and is reported there.
WARM_MODULES = {
    "nvfp4-linear": (
        "vllm.model_executor.kernels.linear",
        "vllm.model_executor.layers.quantization.utils.nvfp4_utils",
        "flashinfer.gemm",
    ),
    "nvfp4-moe": (
        "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
        "flashinfer.fused_moe",
    ),
    "fp8-linear": ("vllm.model_executor.kernels.linear",),
}


@contextlib.contextmanager
def stand_in_triton(probe: Probe) -> Iterator[None]:
    """Where Triton is not installed, let FlashInfer define the kernels that it writes in it.

    Only for the time of FlashInfer's import: vLLM and torch are to go on without Triton, as they
    do on any machine that has no GPU.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.__dict__.update(__path__=[], jit=lambda function: function, language=language)
    language.__dict__.update(constexpr=object)
    stand_ins = {"triton": triton, "triton.language": language}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
    probe.note("triton: a stand-in while FlashInfer is imported")


def warm_up(request: Json, probe: Probe) -> None:
    """Import what the asks share, and build one configuration for the imports that it makes."""
    kinds = [ask.get("kind", "") for ask in request.get("ask", [])]
    names = list(dict.fromkeys(name for kind in kinds for name in WARM_MODULES.get(kind, ())))
    with contextlib.suppress(Exception):
        importlib.import_module("vllm.config").VllmConfig()
    for name in names:
        pretended = name.startswith("flashinfer") and request.get("pretend_triton")
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            if pretended:
                stack.enter_context(stand_in_triton(probe))
            importlib.import_module(name)


# --- asking, one child each --------------------------------------------------------------------


class Recorder(logging.Handler):
    """Keeps the messages of vLLM's loggers, those below INFO apart."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self.debug: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        kept = self.lines if record.levelno >= logging.INFO else self.debug
        kept.append(record.getMessage())


@contextlib.contextmanager
def attached(recorder: Recorder) -> Iterator[None]:
    """Record everything that vLLM logs, whatever level its own settings choose."""
    logger = logging.getLogger("vllm")
    logger.addHandler(recorder)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(recorder)


def select(ask: Json, probe: Probe, recorder: Recorder) -> tuple[str, str]:
    """Configure the release as the ask says, and call its entry point, which alone is recorded."""
    kind = ask.get("kind")
    if kind not in KINDS:
        raise NotAskableError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    apply_environment(ask.get("env", {}))
    kernel = kernel_config(ask)
    question = Question(getattr(kernel, "moe_backend", "auto"), bool(ask.get("use_a16")))
    current = importlib.import_module("vllm.config").set_current_vllm_config
    with current(vllm_config(kernel, probe)), attached(recorder):
        return KINDS[kind](question)


def describe(error: BaseException) -> Json:
    """Put an error into the form that the result carries."""
    return {"type": type(error).__name__, "message": str(error)}


def empty_answer(ask: Json) -> Json:
    """Make an answer that says nothing yet."""
    named: Json = {"kind": ask.get("kind"), "request": ask, "selected": None}
    return {**named, "implementation": None, "lines": [], "debug": [], "error": None}


def answer(ask: Json, probe: Probe) -> Json:
    """Put one question to vLLM; to be called in a child of its own."""
    recorder = Recorder()
    reply = {**empty_answer(ask), "lines": recorder.lines, "debug": recorder.debug}
    try:
        reply["selected"], reply["implementation"] = select(ask, probe, recorder)
    except Exception as error:
        traceback.print_exc()
        reply["error"] = describe(error)
    return reply


def real_extensions() -> list[str]:
    """List vLLM's extension modules that really loaded."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        loader = getattr(module, "__loader__", None)
        empty = isinstance(loader, ExtensionLoader) and loader.real is None
        if name.startswith("vllm.") and file.endswith(suffixes) and not empty:
            found.append(name)
    return sorted(found)


def answer_in_child(ask: Json, probe: Probe) -> Json:
    """Fork, answer, and bring the answer (and what the child simulated) back through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            reply = answer(ask, probe)
            payload = {"reply": reply, "simulated": probe.simulated, "real": real_extensions()}
            payload["not_found"] = sorted(probe.not_found.names)
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                json.dump(payload, pipe)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 or not text:
        words = f"signal {-code}" if code < 0 else f"exit status {code}"
        error = {"type": "Crashed", "message": f"the child that asked ended with {words}"}
        reply = {**empty_answer(ask), "error": error}
        return {"reply": reply, "simulated": [], "real": [], "not_found": []}
    return cast("Json", json.loads(text))


def versions() -> dict[str, str | None]:
    """Installed versions of the distributions that decide selection."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def fatal_error(error: BaseException) -> Json:
    """Describe an error that left no question askable, with the end of its traceback."""
    tail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {**describe(error), "traceback_tail": tail.splitlines()[-15:]}


def run(request: Json) -> Json:
    """Answer a whole request."""
    probe = Probe.of(request)
    result: Json = {"schema": SCHEMA, "python": platform.python_version(), "versions": {}}
    result.update(answers=[], simulated=probe.simulated, real=[], fatal=None)
    with tempfile.TemporaryDirectory(prefix="dispatch-probe-") as scratch:
        try:
            kept = prepare(request, probe, scratch)
            warm_up(request, probe)
            for ask in request.get("ask", []):
                payload = answer_in_child(ask, probe)
                result["answers"].append(payload["reply"])
                for words in payload["simulated"]:
                    probe.note(words)
                result["real"] = sorted({*result["real"], *payload["real"]})
                probe.not_found.names.update(payload["not_found"])
            del kept
        except Exception as error:
            result["fatal"] = fatal_error(error)
    result.update(versions=versions(), not_found=sorted(probe.not_found.names))
    return result


def claim_stdout() -> TextIO:
    """Keep stdout for the result alone: whatever else prints, even from C, goes to stderr."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def main() -> int:
    """Read a request from stdin, write the result to stdout."""
    out = claim_stdout()
    result = run(json.load(sys.stdin))
    json.dump(result, out, indent=2, sort_keys=True)
    out.write("\n")
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
