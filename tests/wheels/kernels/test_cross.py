"""Compiling for the Spark's architecture on another: the library is linked and held as there.

Needs ``aarch64-linux-gnu-g++``; where there is none these tests are not run, and say so.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.states import Target
from builder.applier.trees import DirTree
from builder.common.document import plain
from builder.common.machinecode import read_elf
from builder.compile.build import FLAGS
from builder.compile.extensionwheel import build_extension_wheel
from builder.compile.link import InstalledLibraries, link, toolkit_libraries
from builder.compile.stage import Stages
from builder.compile.toolchain import Toolchain, find_compiler
from tests.compiled.test_extension_wheel_whole import make_request
from tests.documents import validated

from .test_compile import CHANGE
from .test_compile import compiled as command
from .test_compiled import request_of
from .test_toolkit import HERE, SOURCE, device_code

if TYPE_CHECKING:
    from builder.common.pypi import PackageIndex
    from builder.compile.link import Linked
    from builder.compile.toolchain import Compiler

CROSS = "aarch64-linux-gnu-g++"
#: What the base has: a library to call, and an extension.
TORCH = 'extern "C" int offered(void) { return 1; }'
EXTENSION = """\
#include <stdexcept>
#include <vector>
extern "C" int offered(void), cudaFree(void *);
int f() {
  static std::vector<int> once(offered());
  if (once.empty()) throw std::runtime_error("none");
  return cudaFree(0);
}
"""
#: Host code that asks for ``dlsym``, which glibc 2.34 has in a newer version.
HOST = """\
#include <dlfcn.h>
int offered(void);
int nobody_has(void);
void *g(void) { return dlsym(0, "x") + offered() MORE; }
"""
LOAD = """\
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
  if (dlopen(words[count - 1], RTLD_NOW | RTLD_LOCAL)) return 0;
  fputs(dlerror(), stderr);
  return 1;
}
"""
pytestmark = pytest.mark.skipif(
    shutil.which(CROSS) is None or Target.here().platform != "linux/amd64",
    reason=f"NOT RUN: no {CROSS} here, or nothing to cross",
)


@pytest.fixture(scope="module")
def compiler(index: PackageIndex) -> Compiler:
    found = find_compiler(index, "linux/arm64", "wheels")
    found.ready(index)
    return found


def compiled(compiler: Compiler, folder: Path) -> Path:
    target = folder / f"{compiler.host.command}.o"
    words = [str(compiler.nvcc), *compiler.host.words, *FLAGS, "-DCUTLASS_KERNELS", str(SOURCE)]
    words += ["-gencode", "arch=compute_121a,code=sm_121a", "-c", "-o", str(target)]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    return target


def shared(target: Path, text: str, *words: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [CROSS, "-shared", "-fPIC", "-w", f"-Wl,-soname,{target.name}", "-x", "c++", "-"]
    command += ["-x", "none", *words, "-o", str(target)]
    subprocess.run(command, input=text, text=True, check=True)
    return target


def linked(compiler: Compiler, folder: Path, *defines: str) -> Linked:
    """A library for a base of that architecture, out of the kernels and some host code."""
    runtime = toolkit_libraries(compiler.nvcc, compiler.host)
    torch = shared(folder / "site/torch/lib/libc10.so", TORCH)
    needed = ["-lstdc++", "-lm", "-lgcc_s", "-Wl,--no-as-needed", str(runtime / "libcudart.so.13")]
    shared(folder / "site/vllm/_C.abi3.so", EXTENSION, str(torch), *needed)
    host = folder / "host.o"
    words = [CROSS, "-fPIC", "-x", "c", "-", *defines, "-c", "-o", str(host)]
    subprocess.run(words, input=HOST, text=True, check=True)
    base = InstalledLibraries(DirTree(folder / "site"), runtime)
    objects = [compiled(compiler, folder), host]
    cuda = compiler.cuda
    return link(objects, base, "vllm/_C.abi3.so", compiler.nvcc, cuda, compiler.where)


def test_the_device_code_equals_a_native_build(
    index: PackageIndex, compiler: Compiler, tmp_path: Path
) -> None:
    native = find_compiler(index, "linux/amd64", "wheels")
    native.ready(index)
    made = [compiled(one, tmp_path) for one in (compiler, native)]
    assert [machine(path) for path in made] == ["EM_AARCH64", "EM_X86_64"]
    assert device_code(made[0]) == device_code(made[1])


def machine(path: Path) -> str:
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as stream:
        return str(ELFFile(stream)["e_machine"])


def test_the_library_is_checked_against_a_base_of_its_architecture(
    compiler: Compiler, tmp_path: Path
) -> None:
    made = linked(compiler, tmp_path, "-DMORE=")
    assert list(made.proof.faults) == []
    assert made.proof.symbols["libc10.so"] == 1
    assert made.runtime == "shared"
    assert made.older == {"dlsym": "GLIBC_2.17"}, "the oldest of that architecture"
    library = tmp_path / "kernels.so"
    library.write_bytes(made.data)
    assert read_elf(library).machine == "aarch64"
    assert linked(compiler, tmp_path, "-DMORE=").data == made.data


def test_it_loads_under_emulation(compiler: Compiler, tmp_path: Path) -> None:
    """The loader of that architecture binds every symbol at once; without the base it refuses."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("NOT RUN: no qemu-aarch64 here, so nothing of arm64 is run")
    library = tmp_path / "kernels.so"
    library.write_bytes(linked(compiler, tmp_path, "-DMORE=").data)
    program = tmp_path / "load"
    words = [CROSS, "-x", "c", "-", "-o", str(program)]
    subprocess.run(words, input=LOAD, text=True, check=True)
    done = subprocess.run(
        [CROSS, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True
    )
    root = Path(done.stdout.strip()).parents[1]
    runtime = toolkit_libraries(compiler.nvcc, compiler.host)
    command = [qemu, "-L", str(root), str(program), str(library)]
    for folders, code in ((f"{tmp_path}/site/torch/lib:{runtime}", 0), (str(runtime), 1)):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={"QEMU_SET_ENV": f"LD_LIBRARY_PATH={folders}"},
        )
        assert done.returncode == code, done.stderr
    assert "libc10.so" in done.stderr


