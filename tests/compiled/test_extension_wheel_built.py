"""Linking and proving on small libraries that nvcc builds here: real linker, real machine code.

Needs ``nvcc``; where there is none these tests are not run, and say so.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from builder.applier.trees import DirTree
from builder.compile.executor import find_nvcc
from builder.compile.extensionwheel import prove_kernels
from builder.compile.link import InstalledLibraries, Linked, link, toolkit_libraries
from builder.compile.operators import load_operators

SOURCE = Path(__file__).with_name("prebuilt.cu")
OPERATOR = replace(load_operators()[0], kernels="enable_sm120_only")
#: One that was found in the sources: what its kernels hold is not known.
FOUND = replace(OPERATOR, kernels="", holds="")
pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so nothing is built and linked here"
)


def compiled(folder: Path, *words: str, arch: str = "121a", code: str = "sm") -> Path:
    target = folder / "kernels.o"
    command = ["nvcc", "-Xcompiler", "-fPIC", "-DCUTLASS_KERNELS", *words, "-c", str(SOURCE)]
    command += ["-gencode", f"arch=compute_{arch},code={code}_{arch}", "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return target


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("real"))


def shared(folder: Path, name: str, text: str, *words: str) -> Path:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{target.name}", "-x", "c", "-"]
    command += ["-x", "none", *words, "-o", str(target)]
    subprocess.run(command, input=text, text=True, check=True)
    return target


def linked(folder: Path, objects: list[Path], *, runtime: bool) -> Linked:
    """Link for a base whose extension needs the CUDA runtime of this toolkit, or none."""
    nvcc, cuda = find_nvcc()
    toolkit = toolkit_libraries(nvcc)
    torch = shared(folder, "site/torch/lib/libc10.so", "int offered(void){return 1;}")
    text = "int offered(void); int cudaFree(void*); int f(void){return offered()"
    words = [str(torch), "-lstdc++", "-lm", "-lgcc_s", "-Wl,--no-as-needed"]
    if runtime:
        text += "+ cudaFree(0)"
        words.append(str(toolkit / f"libcudart.so.{cuda.partition('.')[0]}"))
    shared(folder, "site/vllm/_C.abi3.so", f"{text};}}", *words)
    base = InstalledLibraries(DirTree(folder / "site"), toolkit)
    return link(objects, base, "vllm/_C.abi3.so", nvcc, cuda)


def test_the_runtime_of_the_base_is_used(kernels: Path, tmp_path: Path) -> None:
    made = linked(tmp_path, [kernels], runtime=True)
    assert made.runtime == "shared"
    _, cuda = find_nvcc()
    assert f"libcudart.so.{cuda.partition('.')[0]}" in made.proof.needed
    assert made.base.stand_ins, "the base has no runtime, so the toolkit's was read"


def test_another_runtime_in_the_base_means_a_static_one(kernels: Path, tmp_path: Path) -> None:
    made = linked(tmp_path, [kernels], runtime=False)
    assert made.runtime == "static"
    assert not [name for name in made.proof.needed if "cudart" in name]


def test_the_same_objects_give_the_same_bytes(kernels: Path, tmp_path: Path) -> None:
    first = linked(tmp_path / "a", [kernels], runtime=True)
    assert first.data == linked(tmp_path / "b", [kernels], runtime=True).data


def test_an_undefined_symbol_is_named(kernels: Path, tmp_path: Path) -> None:
    text = "int offered(void); int nobody_has(void); int g(void){return offered()+nobody_has();}"
    source = tmp_path / "host.c"
    source.write_text(text)
    extra = tmp_path / "host.o"
    subprocess.run(["gcc", "-fPIC", "-c", str(source), "-o", str(extra)], check=True)
    made = linked(tmp_path, [kernels, extra], runtime=True)
    assert [fault for fault in made.proof.faults if "nobody_has" in fault]
    assert not [fault for fault in made.proof.faults if "offered" in fault]
    assert made.proof.symbols["libc10.so"] == 1


def test_real_kernels_pass(kernels: Path, tmp_path: Path) -> None:
    proof = prove_kernels(linked(tmp_path, [kernels], runtime=True).data, [OPERATOR])
    assert proof.faults == ()
    assert sum(proof.instructions.values())
    assert set(proof.kernels) == {"sm_121a"}


def test_a_trap_is_named(tmp_path: Path) -> None:
    trap = compiled(tmp_path, "-DONLY_1200")
    proof = prove_kernels(linked(tmp_path, [trap], runtime=True).data, [OPERATOR])
    assert any(fault.startswith("no QMMA in _ZN7cutlass13device_kernel") for fault in proof.faults)
    assert any(fault.startswith("a trap in ") for fault in proof.faults)


def test_a_library_without_kernels_is_named(kernels: Path, tmp_path: Path) -> None:
    other = replace(OPERATOR, kernels="no_such_kernel")
    proof = prove_kernels(linked(tmp_path, [kernels], runtime=True).data, [other])
    assert proof.faults == ("_C::cutlass_scaled_mm: the library has no kernel for it",)


# ----------------------------------------------------- an operator that was found in the sources


def test_kernels_that_write_to_memory_pass(kernels: Path, tmp_path: Path) -> None:
    library = linked(tmp_path, [kernels], runtime=True).data
    proof = prove_kernels(library, [FOUND], [kernels])
    assert proof.faults == ()
    assert proof.writing == sum(proof.kernels.values()) > 0
    assert proof.as_released == ()


def test_a_trap_passes_only_if_the_release_has_it_too(tmp_path: Path) -> None:
    trap = compiled(tmp_path, "-DONLY_1200")
    library = linked(tmp_path, [trap], runtime=True).data
    alone = prove_kernels(library, [FOUND], [trap])
    assert alone.faults
    assert all(fault.startswith("a trap in ") for fault in alone.faults)
    asked: list[frozenset[str]] = []

    def as_here(names: frozenset[str]) -> dict[str, dict[str, int]]:
        asked.append(names)
        return {name: {"BPT.TRAP": 1} for name in names}

    same = prove_kernels(library, [FOUND], [trap], as_here)
    assert same.faults == ()
    assert set(same.as_released) == set(asked[0])
    real = prove_kernels(library, [FOUND], [trap], lambda names: {n: {"STG.E": 1} for n in names})
    assert real.faults == alone.faults
    none = prove_kernels(library, [FOUND], [trap], lambda _: {})
    assert none.faults == alone.faults


def test_a_missing_kernel_is_named(kernels: Path, tmp_path: Path) -> None:
    other = compiled(tmp_path, arch="120a")
    proof = prove_kernels(linked(tmp_path, [kernels], runtime=True).data, [FOUND], [other])
    assert proof.faults
    assert all(fault.endswith("for sm_120a is missing") for fault in proof.faults)


def test_kernels_for_another_chip_are_named(tmp_path: Path) -> None:
    other = compiled(tmp_path, arch="120a")
    proof = prove_kernels(linked(tmp_path, [other], runtime=True).data, [FOUND], [other])
    assert any(fault.endswith("has no code that SM121 can load") for fault in proof.faults)


def test_kernels_that_the_driver_compiles_count(tmp_path: Path) -> None:
    """Marlin's are such: built for 8.0, with PTX."""
    ptx = compiled(tmp_path, arch="120", code="compute")
    proof = prove_kernels(linked(tmp_path, [ptx], runtime=True).data, [FOUND], [ptx])
    assert proof.faults == ()
    assert (proof.writing, proof.kernels) == (0, {})
    assert proof.from_ptx > 0
    trap = compiled(tmp_path, "-DONLY_1200", arch="121", code="compute")
    proof = prove_kernels(linked(tmp_path, [trap], runtime=True).data, [FOUND], [trap])
    assert proof.faults
    assert all(fault.startswith("a trap in the PTX of ") for fault in proof.faults)
