"""Simulates CUDA's runtime for a kernel's host code.

The CuTe DSL compiles host code that calls the functions of its own runtime library.  One whose
functions are in Python (`call_table`) takes its place: it returns handles for loaded modules,
answers for the simulated device, and passes each launch to a listener: grid, block, shared memory
and the parameters' bytes are the host code's own.

Runs under the target's interpreter; standard library, and torch and tvm_ffi where it is used.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Names of the DSL's runtime library that host code may be linked against.
RUNTIME_FUNCTION = re.compile(r"_cu(?:da)?[A-Z]\w*|cuda_dialect_\w+|CuteDSLRT_\w+")
#: ``cudaDeviceAttr`` by number (driver_types.h), for a GB10: shared memory of a block (opt-in),
#: of an SM, SMs, threads of an SM, compute capability 12.1, threads of a block.
ATTRIBUTES = {97: 101376, 81: 102400, 16: 48, 39: 1536, 75: 12, 76: 1, 1: 1024}
#: ``cudaErrorNotSupported``: the result of functions that are not simulated.
NOT_SUPPORTED = 801

P, INT, UINT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
#: The directive that names a source file (PTX ISA, ".file").
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")([^"\n]+)"', re.MULTILINE)


def short_names(ptx: str, folders: Sequence[str]) -> str:
    """PTX with source files named by their import path: ``flashinfer/gemm/kernel.py``."""
    starts = sorted((f"{folder.rstrip('/')}/" for folder in folders if folder), key=len)

    def short(found: re.Match[str]) -> str:
        known = [start for start in starts if found[2].startswith(start)]
        return f'{found[1]}{found[2][len(known[-1]) if known else 0 :]}"'

    return _FILE.sub(short, ptx)


class Config(ctypes.Structure):
    """``cudaLaunchConfig_t`` (driver_types.h)."""

    _fields_ = (
        ("grid", UINT * 3),
        ("block", UINT * 3),
        ("shared", SIZE),
        ("stream", P),
        ("attributes", P),
        ("count", UINT),
    )


@dataclasses.dataclass
class Launched:
    """One launch of the host code."""

    kernel: str
    grid: list[int]
    block: list[int]
    shared: int
    #: addresses of the parameters
    pointers: int


def _number(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def _integer(address: int) -> Any:
    return ctypes.c_int.from_address(address)


class Runtime:
    """The simulated runtime: its callbacks by name; ``listen`` is called with each launch."""

    def __init__(self, listen: Callable[[Launched], None]) -> None:
        self._listen = listen
        self._handle = 0x1000
        self._kernels: dict[int, str] = {}
        #: called functions that are not simulated, in order
        self.refused: list[str] = []
        #: errors in callbacks, which C cannot propagate
        self.errors: list[BaseException] = []
        self._text = ctypes.create_string_buffer(b"not simulated")

    def forget(self) -> None:
        """Clear the recorded errors, after they were reported."""
        self.refused, self.errors = [], []

    def callbacks(self) -> dict[str, Any]:
        """Callbacks by name; the entry without a name creates those for all other functions."""
        made = {
            "_cudaLaunchKernelEx": self._made(self._launch, P, P, P),
            "_cudaLibraryLoadData": self._made(self._load, P, P, P, P, UINT, P, P, UINT),
            "_cudaLibraryGetKernel": self._made(self._kernel, P, P, P),
            "_cudaLibraryUnload": self._made(lambda _library: 0, P),
            "_cudaDeviceGetAttribute": self._made(self._attribute, P, INT, INT),
            "_cuKernelGetAttribute": self._made(self._kernel_attribute, P, INT, P, INT),
            "_cudaKernelSetAttributeForDevice": self._made(lambda *_: 0, P, INT, INT, INT),
            "_cudaGetDevice": self._made(self._zero, P),
            "_cuDeviceGet": self._made(lambda place, _which: self._zero(place), P, INT),
            "_cudaGetDeviceCount": self._made(self._one, P),
            "_cudaSetDevice": self._made(lambda _device: 0, INT),
            "cuda_dialect_init_library_once": self._made(self._once, P, P, P, P),
            "cuda_dialect_unload_library_once": self._made(lambda _state: 0, P),
            "cuda_dialect_get_error_name": ctypes.CFUNCTYPE(P, INT)(
                lambda _code: ctypes.addressof(self._text)
            ),
            "cuda_dialect_print_on_error": self._made(lambda *_: 0, INT, P),
            "cuda_dialect_assert_success": self._made(lambda *_: 0, INT, P, P),
        }
        for name in ("LoadData", "GetKernel", "Unload"):
            made[f"_cuLibrary{name}"] = made[f"_cudaLibrary{name}"]
        made[""] = self._refusing
        return made

    def _made(self, function: Callable[..., int], *arguments: Any) -> Any:
        def called(*values: Any) -> int:
            try:
                return function(*values)
            except BaseException as error:
                self.errors.append(error)
                return NOT_SUPPORTED

        return ctypes.CFUNCTYPE(INT, *arguments)(called)

    def _refusing(self, name: str) -> Any:
        def refuse() -> int:
            self.refused.append(name)
            return NOT_SUPPORTED

        return ctypes.CFUNCTYPE(INT)(refuse)

    def _new(self) -> int:
        self._handle += 16
        return self._handle

    @staticmethod
    def _zero(place: int) -> int:
        _integer(place).value = 0
        return 0

    @staticmethod
    def _one(place: int) -> int:
        _integer(place).value = 1
        return 0

    def _load(self, library: int, _code: int, *_options: Any) -> int:
        _number(library).value = self._new()
        return 0

    def _kernel(self, kernel: int, _library: int, name: int) -> int:
        handle = _number(kernel).value = self._new()
        self._kernels[handle] = ctypes.string_at(name).decode()
        return 0

    @staticmethod
    def _attribute(place: int, which: int, _device: int) -> int:
        if which not in ATTRIBUTES:
            raise KeyError(f"cudaDeviceGetAttribute {which} is not simulated")
        _integer(place).value = ATTRIBUTES[which]
        return 0

    @staticmethod
    def _kernel_attribute(place: int, _which: int, _kernel: int, _device: int) -> int:
        # 1 is the static shared memory of a kernel: none
        _integer(place).value = 0
        return 0

    @staticmethod
    def _once(state: int, init: int, load: int, _error: int) -> int:
        """Make the host code load its library once: it stores the handle in ``state``."""
        if _number(state).value:
            return 0
        box = ctypes.c_uint64(0)
        if code := ctypes.CFUNCTYPE(INT, P)(init)(ctypes.addressof(box)):
            return int(code)
        if load and (code := ctypes.CFUNCTYPE(INT, P, INT)(load)(ctypes.addressof(box), 0)):
            return int(code)
        _number(state).value = box.value
        return 0

    def _launch(self, config: int, kernel: int, pointers: int) -> int:
        made = Config.from_address(config)
        name = self._kernels[kernel]
        launched = Launched(name, list(made.grid), list(made.block), made.shared, pointers)
        self._listen(launched)
        return 0


def parameters(ptx: str, launched: Launched) -> list[bytes]:
    """The bytes of each parameter, whose sizes the kernel's PTX declares.

    Raises:
        KeyError: the PTX has no such kernel.
    """
    found = re.search(rf"\.entry {re.escape(launched.kernel)}\((.*?)\n\)", ptx, re.DOTALL)
    if found is None:
        raise KeyError(f"no kernel {launched.kernel} in the PTX")
    declared = re.finditer(r"\.param[^,\n]*?\.[a-z](\d+)\s+[\w$]+(?:\[(\d+)\])?", found[1])
    sizes = [int(one[1]) // 8 * int(one[2] or 1) for one in declared]
    return [
        ctypes.string_at(_number(launched.pointers + 8 * n).value, size)
        for n, size in enumerate(sizes)
    ]


# --- tensors in ordinary memory that report to be on the device -----------------------------------


class _Device(ctypes.Structure):
    """``DLDevice`` (dlpack.h)."""

    _fields_ = (("kind", INT), ("index", INT))


class _Tensor(ctypes.Structure):
    """The beginning of ``DLTensor`` (dlpack.h)."""

    _fields_ = (("data", P), ("device", _Device))


#: ``kDLCUDA``.
CUDA = 2


class OnDevice:
    """A tensor's own DLPack capsule, with another device."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        """The first CUDA device."""
        return (CUDA, 0)

    def __dlpack__(self, **_options: Any) -> Any:
        """The capsule."""
        capsule = self._tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
        _Tensor.from_address(pointer(capsule, b"dltensor")).device.kind = CUDA
        return capsule
