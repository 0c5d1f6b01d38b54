"""Which torch a sandbox gets, and what stands in for the libraries that nobody has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.machinecode import ElfFacts
from builder.errors import SparkBuildError
from builder.proof import sandbox
from builder.proof.sandbox import DEFAULT, torch_folder, torch_need, wanted_of_cuda
from builder.proof.sandbox import wanted_torch as wanted
from tests.unit.fakes import MemoryTree
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = ('nvidia-cudnn-cu13==9; platform_system == "Linux"',)
FILES = {
    "torch/__init__.py": b"",
    "torch/lib/placeholder.txt": b"",
    "torch/include/ATen/ATen.h": b"x",
    "torch/bin/ptxas": b"x",
    "torch/bin/torch_shm_manager": b"x",
    "torch/lib/libtorch_cuda_linalg.so": b"x",
    "torchgen/gen.py": b"",
}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with FakeIndex() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


# ------------------------------------------------------------------------------------- which torch


def vllm_that_requires(*requirements: str) -> MemoryTree:
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.1\n{lines}"
    return MemoryTree({"vllm-0.20.1.dist-info/METADATA": metadata.encode()})


def test_the_torch_is_the_one_that_the_release_pins() -> None:
    assert wanted(vllm_that_requires("numpy", "torch==2.11.0"), {}) == "2.11.0"


def test_what_an_image_has_installed_comes_before_the_pin() -> None:
    tree = vllm_that_requires("torch==2.11.0")
    assert wanted(tree, {"torch": "2.12.0+cu130"}) == "2.12.0"


def test_the_variable_comes_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_TORCH", "2.9.1")
    assert wanted(vllm_that_requires("torch==2.11.0"), {"torch": "2.12.0"}) == "2.9.1"


@pytest.mark.parametrize("tree", [MemoryTree({}), vllm_that_requires("torch>=2.9", "torchaudio")])
def test_without_a_pin_there_is_a_default(tree: MemoryTree) -> None:
    assert wanted(tree, {}) == DEFAULT


# ------------------------------------------------------------------------------------ which wheel


def test_a_cpu_build_comes_before_a_cuda_build(index: FakeIndex) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    index.add("torch", "2.11.0+cpu", FILES)
    torch = torch_folder("2.11.0")
    assert torch.version == "2.11.0+cpu"
    assert torch.what == "torch 2.11.0+cpu (CPU build) and this machine's Python, in a sandbox"
    assert not any(torch.folder.glob("torch/lib/*stand-ins*"))


def test_another_index_can_be_named(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    assert "CUDA build" in torch_folder("2.11.0").what
    with FakeIndex() as other:
        other.add("torch", "2.11.0+cpu", FILES)
        monkeypatch.setenv("SPARK_BUILD_TORCH_INDEX", other.url)
        assert "CPU build" in torch_folder("2.11.0").what


def test_the_next_release_is_used_for_a_newer_python(index: FakeIndex) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    index.files["torch-2.11.0-cp310-cp310-win_amd64.whl"] = index.files.pop(
        "torch-2.11.0-py3-none-any.whl"
    )
    index.add("torch", "2.13.0", FILES, CUDA)
    index.add("torch", "2.12.0", FILES, CUDA)
    index.add("torch", "2.10.0", FILES, CUDA)
    torch = torch_folder("2.11.0")
    assert torch.version == "2.12.0"
    assert "2.11.0 has no wheel for this Python" in torch.what


def test_a_version_that_does_not_exist_is_an_error(index: FakeIndex) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    with pytest.raises(SparkBuildError, match=r"torch 0\.0\.0 is not on the package index"):
        torch_folder("0.0.0")


def test_a_system_without_a_cpp_runtime_is_told_what_to_install(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    monkeypatch.setattr(sandbox, "_CPP_RUNTIME", {"libnobody.so.1": "libnobody1"})
    with pytest.raises(SparkBuildError, match=r"torch needs libnobody\.so\.1, which") as caught:
        torch_folder("2.11.0")
    assert caught.value.hint == "apt-get install libnobody1"
    assert index.requests == [], "it is said before anything is fetched"


# ------------------------------------------------------------------------------------ what is kept


def test_libraries_that_selection_never_loads_are_omitted(index: FakeIndex) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    folder = torch_folder("2.11.0").folder
    left_out = ("include/ATen/ATen.h", "bin/ptxas", "lib/libtorch_cuda_linalg.so")
    assert [(folder / "torch" / name).exists() for name in left_out] == [False] * 3
    assert (folder / "torch" / "bin" / "torch_shm_manager").exists()
    assert (folder / "torchgen" / "gen.py").exists()


def test_it_is_unpacked_once(index: FakeIndex) -> None:
    index.add("torch", "2.11.0", FILES, CUDA)
    need = torch_need("2.11.0")
    assert need is not None
    assert "torch 2.11.0" in need.what
    folder = torch_folder("2.11.0").folder
    assert torch_need("2.11.0") is None
    before = len(index.requests)
    assert torch_folder("2.11.0").folder == folder
    assert index.requests[before:] == []


def test_a_damaged_wheel_leaves_nothing(index: FakeIndex) -> None:
    good = index.add("torch", "2.11.0", FILES, CUDA)
    index.faults.cut[good] = 200
    with pytest.raises(SparkBuildError, match=good):
        torch_folder("2.11.0")
    index.faults.cut.clear()
    folder = torch_folder("2.11.0").folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# -------------------------------------------------------------------------------------- stand-ins


def library(
    needed: tuple[str, ...] = (),
    undefined: dict[str, tuple[str, str]] | None = None,
    exported: tuple[str, ...] = (),
) -> ElfFacts:
    return ElfFacts(
        machine="x86_64",
        needed=needed,
        undefined=undefined or {},
        exported=frozenset(exported),
        versions={},
    )


def test_each_stub_library_defines_the_required_symbols() -> None:
    runtime, libc = "libcudart.so.13", "libc.so.6"
    needed = (runtime, "libnccl.so.2", "libcublas.so.13", "libcublasLt.so.13", "libc10.so", libc)
    found = wanted_of_cuda(
        {
            "libtorch_cuda.so": library(
                needed,
                {
                    "cudaMalloc": (runtime, runtime),
                    "ncclAllGather": ("", ""),
                    "cublasLtMatmul": ("", ""),
                    "cublasCreate_v2": ("", ""),
                    "malloc": (libc, "GLIBC_2.2.5"),
                    "c10_throw": ("", ""),
                    "PyList_New": ("", ""),
                    "_ZNSt6vectorC1Ev": ("", ""),
                },
            ),
            "libc10.so": library((libc,), exported=("c10_throw",)),
            "libtorch_nvshmem.so": library(
                ("libnvshmem_host.so.3",), {"nvshmem_init": ("libnvshmem_host.so.3", "NVSHMEM")}
            ),
        }
    )
    assert found == {
        runtime: {"cudaMalloc": runtime},
        "libcublas.so.13": {"cublasCreate_v2": ""},
        "libcublasLt.so.13": {"cublasLtMatmul": ""},
        "libnccl.so.2": {"ncclAllGather": ""},
        "libnvshmem_host.so.3": {"nvshmem_init": "NVSHMEM"},
    }


def test_a_stub_library_without_symbols_is_made_too() -> None:
    assert wanted_of_cuda({"libtorch.so": library(("libcufft.so.12",))}) == {"libcufft.so.12": {}}


def test_a_build_without_cuda_needs_none() -> None:
    facts = {"libtorch_cpu.so": library(("libgomp.so.1", "libm.so.6", "ld-linux-aarch64.so.1"))}
    assert wanted_of_cuda(facts) == {}
