"""Build a whole model with an installed vLLM on a simulated device: no GPU, no weights.

It runs beside ``dispatch_probe.py``, under the target's interpreter, with the standard library, its
siblings and the target's packages.  The release's own code parses the serve flags, checks the
configuration and builds the model's class on torch's meta device, from ``config.json`` alone.  So
the kernel of each layer, the KV cache and every refusal are the release's answers.

    python preflight_probe.pyz < request.json > result.json

The request is that of the dispatch probe, with ``questions`` in place of ``ask``::

    {"questions": [{"model": "folder with config.json", "flags": ["--moe-backend", "marlin"],
                    "env": {"NAME": "value, or null to unset"}}],
     "triton": "3.6.0", "tilelang": "0.1.9, or null"}

``triton`` is the version that a stand-in for Triton tells, if Triton is not installed; so is
``tilelang``, for a release that requires TileLang, a compiler of 50 MB.  The result
has one answer for each question, in order; each is asked in its own forked child::

    {"schema": 2, "versions": {...}, "answers": [...], "fatal": null | {...}}

An answer is described by `ANSWER`.  A request is one line, and so is a result.  Each further
line of stdin has ``questions`` alone and gets a result too, without importing anything again.  The
exit status is 0 whenever a result was written.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from builder.probes import (
    dispatch_device,
    dispatch_probe,
    model_counts,
    preflight_memory,
    preflight_server,
    preflight_weights,
    stub_driver,
)
from builder.probes.dispatch_device import Probe
from builder.probes.simulated_device import apply_environment, claim_stdout, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


SCHEMA = 2
Json = dict[str, Any]

#: What one answer has.  ``stage`` is where a refusal came from: ``arguments``, ``configuration``
#: or ``model``; ``error`` has the release's own text and ``where`` the line that raised it.
ANSWER: Json = {
    "error": None,
    "stage": "",
    "lines": [],
    "warnings": [],
    "settings": {},
    "layers": [],
    "caches": [],
    "parameter_bytes": 0,
    "memory": None,
    "memory_unknown": "",
    "loading": [],
    "refused_attention": [],
    "simulated": [],
}
#: Ways of communication that look for other ranks when they are made; no kernel depends on them.
ONE_RANK = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
#: Operators of communication: a release calls one of them to see whether the library is there.
BETWEEN_RANKS = "torch.ops._C_custom_ar."
#: Operators that choose nothing: the bytes of scratch memory that a kernel wants, which are not
#: counted here, and the GPU's address of a tensor of the host.
HARMLESS: dict[str, Callable[..., Any]] = {
    "get_workspace_size": lambda *_: 0,
    "get_cuda_view_from_cpu_tensor": lambda tensor: tensor,
}
#: The version that a stand-in for Numba tells, a compiler for drafts by n-grams, if it is missing.
NUMBA = "0.61.2"
#: In the error of whatever looks up a name.
NO_NETWORK = "the simulated device has no network"
#: Bytes of address space that building one model may add; tensors on the meta device have none.
MOST_MEMORY = 8 << 30
#: Seconds of a processor for one question; the largest known model takes 2.
MOST_SECONDS = 60
#: Where releases have the arguments of ``vllm serve``; the newest first.
SERVER_ARGUMENTS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
#: Packages whose lines may have raised a refusal.
OWN = ("vllm", "flashinfer", "transformers", "compressed_tensors")


# --- stand-ins -----------------------------------------------------------------------------------

#: What stand-ins were called for; the release may have caught their errors.
CALLED: list[str] = []
#: What stand-ins answered while a module was imported: it may decide what that module defines.
ANSWERED: list[str] = []


class StandInError(NotImplementedError):
    """A part that is not the release's was called, so what follows is no answer of the release."""


def called(words: str) -> StandInError:
    """The error of a stand-in that is called, which is kept."""
    CALLED.append(words)
    return StandInError(words)


def answered(words: str) -> None:
    """Keep what a stand-in answered while a module was imported.

    Raises:
        StandInError: no module is being imported, so the answer may be the release's choice.
    """
    if not importing():
        raise called(words)
    words = f"{words} while a module was imported"
    if words not in ANSWERED:
        ANSWERED.append(words)


def importing() -> bool:
    """Whether a module is being imported: kernels are defined then, and none is chosen or run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not answer.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None


class TooMuchError(Exception):
    """A question is not answered: what it asks for has no end, or takes too long."""


class TritonStandIn(types.ModuleType):
    """A module of Triton: every name exists, decorators give the function, the device is active."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(name)
        self.__version__ = version
        self.__path__: list[str] = []
        self.__file__ = f"{name}/__init__.py"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        value = TRITON_NAMES.get(path) or (Kernel if name == "JITFunction" else None)
        if value is None:  # by Python's custom a class where it is written in capitals
            value = Names(name, (Nothing,), {}) if name[0].isupper() else Nothing(path)
        setattr(self, name, value)
        return value


