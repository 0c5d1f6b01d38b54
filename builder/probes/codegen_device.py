"""Sets up a compilation for a simulated device: environment, paths, answers.

It runs next to ``codegen_probe.py`` under the target's interpreter, with the standard library and
the target's packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from builder.probes.simulated_device import MULTIPROCESSORS, SimulatedDevice, apply_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: One thread block cluster per SM, as the driver would answer; it only affects a grid's size.
SM_COUNT = MULTIPROCESSORS

Json = dict[str, Any]


@dataclasses.dataclass
class Probe(SimulatedDevice):
    """The simulated device, with the target architecture."""

    arch: str = "sm_121a"


def set_environment(request: Json, probe: Probe, scratch: str) -> None:
    """Set the request's variables, then those that make the DSL keep its output.

    The DSL reads them once, when it is imported, so the output folder is a relative path:
    each child has its own working directory. Up to 4.4 it knows ``KEEP_PTX`` and ``KEEP_CUBIN``,
    later also ``KEEP``, which replaces them.
    """
    apply_environment(request.get("env", {}))
    os.environ["CUTE_DSL_ARCH"] = probe.arch
    os.environ.update(CUTE_DSL_KEEP="ptx,cubin", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_KEEP_CUBIN="1")
    os.environ["CUTE_DSL_DUMP_DIR"] = "."
    os.environ.update(CUTE_DSL_CACHE_DIR=scratch, CUTE_DSL_DISABLE_FILE_CACHING="1")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch


def describe_device_to_torch(probe: Probe) -> None:
    """Make torch report the simulated device's properties, whether it has a device or not."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        torch.version.cuda = probe.cuda_version
        probe.note(f"torch.version.cuda: {probe.cuda_version} (a CPU build of torch)")
    answers: dict[str, Any] = {
        "get_device_properties": probe.properties(SM_COUNT, uuid="GPU-simulated"),
        "get_device_capability": probe.capability,
        "get_device_name": probe.device_name,
        "current_device": 0,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": False,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_args, _value=value, **_kwargs: _value)
    probe.note(f"torch.cuda: {', '.join(answers)} answer for {probe.device_name}")


def answer_for_flashinfer(probe: Probe) -> None:
    """Replace FlashInfer's queries of a real device, in every module that imported the function.

    Its own ``get_compute_capability`` refuses a tensor that is not on a GPU.
    """
    answers: dict[str, Any] = {
        "get_compute_capability": probe.capability,
        "get_max_active_clusters": SM_COUNT,
        "get_num_sm": SM_COUNT,
        "get_device_sm_count": SM_COUNT,
    }
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "flashinfer"]
    for name, value in answers.items():
        holders = [m for m in modules if inspect.isroutine(vars(m).get(name)) or wrapped(m, name)]
        for module in holders:
            setattr(module, name, lambda *_args, _value=value, **_kwargs: _value)
        if holders:
            probe.note(f"flashinfer {name}: {value}")


def wrapped(module: types.ModuleType, name: str) -> bool:
    """Whether a module's attribute is a function behind ``functools.cache``."""
    return callable(vars(module).get(name)) and hasattr(vars(module)[name], "__wrapped__")


class StubModule(types.ModuleType):
    """A module in which every attribute exists, and every call is a decorator or does nothing."""

    __version__ = "3.0.0"
    __path__: list[str] = []  # noqa: RUF012 (the interface of a package)

    def __getattr__(self, name: str) -> StubModule:
        """Have everything but Python's own special names."""
        if name.startswith("__"):
            raise AttributeError(name)
        return StubModule(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a single function unchanged; otherwise return a decorator."""
        alone = len(args) == 1 and not kwargs and callable(args[0])
        if not alone:
            return self
        with contextlib.suppress(AttributeError):
            args[0].fn = args[0]  # what a kernel of Triton has its function as
        return args[0]


TRITON = ("triton", "triton.language")


@contextlib.contextmanager
def stand_in_triton(probe: Probe, wanted: bool) -> Iterator[None]:
    """If Triton is not installed, let FlashInfer define its Triton kernels with a stand-in.

    Only while FlashInfer is imported: torch must continue without Triton.
    """
    if not wanted or importlib.util.find_spec("triton") is not None:
        yield
        return
    sys.modules.update({name: StubModule(name) for name in TRITON})
    try:
        yield
    finally:
        for name in TRITON:
            sys.modules.pop(name, None)
    probe.note("triton: a stand-in while FlashInfer is imported")


def find_source_quickly() -> None:
    """Give the DSL source locations without the slow search of Python up to 3.12.

    The DSL notes the source line of each operation by ``inspect.getframeinfo``, which looks
    backwards for a ``def`` through the whole file, ten million times for one MoE kernel. From
    Python 3.13 on it does not; the names of locations do not reach the machine code.
    """
    original = inspect.findsource

    def findsource(object: Any) -> tuple[list[str], int]:  # noqa: A002 (its name in inspect)
        thing = object
        code = thing.f_code if inspect.isframe(thing) else thing
        if not inspect.iscode(code):
            return original(thing)
        lines = linecache.getlines(code.co_filename)
        if not lines:
            raise OSError("could not get source code")
        return lines, min(code.co_firstlineno, len(lines)) - 1

    if sys.version_info < (3, 13):
        inspect.findsource = findsource


#: The DSL's own function for the same purpose, from 4.8 on; and the one that it asks about the
#: module of every frame.
LOCATIONS, LOCATE, OWN = "cutlass._mlir_helpers.op", "_fast_frameinfo", "_is_framework_module"


def remember_source() -> None:
    """Make the DSL look up each place in its callers' code only once.

    It looks up every operation, and kernels pass the same places many times.
    The answers are the same.
    """
    inspect.getframeinfo = remembered(inspect.getframeinfo)
    module: Any = sys.modules.get(LOCATIONS)
    if hasattr(module, LOCATE):
        setattr(module, LOCATE, remembered(getattr(module, LOCATE)))
    if hasattr(module, OWN):
        setattr(module, OWN, functools.cache(getattr(module, OWN)))


def remembered(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a frame for each place in the code."""
    known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def answer(frame: Any, *context: int) -> Any:
        if context or not inspect.isframe(frame):
            return ask(frame, *context)
        place = id(frame.f_code), frame.f_lasti
        found = known.get(place)
        if found is None:
            # keep the code object too, so that its id is not reused
            found = known[place] = frame.f_code, ask(frame)
        return found[1]

    return answer
