"""Simulates CUDA's runtime for a kernel's host code, and records what that launches.

The CuTe DSL compiles host code that calls the functions of its own runtime library.  One whose
functions are Python callbacks (`Library`, written without a compiler) takes its place: it returns
handles for loaded modules, answers for the simulated device, and passes each launch to a listener:
grid, block, shared memory and the parameters' bytes are the host code's own.  `Recorder` writes
them down, with the PTX and the memory behind the parameters.

Runs under the target's interpreter; standard library, and torch and tvm_ffi where it is used.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import platform
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.probes import stub_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# --------------------------------------------------------------------------- a library of callbacks

#: The table's name among the library's symbols.
TABLE = "spark_build_table"
_GLOBAL_OBJECT = 1 << 4 | 1
_POINTER = 8


def _jump(machine: str, distance: int) -> bytes:
    """A landing pad, then a jump to the address in the pointer ``distance`` bytes from here.

    endbr64, jmp [rip+x]; bti c, ldr x16 from pc+x, br x16.
    """
    if machine == "x86_64":
        return b"\xf3\x0f\x1e\xfa\xff\x25" + struct.pack("<i", distance - 10)
    if not -(1 << 20) <= distance - 4 < 1 << 20:
        raise ValueError(f"{distance} bytes are too far for one jump")
    load = 0x58000010 | ((distance - 4) // 4 & 0x7FFFF) << 5
    return struct.pack("<III", 0xD503245F, load, 0xD61F0200)


def call_table(soname: str, functions: Iterable[str], machine: str) -> bytes:
    """The library's bytes: functions and table entries are sorted by name.

    Raises:
        UnknownMachineError: there is no code for ``machine`` (as ``uname -m`` prints it).
    """
    names = sorted(set(functions))
    size = len(_jump(machine if machine == "x86_64" else "aarch64", 4096))
    image = stub_driver.Image.of_header()
    strings = stub_driver.Strings()
    places = [strings.place(name) for name in (*names, TABLE)]
    codes = [image.add(bytes(size)) for _ in names]
    rows = [
        struct.pack("<IBBHQQ", place, stub_driver.GLOBAL_FUNCTION, 0, 1, code, size)
        for place, code in zip(places, codes, strict=False)
    ]
    symbols = image.add(bytes(stub_driver.SYMBOL * (len(names) + 2)))
    hashes = image.add(stub_driver.hash_table([*names, TABLE]))
    entries = stub_driver.entries_of(strings, soname, symbols, hashes)
    stub_driver.add_strings(image, strings, entries)
    room = _POINTER * len(names)
    table = stub_driver.writable_address(image, entries)
    rows.append(struct.pack("<IBBHQQ", places[-1], _GLOBAL_OBJECT, 0, 2, table, room))
    for number, code in enumerate(codes):
        jump = _jump(machine, table + _POINTER * number - code)
        image.data[code : code + size] = jump
    begin = symbols + stub_driver.SYMBOL
    image.data[begin : begin + stub_driver.SYMBOL * len(rows)] = b"".join(rows)
    return stub_driver.finished(image, entries, machine, room)


class Library:
    """A loaded library of this kind, with its functions in Python."""

    def __init__(self, path: str, functions: Iterable[str]) -> None:
        self.path = path
        self.names = sorted(set(functions))
        self._kept: list[Any] = []
        with open(path, "wb") as file:
            file.write(call_table("libspark-build-calls.so", self.names, platform.machine()))

    def fill(self, answers: Mapping[str, Any]) -> None:
        """Set a ctypes callback for each function; those without one get ``answers[""](name)``.

        A call before this crashes.
        """
        loaded = ctypes.CDLL(self.path)
        table = (ctypes.c_void_p * len(self.names)).in_dll(loaded, TABLE)
        for number, name in enumerate(self.names):
            callback = answers[name] if name in answers else answers[""](name)
            table[number] = ctypes.cast(callback, ctypes.c_void_p).value
            self._kept.append(callback)
        self._kept.append(loaded)


# -------------------------------------------------------------------------------------- the runtime

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

    def short(match: re.Match[str]) -> str:
        known = [start for start in starts if match[2].startswith(start)]
        return f'{match[1]}{match[2][len(known[-1]) if known else 0 :]}"'

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
        callbacks = {
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
            callbacks[f"_cuLibrary{name}"] = callbacks[f"_cudaLibrary{name}"]
        callbacks[""] = self._refusing
        return callbacks

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
        launch = Config.from_address(config)
        name = self._kernels[kernel]
        launched = Launched(name, list(launch.grid), list(launch.block), launch.shared, pointers)
        self._listen(launched)
        return 0


def parameters(ptx: str, launched: Launched) -> list[bytes]:
    """The bytes of each parameter, whose sizes the kernel's PTX declares.

    Raises:
        KeyError: the PTX has no such kernel.
    """
    entry = re.search(rf"\.entry {re.escape(launched.kernel)}\((.*?)\n\)", ptx, re.DOTALL)
    if entry is None:
        raise KeyError(f"no kernel {launched.kernel} in the PTX")
    declared = re.finditer(r"\.param[^,\n]*?\.[a-z](\d+)\s+[\w$]+(?:\[(\d+)\])?", entry[1])
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


# ---------------------------------------------------------------------------------------- recording

#: Version of ``launch.json``.
SCHEMA = 1
Json = dict[str, Any]


class Recorder:
    """Writes each launch of a request."""

    def __init__(self) -> None:
        #: the compiler's output for the running function
        self.ptx: list[str] = []
        self.begin(Path())

    def begin(self, folder: Path) -> None:
        """Start recording another request."""
        self.folder = folder
        self.case: Any = None
        self.number = 0
        self.launches: list[Json] = []
        self._pending: list[tuple[Path, Json]] = []

    def record(self, launched: Launched) -> None:
        """Record one launch of the current case."""
        # tensors may answer for the device to whoever asks
        with importlib.import_module("torch")._C.DisableTorchFunction():
            self._record(launched)

    def _record(self, launched: Launched) -> None:
        text = next(t for t in self.ptx if f".entry {launched.kernel}(" in t)
        parts = parameters(text, launched)
        into = self.folder / f"launch-{self.number}"
        self.number += 1
        into.mkdir(parents=True)
        (into / "kernel.ptx").write_text(text, encoding="utf-8")
        document = {
            "schema": SCHEMA,
            "name": self.case.name,
            "ptx": "kernel.ptx",
            "kernel": launched.kernel,
            "grid": launched.grid,
            "block": launched.block,
            "shared": launched.shared,
            "parameters": [part.hex() for part in parts],
            "memory": self._memory(into, b"".join(parts)),
        }
        self._pending.append((into, document))

    def finish_call(self) -> bool:
        """Write the launches of the call; return whether there were any."""
        pending, self._pending = self._pending, []
        if not pending:
            return False
        into, last = pending[-1]
        last["result"] = self._result(into)
        for folder, document in pending:
            (folder / "launch.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        folders = [str(folder) for folder, _ in pending]
        self.launches.append({"name": self.case.name, "folders": folders})
        return True

    def _memory(self, into: Path, parameters: bytes) -> list[Json]:
        """The memory of every tensor that a parameter or a tensor map points into."""
        torch = importlib.import_module("torch")
        pointers = {
            int.from_bytes(parameters[at : at + 8], "little")
            for at in range(0, len(parameters) - 7, 4)
        }
        inputs = {t.untyped_storage().data_ptr() for t in self.case.inputs}
        kinds = {torch.Tensor, *subclasses(torch.Tensor)}
        tensors: list[Any] = [one for one in gc.get_objects() if type(one) in kinds]
        stores = {}
        for one in tensors:
            if one.device.type == "cpu":
                storage = one.untyped_storage()
                stores[storage.data_ptr()] = storage
        blocks: list[Json] = []
        for address, storage in sorted(stores.items()):
            end = address + storage.nbytes()
            if address and any(address <= value < end for value in pointers):
                file = f"memory-{len(blocks)}.bin"
                (into / file).write_bytes(ctypes.string_at(address, storage.nbytes()))
                blocks.append({"address": address, "file": file, "writable": address not in inputs})
        return blocks

    def _result(self, into: Path) -> Json:
        case = self.case
        for name, values in (("exact", case.exact), ("bound", case.bound)):
            (into / f"{name}.f64").write_bytes(values.double().contiguous().numpy().tobytes())
        shape = [int(size) for size in case.output.shape]
        return {
            "address": case.output.data_ptr(),
            "type": "bf16",
            "shape": shape,
            "exact": "exact.f64",
            "bound": "bound.f64",
        }


def subclasses(kind: type) -> Iterator[type]:
    """All classes below another."""
    direct: list[type] = type.__subclasses__(kind)
    for one in direct:
        yield one
        yield from subclasses(one)


class Compiling:
    """``cute.compile``, whose functions can be called with tensors in ordinary memory.

    Options in brackets give another instance, as for the DSL's own.
    """

    def __init__(self, compiler: Any, recorder: Recorder, plain: type) -> None:
        self._compiler, self._recorder, self._plain = compiler, recorder, plain

    def __getitem__(self, options: Any) -> Compiling:
        return Compiling(self._compiler[options], self._recorder, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Call the compiled function, after passing its PTX to the recorder."""
        before = set(Path().glob("*.ptx"))
        function = self._compiler(*args, **kwargs)
        new = sorted(set(Path().glob("*.ptx")) - before)
        texts = [short_names(path.read_text("utf-8"), sys.path) for path in new]
        for path in new:  # the next one may have the same name
            path.unlink()

        def call(*values: Any) -> Any:
            self._recorder.ptx = texts
            # without TVM FFI nothing checks a tensor's device
            plain = type(function) is self._plain
            return function(*map(in_memory if plain else on_device, values))

        call.ptx = texts  # type: ignore[attr-defined]
        return call


def in_memory(value: Any) -> Any:
    """A plain tensor for a tensor of our classes; anything else unchanged."""
    tensor = importlib.import_module("torch").Tensor
    return value.as_subclass(tensor) if isinstance(value, tensor) else value


def on_device(value: Any) -> Any:
    """A tensor that reports to be on the device; anything else unchanged."""
    value = in_memory(value)
    if isinstance(value, importlib.import_module("torch").Tensor):
        return importlib.import_module("tvm_ffi").from_dlpack(OnDevice(value))
    return value