def test_from_sources_to_a_wheel_for_the_other_architecture(
    index: PackageIndex, compiler: Compiler, tmp_path: Path
) -> None:
    made = []
    for one, machine in ((compiler, "aarch64"), (find_compiler(index, HERE, "wheels"), "x86_64")):
        one.ready(index)
        tools = Toolchain(compiler=one, includes=())
        place = tmp_path / machine
        wheel = build_extension_wheel(make_request(place, place / "cache", tools, machine), place)
        assert wheel.path.name.endswith(f"-py3-none-linux_{machine}.whl")
        made.append(validated("compile-wheel", plain(wheel.report))["companion"])
    cross, native = made
    assert cross["compilers"]["host"].startswith(f"{CROSS} ")
    assert cross["toolkit"] == [plain(pin) for pin in compiler.pins]
    assert cross["kernels"] == native["kernels"]
    assert cross["kernels"]["by_target"] == {"sm_121a": 1}
    assert cross["library_sha256"] != native["library_sha256"]


def test_an_undefined_symbol_is_named(compiler: Compiler, tmp_path: Path) -> None:
    made = linked(compiler, tmp_path, "-DMORE=+nobody_has()")
    assert [fault for fault in made.proof.faults if "nobody_has" in fault]


def test_a_stage_for_the_spark_pins_arm64_inputs(index: PackageIndex) -> None:
    """vLLM 0.20.1: its torch for arm64 is one for CUDA.  Nothing is compiled."""
    target = Target("linux/arm64", "cp312")
    request = request_of(Stages(index, nvcc="wheels"), target, vllm="0.20.1")
    assert request["platform"] == "linux/arm64"
    assert request["compilers"]["host"].startswith(f"{CROSS} ")
    names = {
        pin["distribution"]: pin["filename"].removesuffix(".whl").rpartition("_2_")[2]
        for pin in request["inputs"]
        if pin["member"] == "compiler"
    }
    assert names["nvidia-cuda-nvcc"].endswith("x86_64"), "it runs here"
    assert names["nvidia-nvvm"].endswith("x86_64")
    for part in ("crt", "cccl", "runtime"):
        assert names[f"nvidia-cuda-{part}"].endswith("aarch64"), "it is compiled with"


def test_10_a_cpu_build_of_torch_before_anything_is_compiled(tmp_path: Path) -> None:
    """torch 2.10.0 for arm64 on the package index, which vLLM 0.19.1 takes."""
    words = (*CHANGE, "--platform", "linux/arm64", "--nvcc", "wheels", "-o", str(tmp_path / "out"))
    code, answer = command(*words, what="wheel")
    assert code == 10
    assert (
        "torch 2.10.0 for linux/arm64 on the package index is a CPU" in answer["error"]["message"]
    )
    assert "--base docker://vllm/vllm-openai:v0.19.1" in answer["error"]["hint"]