class Names(type):
    """The kind of class of a stand-in: it has every attribute, as an enumeration would."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{cls.__name__}.{name}")


class Nothing(metaclass=Names):
    """A name that exists: as a decorator it gives the function, and it has every attribute."""

    def __init__(self, *name: Any, **_options: Any) -> None:
        self.__name__ = self.__qualname__ = str(name[0]) if name else type(self).__name__

    def __call__(self, *args: Any, **_options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not isinstance(args[0], Nothing):
            return args[0]
        answered(f"{self.__name__} of the stand-in for Triton was called")
        return self

    def __bool__(self) -> bool:
        answered(f"{self.__name__} of the stand-in for Triton was tested")
        return True

    def __eq__(self, other: object) -> bool:
        if self is not other:
            answered(f"{self.__name__} of the stand-in for Triton was compared")
        return self is other

    def __iter__(self) -> Any:
        raise called(f"{self.__name__} of the stand-in for Triton was iterated")

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.__name__}.{name}")

    def __getitem__(self, _key: object) -> Nothing:
        return self

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _other: object) -> Any:
        return Any

    __ror__ = __or__


class Kernel:
    """A jitted function that nothing calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__module__ = getattr(function, "__module__", "")
        self.__doc__ = getattr(function, "__doc__", None)

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        raise called(f"the Triton kernel {self.__name__} was launched")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.fn(*args, **options)


