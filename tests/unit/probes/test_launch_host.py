"""The generated library whose functions are in Python, and what it answers to host code."""

from __future__ import annotations

import ctypes
import io
import os
import struct
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from tests.unit.inimage import load

if TYPE_CHECKING:
    from pathlib import Path

launch_host = load("launch_host")
launch_probe = load("launch_probe")
MACHINES = ("x86_64", "aarch64")
NAMES = ["one", "three", "two"]


@pytest.mark.parametrize("machine", MACHINES)
def test_readelf_reads_it_correctly(machine: str) -> None:
    """Every function's jump goes by its own pointer in the table; the two machines' code apart."""
    data = launch_host.call_table("libcalls.so", NAMES, machine)
    assert data == launch_host.call_table("libcalls.so", reversed(NAMES), machine)
    elf = ELFFile(io.BytesIO(data))
    dynamic = next(s for s in elf.iter_segments() if isinstance(s, DynamicSegment))
    symbols = {s.name: s.entry for s in dynamic.iter_symbols() if s.name}
    table = symbols.pop(launch_host.TABLE)
    assert (table.st_size, table.st_info.type) == (24, "STT_OBJECT")
    held = [s.header for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
    written = next(s for s in held if s.p_flags & 2)
    assert written.p_vaddr <= table.st_value
    assert table.st_value + 24 <= written.p_vaddr + written.p_memsz
    assert sorted(symbols) == NAMES
    for number, name in enumerate(NAMES):
        at = symbols[name].st_value
        code = data[at : at + symbols[name].st_size]
        if machine == "x86_64":
            assert code[:6] == b"\xf3\x0f\x1e\xfa\xff\x25"
            target = at + 10 + struct.unpack("<i", code[6:])[0]
        else:
            pad, load_word, jump = struct.unpack("<III", code)
            assert (pad, jump, load_word >> 24, load_word & 31) == (
                0xD503245F,
                0xD61F0200,
                0x58,
                16,
            )
            target = at + 4 + 4 * (load_word >> 5 & 0x7FFFF)
        assert target == table.st_value + 8 * number


def test_other_architectures_are_unsupported() -> None:
    with pytest.raises(Exception, match="riscv64"):
        launch_host.call_table("libcalls.so", NAMES, "riscv64")


# ---------------------------------------------------------------------------------- what it answers

PTX = """.version 9.1
.visible .entry other(
	.param .u32 other_param_0
)
{ ret; }
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .align 4 .b8 kernel_param_2[12]
)
.reqntid 32, 1, 1
{ ret; }
"""


class Host:
    """Calls the runtime as host code does: by its functions' addresses."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.runtime = launch_host.Runtime(self.launched.append)
        self.callbacks = self.runtime.callbacks()

    def call(self, name: str, *arguments: Any) -> int:
        """Call one function."""
        return int(self.callbacks[name](*arguments))


def box(kind: Any = ctypes.c_uint64) -> tuple[Any, int]:
    """A variable and its address."""
    variable = kind(0)
    return variable, ctypes.addressof(variable)


def test_a_launch_from_host_code_is_recorded() -> None:
    host = Host()
    (library, at_library), (kernel, at_kernel) = box(), box()
    assert host.call("_cudaLibraryLoadData", at_library, 1, 0, 0, 0, 0, 0, 0) == 0
    name = ctypes.create_string_buffer(b"kernel")
    assert host.call("_cudaLibraryGetKernel", at_kernel, library.value, ctypes.addressof(name)) == 0
    parts = [bytes(range(128)), b"\1\2\3\4", b"abcdefghijkl"]
    held = [ctypes.create_string_buffer(part, len(part)) for part in parts]
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, held))
    config = launch_host.Config((1, 1, 6), (288, 1, 1), 4096, None, None, 0)
    places = ctypes.addressof(config), kernel.value, ctypes.addressof(pointers)
    assert host.call("_cudaLaunchKernelEx", *places) == 0
    (launched,) = host.launched
    assert (launched.kernel, launched.grid, launched.block) == ("kernel", [1, 1, 6], [288, 1, 1])
    assert launched.shared == 4096
    assert launch_host.parameters(PTX, launched) == parts
    with pytest.raises(KeyError, match="no kernel kernel in the PTX"):
        launch_host.parameters(PTX.replace("entry kernel", "entry colonel"), launched)


def test_a_library_is_loaded_once() -> None:
    host, calls = Host(), []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def init(place: int) -> int:
        calls.append("init")
        ctypes.c_uint64.from_address(place).value = 77
        return 0

    begun = kind(init)
    state, at = box()
    address = ctypes.cast(begun, ctypes.c_void_p).value
    for _ in range(2):
        assert host.call("cuda_dialect_init_library_once", at, address, 0, 0) == 0
    assert (state.value, calls) == (77, ["init"])
    failing = kind(lambda _place: 5)
    state.value = 0
    address = ctypes.cast(failing, ctypes.c_void_p).value
    assert host.call("cuda_dialect_init_library_once", at, address, 0, 0) == 5
    assert state.value == 0


def test_simulated_and_unsupported_device_queries() -> None:
    host = Host()
    value, at = box(ctypes.c_int)
    assert host.call("_cudaDeviceGetAttribute", at, 97, 0) == 0
    assert value.value == 101376
    assert host.call("_cudaGetDeviceCount", at) == 0
    assert value.value == 1
    assert host.call("_cudaDeviceGetAttribute", at, 12345, 0) == launch_host.NOT_SUPPORTED
    assert "cudaDeviceGetAttribute 12345" in str(host.runtime.errors[0])
    assert host.callbacks[""]("_cudaMalloc")() == launch_host.NOT_SUPPORTED
    assert host.runtime.refused == ["_cudaMalloc"]


def test_functions_that_host_code_may_call() -> None:
    yes = ("_cudaLaunchKernelEx", "_cuKernelGetAttribute", "cuda_dialect_assert_success")
    no = ("cudaMalloc", "_ZN4llvm", "_custom", "printf")
    assert all(launch_host.RUNTIME_FUNCTION.fullmatch(name) for name in yes)
    assert not any(launch_host.RUNTIME_FUNCTION.fullmatch(name) for name in no)


def test_source_files_are_named_by_import_path() -> None:
    """The longest of the folders that Python imports from is cut off; others stay whole."""
    folders = ["", "/tree", "/tree/dsl/", "/other"]
    for name, short in {
        "/tree/flashinfer/gemm.py": "flashinfer/gemm.py",
        "/tree/dsl/cutlass/cute.py": "cutlass/cute.py",
        "/trees/x.py": "/trees/x.py",
        "own.py": "own.py",
    }.items():
        text = f'\t.file\t1 "{name}"\n// .file 2 "/tree/a"\n'
        assert launch_host.short_names(text, folders) == text.replace(name, short)


@pytest.mark.parametrize("folder", ["lib", "cu13/lib"])
def test_the_runtime_library_is_found_in_every_release(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia_cutlass_dsl" / folder / "libcute_dsl_runtime.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    names = {"_cudaMalloc", "cuda_dialect_init_library_once", "memcpy"}
    tables = {str(library): names}
    monkeypatch.setattr(launch_probe.stub_driver, "defined_symbols", tables.__getitem__)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert launch_probe.runtime_functions() == {"_cudaMalloc", "cuda_dialect_init_library_once"}


def test_a_preloaded_runtime_library_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuTe DSL 4.6 changes its variable when it is imported."""
    own = types.SimpleNamespace(envar=types.SimpleNamespace(shared_libs="/own.so:/ours.so"))
    module = types.ModuleType("cutlass.base_dsl.dsl")
    module.DSLSingletonMeta = types.SimpleNamespace(_instances={"one": own})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.dsl", module)
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl", types.ModuleType("cutlass.base_dsl"))
    monkeypatch.setitem(sys.modules, "cutlass", types.ModuleType("cutlass"))
    monkeypatch.setenv("CUTE_DSL_LIBS", "/own.so:/ours.so")
    launch_probe.use_library("/ours.so")
    assert (own.envar.shared_libs, os.environ["CUTE_DSL_LIBS"]) == ("/ours.so", "/ours.so")


def test_a_function_compiled_with_options_is_recorded_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``cute.compile[options](...)``: the PTX that it wrote, and tensors without our class."""

    class Tensor:
        def as_subclass(self, kind: type[Tensor]) -> Tensor:
            return kind()

    class OnCuda(Tensor):
        pass

    class Plain:
        def __call__(self, *values: Any) -> list[type]:
            return [type(value) for value in values]

    class Compiler:
        def __init__(self, options: str = "") -> None:
            self.options = options

        def __getitem__(self, options: str) -> Compiler:
            return Compiler(options)

        def __call__(self, name: str) -> Plain:
            (tmp_path / f"{name}.ptx").write_text(f"// {name}{self.options}")
            return Plain()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    recorder = launch_host.Recorder()
    compiling = launch_host.Compiling(Compiler(), recorder, Plain)
    first, second = compiling("a"), compiling["-O3"]("b")
    assert second(OnCuda(), 5, Tensor()) == [Tensor, int, Tensor]
    assert recorder.ptx == ["// b-O3"] == second.ptx
    first()
    assert recorder.ptx == ["// a"], "of the function that runs"
    assert list(tmp_path.iterdir()) == []


def test_requests_for_the_same_device_share_a_child() -> None:
    """What a child keeps holds for one number of SMs, and for what it was told to choose."""
    tile = {"kind": "dense-b12x", "tile": [64, 64], "shapes": [[64, 64, 128]]}
    asks = [{"kind": "vllm-linear"}, tile, {**tile, "inputs": "degenerate"}, {"kind": "moe-b12x"}]
    asks += [{**tile, "sms": 2}, {"kind": "dense-w4a16", "sms": 2}]
    asks += [{"kind": "moe-b12x", **apart} for apart in ({"many": True}, {"narrow": True})]
    shared = launch_probe.together(asks)
    assert shared == [[1, 2, 3, 0], [4, 5], [6], [7]], "vLLM's layer last"
    slow = [launch_probe.slowest([asks[number] for number in group]) for group in shared]
    assert slow == ["moe-b12x", "dense-b12x", "moe-b12x", "moe-b12x"]
    package = [{"kind": "vllm-moe", "moe_backend": "b12x"}, {"kind": "package-dense"}, tile]
    assert launch_probe.together(package) == [[1], [2], [0]], "it changes every tensor"


def test_memory_of_any_tensor_that_a_parameter_points_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its class is FlashInfer's or vLLM's; a tensor on a GPU has no memory here."""
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    made = [kind() for kind in (Tensor, Parameter, Grandchild)]
    other, remote = Tensor(), Tensor("cuda")
    recorder = launch_host.Recorder()
    recorder.case = types.SimpleNamespace(inputs=made[:1])
    pointers = [one.data_ptr() + 4 for one in (*made, remote)]
    found = recorder._memory(tmp_path, struct.pack("<4Q", *pointers))
    assert {one["address"]: one["writable"] for one in found} == {
        one.data_ptr(): one is not made[0] for one in made
    }
    assert other.data_ptr() not in {one["address"] for one in found}


class Tensor:
    """As much of a tensor as the recorder asks for."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = types.SimpleNamespace(type=device)
        self._bytes = ctypes.create_string_buffer(16)

    def data_ptr(self) -> int:
        """Where its memory begins."""
        return ctypes.addressof(self._bytes)

    def nbytes(self) -> int:
        """The size of its memory."""
        return len(self._bytes)

    def untyped_storage(self) -> Tensor:
        """Its memory."""
        return self


class Parameter(Tensor):
    """A class of torch's own."""


class Grandchild(Parameter):
    """One of somebody else's."""


def test_a_place_in_the_code_is_looked_up_once() -> None:
    asked = []
    locate = load("codegen_probe").remembered(lambda frame, *_: asked.append(frame.f_lineno))

    def here(times: int) -> None:
        for _ in range(times):
            locate(sys._getframe())

    here(5)
    here(1)
    assert len(asked) == 1
    locate(sys._getframe())
    locate(sys._getframe())
    assert len(asked) == 3, "two places"
    locate(sys._getframe(), 3)
    assert len(asked) == 4, "with more lines around it, nothing is remembered"


def test_what_went_wrong_in_one_request_is_not_told_of_the_next() -> None:
    runtime = launch_host.Runtime(lambda _launched: None)
    runtime.errors.append(KeyError("one"))
    runtime.refused.append("cudaMalloc")
    runtime.forget()
    assert (runtime.errors, runtime.refused) == ([], [])