def _jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _decorator(*_args: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda function: function


TRITON_NAMES: dict[str, Any] = {
    "triton.jit": _jit,
    "triton.autotune": _decorator,
    "triton.heuristics": _decorator,
    "triton.cdiv": lambda a, b: -(-a // b),
    "triton.next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
    "triton.backends.backends": {
        "nvidia": types.SimpleNamespace(
            driver=types.SimpleNamespace(is_active=lambda: True), compiler=None
        )
    },
    "triton.language.constexpr": lambda value=None: value,
}


class TritonFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: makes the modules of Triton, or of a compiler like it, if it is missing."""

    def __init__(self, package: str, version: str) -> None:
        self.package, self.version = package, version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find any module of the package."""
        del path, target  # the interface has them
        if fullname.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module in which every name exists."""
        return TritonStandIn(spec.name, self.version)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to do."""


def stand_in_for_triton(probe: Probe, package: str, version: str) -> None:
    """Let Triton be found: it works on the device that is simulated, and nothing of it is run."""
    if importlib.util.find_spec(package) is not None:
        return
    sys.meta_path.append(TritonFinder(package, version))
    words = "a stand-in in which every name exists; no kernel of it is run"
    probe.note(f"{package} {version}: {words}")


def stand_in_for_broken(probe: Probe, package: str) -> None:
    """Let a package be found that is installed and cannot be imported here; nothing calls it."""
    try:
        importlib.import_module(package)
    except Exception as error:
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
        sys.meta_path.insert(0, TritonFinder(package, "0"))
        why = str(error).partition("\n")[0]
        probe.note(f"{package}: a stand-in in which every name exists ({why})")


def tell_memory(total: int) -> None:
    """Let the simulated device have so many bytes of memory."""
    torch: Any = importlib.import_module("torch")
    torch.cuda.get_device_properties(0).total_memory = total


def answer_as_integrated(probe: Probe) -> None:
    """Answer for the device's memory as on a GB10, where NVML does not know it.

    The release's own function decides what follows from that: some have a second source, and with
    others vLLM falls back to the settings of a small device.
    """
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    torch: Any = importlib.import_module("torch")
    nvml = cuda.pynvml

    def not_supported(*_args: object) -> None:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    def properties(device: int, names: Sequence[str], **_options: object) -> tuple[Any, ...]:
        values = torch.cuda.get_device_properties(device)
        return tuple(getattr(values, name) for name in names)

    nvml.nvmlInit = nvml.nvmlShutdown = lambda *_args: None
    nvml.nvmlDeviceGetHandleByIndex = lambda number: number
    nvml.nvmlDeviceGetMemoryInfo = not_supported
    cuda.cuda_get_device_properties = properties
    own = cuda.NvmlCudaPlatform.get_device_total_memory
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    type(platform).get_device_total_memory = classmethod(lambda _cls, number=0: own(number))
    probe.note("NVML: it does not know the device's memory, as on a GB10")


class Stream:
    """A CUDA stream or event: nothing runs on it."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass


class Operator:
    """An operator of a library that is not there: building a model only takes hold of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Operator:
        if name.startswith("__"):
            raise AttributeError(name)
        return Operator(f"{self._name}.{name}")

    def __call__(self, *args: Any, **_options: Any) -> Any:
        harmless = HARMLESS.get(self._name.removesuffix(".default").rpartition(".")[2])
        if harmless is not None:
            return harmless(*args)
        words = f"the operator {self._name} was called; its library is not here"
        raise StandInError(words) if BETWEEN_RANKS in self._name else called(words)


def stand_in_for_operators(probe: Probe) -> None:
    """Give every operator a name, after vLLM registered what exists."""
    ops: Any = importlib.import_module("torch._ops")
    real = ops._OpNamespace.__getattr__

    def named(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            probe.note(f"torch.ops.{self.name}.{name}: only a name")
            return Operator(f"torch.ops.{self.name}.{name}")

    ops._OpNamespace.__getattr__ = named


def subscriptable_array(probe: Probe) -> None:
    """Let ``array.array[int]`` be written, as from Python 3.12 on, which images of vLLM have."""
    if hasattr(array.array, "__class_getitem__"):
        return

    class Array(array.array):  # type: ignore[type-arg]
        __class_getitem__: Any = classmethod(types.GenericAlias)

    Array.__name__ = Array.__qualname__ = "array"
    vars(array)["array"] = Array
    probe.note("array.array: may be subscripted, as from Python 3.12 on")


def define_operators_of_torchvision(probe: Probe) -> list[object]:
    """The operators that torchvision registers fakes for without looking whether they exist.

    Its own library needs CUDA's.  What is returned must be kept alive.
    """
    if importlib.util.find_spec("torchvision") is None:
        return []
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    probe.note("torchvision: its operators are not loaded")
    return [library]


class NoDevice:
    """A function of a CUDA library that a stand-in lacks: it answers that there is no device.

    If the release calls it while a model is built, that is no answer.
    """

    restype: Any = None
    argtypes: Any = None

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any) -> int:
        with contextlib.suppress(StandInError):  # the release reads a number
            answered(f"{self._name} of a CUDA library was called; its stand-in has no device")
        return stub_driver.NO_DEVICE


def stand_in_for_cuda_functions(probe: Probe) -> None:
    """Let CUDA's libraries have each of their functions: a release takes hold of some by name."""
    real = ctypes.CDLL.__getattr__

    def named(library: ctypes.CDLL, name: str) -> Any:
        try:
            return real(library, name)
        except AttributeError:
            if not dispatch_device.CUDA_FUNCTION.fullmatch(name):
                raise
            probe.note(f"{name} of {os.path.basename(str(library._name))}: answers: no device")
            return NoDevice(name)

    ctypes.CDLL.__getattr__ = named  # type: ignore[method-assign]


def refuse_code_of_checkpoints(probe: Probe) -> None:
    """Transformers runs no code of a checkpoint, also not from its cache of downloaded ones.

    A configuration may name code of any id (``auto_map``); ``--trust-remote-code`` allows it.
    """
    modules: Any = importlib.import_module("transformers.dynamic_module_utils")

    def refused(name: str, *_args: object, **_options: object) -> None:
        raise called(f"trust_remote_code: {name} is code of the checkpoint")

    vars(modules)["get_class_in_module"]  # a release without it is not asked
    modules.get_class_in_module = refused
    probe.note("code of checkpoints is not run")


def on_meta(pinned: str = "meta") -> Any:
    """A mode in which tensors that ask for a GPU are made on the meta device.

    Pinned memory is the host's, which a GB10 shares with its GPU; ``pinned`` is its device here.
    """
    torch: Any = importlib.import_module("torch")
    mode: Any = importlib.import_module("torch.overrides").TorchFunctionMode

    def moved(value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return "meta" if named or number else value

    class ToMeta(mode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            options = dict(kwargs or {})
            if options.pop("pin_memory", False):
                options["device"] = pinned
            if "device" in options:
                options["device"] = moved(options["device"])
            if getattr(func, "__name__", "") in {"to", "cuda"}:
                args = tuple(one if isinstance(one, int) else moved(one) for one in args)
            return func(*args, **options)

    return ToMeta()


def refuse_network(probe: Probe) -> None:
    """No name is looked up: a release asks servers for kernels and configurations."""
    socket: Any = importlib.import_module("socket")

    def refused(host: object, *_args: object, **_options: object) -> None:
        raise OSError(f"{NO_NETWORK}: {host}")

    socket.getaddrinfo = refused
    probe.note("no network: no name is looked up")


# --- one question --------------------------------------------------------------------------------


def failure(error: BaseException, stage: str) -> Json:
    """The release's own text, and the last of its lines that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if any(f"/{name}/" in f.filename for name in OWN)]
    last = own[-1] if own else (frames[-1] if frames else None)
    path = re.sub(rf"^.*?/(?=({'|'.join(OWN)})/)", "", last.filename) if last else ""
    where = f"{path}:{last.lineno} in {last.name}" if last else ""
    tail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    named = {"type": type(error).__name__, "message": str(error), "where": where}
    parsers = stage == "arguments"  # what the release's parser says is raised here
    named["innermost"] = frames[-1].filename if frames and not parsers else ""
    return {**named, "stage": stage, "tail": tail.splitlines()[-25:]}


def parsed(model: str, flags: Sequence[str], probe: Probe) -> Any:
    """The release's own arguments for these flags.

    Raises:
        ValueError: its parser refuses them, or its server does.
    """
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    utilities: Any = importlib.import_module("vllm.utils")
    with contextlib.suppress(ImportError):
        utilities = importlib.import_module("vllm.utils.argparse_utils")
    parser = utilities.FlexibleArgumentParser()
    lacking, module = "", None
    for name in SERVER_ARGUMENTS:  # the flags of a server, too
        try:
            module = importlib.import_module(name)
            parser = module.make_arg_parser(parser)
        except (ImportError, AttributeError) as error:
            lacking = lacking or str(error)
        else:
            lacking = ""
            break
    if not any(action.dest == "load_format" for action in parser._actions):
        parser = arguments.add_cli_args(parser)

    def refuse(message: str) -> None:
        if lacking and "unrecognized arguments" in message:
            raise called(f"{message}: those of the server are not known here ({lacking})")
        raise ValueError(message)

    parser.error = refuse
    # the model last: another one among the flags would win
    given = parser.parse_args([*flags, "--model", model])
    if not lacking and (unknown := preflight_server.check(given, module)):
        probe.note(f"checks of the server's flags, not asked: {unknown}")
    asked = arguments.from_cli_args(given)
    asked.skip_tokenizer_init = True
    return asked


def use_own_configuration(model: str, probe: Probe) -> None:
    """Let the release's own class read a configuration that Transformers does not know.

    Checkpoints of Nemotron-H bring the class as code, which is not run; the release has its own.
    """
    with open(os.path.join(model, "config.json"), encoding="utf-8") as stream:
        kind = str(json.load(stream).get("model_type"))
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    if kind in auto.CONFIG_MAPPING or not kind.isidentifier():
        return
    try:
        module = importlib.import_module(f"vllm.transformers_utils.configs.{kind}")
    except ImportError:
        return
    for own in vars(module).values():
        if isinstance(own, type) and own.__dict__.get("model_type") == kind:
            auto.AutoConfig.register(kind, own)
            probe.note(f"{own.__module__}.{own.__name__}: in place of the checkpoint's own class")


def without_code(model: str, flags: Sequence[str], probe: Probe, scratch: str) -> str:
    """The folder of a model, without the code that it names, if the release has the class itself.

    Checkpoints name code (``auto_map``) for programs that lack their architecture.  It never runs
    here, and vLLM takes its own class of the same name.
    """
    with open(os.path.join(model, "config.json"), encoding="utf-8") as stream:
        config = json.load(stream)
    if "auto_map" not in config or "--trust-remote-code" not in flags:
        return model
    models: Any = importlib.import_module("vllm.model_executor.models")
    names = config.get("architectures") or ["none"]
    if not set(names) <= set(models.ModelRegistry.get_supported_archs()):
        return model
    copy = tempfile.mkdtemp(prefix="model-", dir=scratch)
    shutil.copytree(model, copy, dirs_exist_ok=True)
    del config["auto_map"]
    with open(os.path.join(copy, "config.json"), "w", encoding="utf-8") as stream:
        json.dump(config, stream)
    probe.note(f"the checkpoint's code (auto_map): left out, the release has {', '.join(names)}")
    return copy


#: Errors of the inspection of a model's class, which the release replaces by one without the cause.
INSPECTION: list[BaseException] = []


def inspected(function: Callable[[], Any]) -> Any:
    """The result of an inspection; an error is kept."""
    try:
        return function()
    except BaseException as error:
        INSPECTION.append(error)
        raise


def in_one_process(probe: Probe) -> None:
    """A model's class is inspected here: a child process would lack the stand-ins."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = inspected
    probe.note("a model's class is inspected in the process that builds it")


def without_tokens_of_reasoning(probe: Probe) -> None:
    """A reasoning parser is looked up by its name, and not made: it would read the tokenizer."""
    try:
        reasoning: Any = importlib.import_module("vllm.config.reasoning").ReasoningConfig
        parsers = importlib.import_module("vllm.reasoning").ReasoningParserManager
    except (ImportError, AttributeError):  # an older release has none
        return

    def look_up(self: Any, _model_config: object) -> None:
        if name := getattr(self, "reasoning_parser", None):
            parsers.get_reasoning_parser(name)

    reasoning.initialize_token_ids = look_up
    probe.note("a reasoning parser is looked up by its name, and not made")


def begin_distributed(config: Any, probe: Probe, scratch: str) -> None:
    """Rank 0 of as many as the configuration has; other ranks do not exist."""
    torch: Any = importlib.import_module("torch")
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    world = tensor * pipeline * parallel.data_parallel_size
    where = f"file://{scratch}/rendezvous-{os.getpid()}"
    parallel.disable_custom_all_reduce = True
    os.environ.update(ONE_RANK)
    probe.note(f"rank 0 of {world} on the CPU; no communication: {', '.join(ONE_RANK)}")
    if world == 1:
        torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    else:
        store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
        torch.distributed.init_process_group("fake", store=store, rank=0, world_size=world)
        new = torch.distributed.new_group
        torch.distributed.new_group = lambda ranks=None, *_, **__: new(ranks, backend="fake")
        group = state.init_model_parallel_group
        state.init_model_parallel_group = lambda *a, **k: group(
            *a, **{**k, "use_message_queue_broadcaster": False}
        )
    state.init_distributed_environment(
        world_size=world, rank=0, distributed_init_method=where, local_rank=0, backend="gloo"
    )
    state.initialize_model_parallel(tensor, pipeline, backend="gloo")


def map_experts_on_the_cpu() -> None:
    """The map of a rank's experts has values, which a release reads; other tensors have none."""
    torch: Any = importlib.import_module("torch")
    for name in ("expert_map_manager", "layer"):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{name}")
            real = getattr(module, "determine_expert_map", None)
            if real is not None and not hasattr(real, "__wrapped__"):

                @functools.wraps(real)
                def mapped(*args: Any, _real: Any = real, **options: Any) -> Any:
                    with torch.device("cpu"):
                        return _real(*args, **options)

                module.determine_expert_map = mapped


def built(config: Any, probe: Probe, scratch: str) -> Any:
    """The model of a configuration, on the meta device."""
    torch: Any = importlib.import_module("torch")
    utilities: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    begin_distributed(config, probe, scratch)
    map_experts_on_the_cpu()
    torch.set_default_dtype(config.model_config.dtype)
    torch.cuda.Stream = torch.cuda.Event = Stream
    probe.note("streams and events of CUDA: objects on which nothing runs")
    probe.note("tensors: on torch's meta device, without values")
    with torch.device("meta"), on_meta():
        return utilities.initialize_model(vllm_config=config, model_config=config.model_config)


#: The class that loads a draft model, by the method of speculation; others are `EagleProposer`.
PROPOSERS = {
    "draft_model": ("draft_model", "DraftModelProposer"),
    "dflash": ("dflash", "DFlashProposer"),
}


#: Methods of speculation that build no model.
WITHOUT_MODEL = ("ngram", "suffix", "extract_hidden_states")


def configuration_of_draft(config: Any) -> Any:
    """The release's configuration for its draft model, which may have back ends of its own."""
    speculative = config.speculative_config
    module, name = PROPOSERS.get(str(speculative.method), ("eagle", "EagleProposer"))
    try:
        proposer = getattr(importlib.import_module(f"vllm.v1.spec_decode.{module}"), name)
        make = proposer._create_draft_vllm_config
    except (ImportError, AttributeError):  # an older release gives it the model's own
        return config
    torch: Any = importlib.import_module("torch")
    current = importlib.import_module("vllm.config").set_current_vllm_config
    called_before = list(CALLED)
    loader = object.__new__(proposer)
    vars(loader).update(vllm_config=config, speculative_config=speculative)
    try:  # the configuration depends on what the constructor finds, before it makes kernels ready
        with current(config), on_meta(pinned="cpu"):
            loader.__init__(config, torch.device("meta"))
    except REFUSALS:
        raise
    except Exception as error:
        print(f"{name} is not whole: {error}", file=sys.stderr)
    CALLED[:] = called_before
    return make(loader)


class Draft(NamedTuple):
    """A draft model, with the configurations that it is loaded with."""

    model: Any
    config: Any
    model_config: Any


def draft_of(config: Any) -> Draft | None:
    """The draft model of a configuration, on the meta device; None if it has none of its own."""
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or speculative.method in WITHOUT_MODEL:
        return None
    torch: Any = importlib.import_module("torch")
    utilities: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    current = importlib.import_module("vllm.config").set_current_vllm_config
    own = configuration_of_draft(config)
    alone = speculative.method == "draft_model"
    model_config = own.model_config if alone and own is not config else draft
    with current(own), torch.device("meta"), on_meta():
        model = utilities.initialize_model(
            vllm_config=own, model_config=model_config, prefix="draft_model" if alone else ""
        )
    return Draft(model, own, model_config)


def check_attention(config: Any, probe: Probe) -> None:
    """Let the release refuse what it refuses when a server that loaded prepares its attention.

    Raises:
        ValueError: a backend does not run as it is configured; other errors are no answer, because
            the backend may have called a stand-in.
    """
    torch: Any = importlib.import_module("torch")
    current = importlib.import_module("vllm.config").set_current_vllm_config
    prepared: set[tuple[object, object]] = set()
    for name, layer in config.compilation_config.static_forward_context.items():
        backend: Any = getattr(layer, "attn_backend", None)
        if not hasattr(backend, "get_builder_cls") or not hasattr(layer, "get_kv_cache_spec"):
            continue
        called_before, used_before = list(CALLED), list(dispatch_device.USED)
        try:
            with current(config), torch.device("meta"), on_meta():
                spec = layer.get_kv_cache_spec(config)
                if spec is not None and (backend, type(spec)) not in prepared:
                    prepared.add((backend, type(spec)))
                    backend.get_builder_cls()(spec, [name], config, torch.device("meta"))
        except Exception as error:
            where = failure(error, "model")["where"]
            if type(error) in REFUSALS and "/attention/" in where and called_before == CALLED:
                raise
            probe.note(f"{type(layer).__name__}: its attention was not prepared ({error})")
        CALLED[:], dispatch_device.USED[:] = called_before, used_before


#: What a release raises on purpose.
REFUSALS = (ValueError, NotImplementedError)


class LoraIsSupportedError(Exception):
    """The release goes on to load adapters."""


def check_lora(config: Any, model: Any) -> None:
    """Let the release refuse adapters for a model that cannot have any.

    Raises:
        ValueError: the model cannot have adapters.
    """
    if getattr(config, "lora_config", None) is None:
        return
    module: Any = importlib.import_module("vllm.v1.worker.lora_model_runner_mixin")

    def supported(*_args: object, **_options: object) -> None:
        raise LoraIsSupportedError

    module.LRUCacheWorkerLoRAManager = supported
    load = module.LoRAModelRunnerMixin.load_lora_model
    values = {**vars(config), "model": model, "vllm_config": config, "device": "meta"}
    names = list(inspect.signature(load).parameters)[1:]
    with contextlib.suppress(LoraIsSupportedError):
        load(module.LoRAModelRunnerMixin(), *(values.get(name) for name in names))


def kernels_of(method: Any, depth: int = 3) -> set[str]:
    """What a quantisation method selected: the classes of its kernels, and its backends' names.

    A method may have them itself, or in a scheme or an operator that it delegates to.
    """
    kernels: set[str] = set()
    for name, value in vars(method).items() if hasattr(method, "__dict__") else ():
        kind = type(value)
        if name.endswith("backend"):
            backend = value if isinstance(value, str) else getattr(value, "name", None)
            kernels |= {backend} if isinstance(backend, str) else set()
        elif kind.__name__.endswith("Kernel"):
            kernels.add(kind.__name__)
        elif depth and kind.__module__.startswith("vllm.") and not is_module_or_config(kind):
            kernels |= kernels_of(value, depth - 1)
    return kernels


def is_module_or_config(kind: type) -> bool:
    """Whether a class is a layer or a configuration, which name what others selected."""
    return kind.__name__.endswith("Config") or any(c.__name__ == "Module" for c in kind.__mro__)


def experts_of(module: Any) -> tuple[int, int] | None:
    """How many experts a token uses, and how many there are; None for other layers."""
    used = getattr(module, "top_k", None)
    used = getattr(getattr(module, "moe_config", None), "experts_per_token", used)
    total = getattr(module, "global_num_experts", None) or getattr(module, "num_experts", None)
    return (used, total) if isinstance(used, int) and isinstance(total, int) and total else None


def read_by_a_token(module: Any, held: int) -> int:
    """Bytes of weights that one token reads: of an embedding a row, of experts those it uses."""
    kind, experts = type(module).__name__, experts_of(module)
    if "Embedding" in kind and "LMHead" not in kind:
        return 0
    return held * experts[0] // experts[1] if experts and held else held


def shares_vocabulary(config: Any) -> bool:
    """Whether a draft model takes the embedding and the head of the model that it drafts for."""
    return str(config.speculative_config.method) != "draft_model"


def shapes_of_vocabulary(model: Any) -> frozenset[tuple[int, ...]]:
    """The shapes of a model's embedding and head."""
    names = ("VocabParallelEmbedding", "ParallelLMHead")
    return frozenset(
        tuple(parameter.shape)
        for module in model.modules()
        if type(module).__name__ in names
        for parameter in module.parameters(recurse=False)
    )


def layers_of(
    model: Any, part: str = "", shared: frozenset[tuple[int, ...]] = frozenset()
) -> list[Json]:
    """Equal layers of a model, with the kernels that the release chose for them.

    Weights that two layers share are counted where they come first; those of an embedding or a head
    with a ``shared`` shape are another model's.
    """
    rows: dict[tuple[Any, ...], Json] = {}
    counted: set[int] = set()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if type(module).__name__ in ("VocabParallelEmbedding", "ParallelLMHead"):
            own = [parameter for parameter in own if tuple(parameter.shape) not in shared]
        size = sum(p.numel() * p.element_size() for p in own if id(p) not in counted)
        held = sum(p.numel() * p.element_size() for p in own)
        counted.update(map(id, own))
        method, backend = (
            getattr(module, "quant_method", None),
            getattr(module, "attn_backend", None),
        )
        scheme = getattr(module, "scheme", None)
        if method is None and backend is None and not held:
            continue
        parts = [part for part in (method, scheme) if part is not None]
        kernels = tuple(sorted(set().union(*(kernels_of(part) for part in parts))))
        name_of = getattr(backend, "get_name", None)  # newer releases have an enumeration here, too
        attention = name_of() if name_of else str(getattr(backend, "name", ""))
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        quantisation = type(scheme or method).__name__ if parts else ""
        key = (pattern, type(module).__name__, quantisation, kernels, attention)
        row = rows.setdefault(
            key,
            {
                "pattern": pattern, "layer": key[1], "quantisation": quantisation,
                "kernels": list(kernels), "attention": attention, "experts": None,
                "part": part or part_of(name), "count": 0, "bytes": 0, "token_bytes": 0,
            },
        )  # fmt: skip
        row["count"] += 1
        row["bytes"] += size
        row["token_bytes"] += read_by_a_token(module, held)
        row["experts"] = experts_of(module)
    return list(rows.values())


#: First words of the names of layers that read pictures, sound and video.
TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal\w*|mm_\w+)(\.|$)")


def part_of(name: str) -> str:
    """The part of a model that a layer belongs to: a tower, or the language model."""
    return "tower" if TOWERS.search(name) else "model"


def caches_of(config: Any) -> list[Json]:
    """Equal caches: their kind, and the bytes of one block of so many tokens."""
    rows: collections.Counter[tuple[Any, ...]] = collections.Counter()
    current = importlib.import_module("vllm.config").set_current_vllm_config
    with current(config):
        for layer in config.compilation_config.static_forward_context.values():
            spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
            if spec is not None:
                window = getattr(spec, "sliding_window", None)
                rows[type(spec).__name__, spec.block_size, spec.page_size_bytes, window] += 1
    names = ("kind", "block_tokens", "block_bytes", "window")
    return [{**dict(zip(names, row, strict=True)), "count": n} for row, n in rows.items()]


def settings_of(config: Any) -> Json:
    """The choices of a configuration that a user asks for."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    draft = getattr(config, "speculative_config", None)
    return {
        "architecture": str(getattr(model, "architecture", "")),
        "quantization": model.quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "kv_cache_dtype": str(cache.cache_dtype),
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "speculative": str(getattr(draft, "method", "") or ""),
        "experts": int(model.get_num_experts() or 0),
        "lora": getattr(config, "lora_config", None) is not None,
        "multimodal": bool(getattr(model, "is_multimodal_model", False)),
    }


#: How a line begins in which a release says why it does not take an attention backend.
NOT_VALID = ("Some attention backends are not valid", "Attention backend")


def record_log(models: Sequence[str]) -> dict[str, list[str]]:
    """Lists that fill with vLLM's messages: ``lines`` at INFO and above, ``warnings``, and reasons.

    Not those about the network or a folder without weights, which are no answer.  vLLM configures
    its loggers more than once, and handlers go with that; records are still made.
    """
    lines: list[str] = []
    warnings: list[str] = []
    reasons: list[str] = []
    make = logging.getLogRecordFactory()
    logging.getLogger("vllm").setLevel(logging.DEBUG)

    def made(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.name.partition(".")[0] != "vllm":
            return record
        with contextlib.suppress(TypeError, ValueError):  # as the release wrote it
            if record.levelno < logging.INFO:
                if str(record.msg).startswith(NOT_VALID):
                    reasons.append(record.getMessage())
                return record
            text = record.getMessage()
            if not any(ours in text for ours in (NO_NETWORK, *models)):
                lines.append(text)
                warnings.extend([text] if record.levelno >= logging.WARNING else ())
        return record

    logging.setLogRecordFactory(made)
    return {"lines": lines, "warnings": warnings, "refused_attention": reasons}


def answer(question: Json, probe: Probe, scratch: str) -> Json:
    """Ask the release one question; called in a child process."""
    log = record_log([str(question["model"])])
    reply = {**ANSWER, **log, "simulated": probe.simulated}
    stage = "arguments"
    memory = question.get("memory")
    CALLED.clear()  # imports are not this question's
    dispatch_device.USED.clear()
    try:
        if memory is not None:
            tell_memory(int(memory["total"]))
        apply_environment(question.get("env", {}))
        flags = [str(flag) for flag in question["flags"]]
        model_folder = without_code(str(question["model"]), flags, probe, scratch)
        use_own_configuration(model_folder, probe)
        asked = parsed(model_folder, flags, probe)
        refuse_counts("--hf-overrides", getattr(asked, "hf_overrides", None))
        stage = "configuration"
        context = importlib.import_module("vllm.usage.usage_lib").UsageContext
        config = asked.create_engine_config(usage_context=context.OPENAI_API_SERVER)
        reply["settings"] = settings_of(config)
        stage = "model"
        current = importlib.import_module("vllm.config").set_current_vllm_config
        with current(config):
            model = built(config, probe, scratch)
            check_lora(config, model)
        reply["layers"] = layers_of(model)
        draft = draft_of(config)
        if draft is not None:
            shared = shapes_of_vocabulary(model) if shares_vocabulary(config) else frozenset()
            reply["layers"] += layers_of(draft.model, "draft", shared)
        reply["parameter_bytes"] = sum(row["bytes"] for row in reply["layers"])
        reply["caches"] = caches_of(config)
        check_attention(config, probe)
        if memory is not None:
            size_caches(config, memory, reply, probe)
        reply["loading"] = loading_of(config, model, draft, reply)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        cause = INSPECTION[-1] if INSPECTION and "inspected" in str(error) else error
        reply.update(error=failure(cause, stage), stage=stage)
    CALLED.extend(f"{name} was called; its code is not here" for name in dispatch_device.USED)
    reply["simulated"] = [*probe.simulated, *ANSWERED]
    if CALLED:  # what the release did with the error depends on the stand-in
        reply.update(error=failure(StandInError(CALLED[0]), stage), stage=stage)
    return reply


def refuse_counts(where: str, values: object) -> None:
    """Refuse a configuration with a count that no model has.

    Raises:
        TooMuchError: a count is beyond what models have.
    """
    if why := model_counts.too_many(values):
        raise TooMuchError(f"{where}: {why}")


def size_caches(config: Any, memory: Json, reply: Json, probe: Probe) -> None:
    """Let the release size its KV cache; why it could not is part of the answer."""
    called_before, used_before = list(CALLED), list(dispatch_device.USED)
    try:
        reply["memory"] = preflight_memory.memory_of(
            config, reply["parameter_bytes"], memory, (reply["lines"], reply["warnings"])
        )
        stand_ins = CALLED[len(called_before) :]
        why = stand_ins[0] if stand_ins else ""
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
    CALLED[:], dispatch_device.USED[:] = called_before, used_before
    if why:
        reply["memory"] = None
        reply["memory_unknown"] = why.partition("\n")[0]
        probe.note(f"the KV cache was not sized ({reply['memory_unknown']})")


def loading_of(config: Any, model: Any, draft: Draft | None, log: Json) -> list[Json]:
    """What the release says when it loads the checkpoint's tensors; nothing without their names.

    What it logs is left out: it tells the sizes of the files, which are headers alone.
    """
    logged = {name: len(log[name]) for name in ("lines", "warnings")}
    parts = [loaded("model", config, model, config.model_config)]
    if draft is not None:
        parts.append(loaded("draft", draft.config, draft.model, draft.model_config))
    for name, count in logged.items():
        del log[name][count:]
    return [part for part in parts if part is not None]


def loaded(part: str, config: Any, model: Any, model_config: Any) -> Json | None:
    """Let the release load one model; what stand-ins or values may have caused is no refusal."""
    reply = {**preflight_weights.LOADING, "part": part}
    try:
        checkpoint = preflight_weights.checkpoint_of(str(model_config.model))
    except preflight_weights.NotAskedError as error:
        return {**reply, "not_asked": str(error)}
    if not checkpoint.tensors:
        return None
    torch: Any = importlib.import_module("torch")
    current = importlib.import_module("vllm.config").set_current_vllm_config
    called_before, used_before = list(CALLED), list(dispatch_device.USED)
    with current(config), torch.device("meta"), on_meta():
        said = preflight_weights.loading(config, model, model_config, checkpoint, failure)
    reply.update(said, tensors=checkpoint.tensors)
    used = [f"{name} was called" for name in dispatch_device.USED[len(used_before) :]]
    if stand_ins := [*CALLED[len(called_before) :], *used]:
        reply.update(refusal=None, not_asked=stand_ins[0])
    CALLED[:], dispatch_device.USED[:] = called_before, used_before
    return reply


def warm_up(probe: Probe) -> None:
    """Import what every question needs, once, before the children are forked."""
    for name in (
        "vllm.engine.arg_utils",
        *SERVER_ARGUMENTS,
        "vllm.model_executor.model_loader.utils",
        "vllm.model_executor.models.registry",
        "vllm.distributed.parallel_state",
        "flashinfer",
    ):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    stand_in_for_operators(probe)
    without_tokens_of_reasoning(probe)
    in_one_process(probe)
    refuse_code_of_checkpoints(probe)


class Server:
    """A process that imported the release, and asks each question in a forked child."""

    def __init__(self, request: Json, scratch: str) -> None:
        self.probe = Probe.of(request)
        self.scratch = scratch
        self.fatal: Json | None = None
        os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            subscriptable_array(self.probe)
            self.kept = prepare(request, self.probe, scratch)
            refuse_network(self.probe)
            stand_in_for_cuda_functions(self.probe)
            self.kept += define_operators_of_torchvision(self.probe)
            stand_in_for_broken(self.probe, "xgrammar")
            answer_as_integrated(self.probe)
            warm_up(self.probe)
            self.probe.note("no tokenizer is read")
            gc.freeze()
        except Exception as error:
            self.fatal = dispatch_probe.fatal_error(error)

    def result(self, questions: Sequence[Json]) -> Json:
        """The answers to some questions, in order; several are asked at the same time."""
        answers: list[Json] = []
        running: collections.deque[Child] = collections.deque()
        waiting = collections.deque([] if self.fatal else questions)
        while waiting or running:
            while waiting and len(running) < dispatch_probe.AT_A_TIME:
                running.append(Child(waiting.popleft(), self.probe, self.scratch))
            answers.append(running.popleft().reply())
        return {
            "schema": SCHEMA, "answers": answers, "fatal": self.fatal,
            "versions": versions(dispatch_probe.DISTRIBUTIONS), "simulated": self.probe.simulated,
        }  # fmt: skip


def prepare(request: Json, probe: Probe, scratch: str) -> list[object]:
    """The simulated device, and Triton, before anything of vLLM is imported."""
    kept = dispatch_device.prepare(
        {**request, "paths": request.get("paths", [])}, probe, scratch,
    )  # fmt: skip
    stand_in_for_triton(probe, "triton", str(request.get("triton") or "3.6.0"))
    stand_in_for_triton(probe, "numba", NUMBA)
    if request.get("tilelang"):
        stand_in_for_triton(probe, "tilelang", str(request["tilelang"]))
    return kept


def limit() -> None:
    """Let this process have `MOST_MEMORY` more, and `MOST_SECONDS` of a processor.

    A configuration may name a billion of anything.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = MOST_SECONDS if hard == resource.RLIM_INFINITY else min(MOST_SECONDS, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + MOST_MEMORY
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


class Child:
    """A forked process that answers one question, so that nothing of it is in another's answer."""

    def __init__(self, question: Json, probe: Probe, scratch: str) -> None:
        self.reading, writing = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                os.close(self.reading)
                limit()
                reply = answer(question, probe, scratch)
                with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                    json.dump(reply, pipe, default=str)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)

    def reply(self) -> Json:
        """Wait for the answer."""
        with os.fdopen(self.reading, encoding="utf-8") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if code == 0 and text:
            return dict(json.loads(text))
        words = f"signal {-code}" if code < 0 else f"exit status {code}"
        message = f"the process that built the model ended with {words}"
        error = {"type": "Crashed", "message": message, "where": "", "stage": "model", "tail": []}
        if code == -signal.SIGXCPU:
            took = f"building it takes more than {MOST_SECONDS} s of a processor"
            error.update(type=TooMuchError.__name__, message=took)
        return {**ANSWER, "error": error, "stage": "model"}


def main() -> int:
    """Read a request from stdin, write the result to stdout; then for each further line."""
    gc.disable()
    out = claim_stdout()
    request = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="preflight-probe-") as scratch:
        server = Server(request, scratch)
        while request is not None:
            result = server.result(request.get("questions", []))
            out.write(json.dumps(result, sort_keys=True, default=str) + "\n")
            out.flush()
            line = sys.stdin.readline()
            request = json.loads(line) if line.strip() else None
    out.close()
    return 0
