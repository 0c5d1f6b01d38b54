"""``build_extension_wheel`` from sources to wheel, on a tiny release; nothing is mocked.

Needs ``nvcc``; where there is none these tests are not run, and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.common.document import plain
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.compile.changes import SourceChange
from builder.compile.executor import compiler_versions, find_nvcc
from builder.compile.extensionwheel import WheelRequest, build_extension_wheel
from builder.compile.link import DISTRIBUTIONS, InstalledLibraries
from builder.compile.operators import load_operators
from builder.compile.plans import plan_wheel
from builder.compile.sources import SourceTree
from builder.compile.toolchain import Compiler, Toolchain
from builder.errors import Exit, SparkBuildError, UsageError
from builder.images.bases.identify import identify
from builder.images.subject import BaseRequest
from tests.documents import validated
from tests.unit.imagefiles import (
    CONFIG,
    folder,
    packed,
    put_image,
    python_items,
    site_items,
    tar_of,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so no extension wheel is built here"
)

LISTS = """
cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES CXX)
include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
set(SRCS csrc/entry.cu csrc/kernel_sm120.cu csrc/host.cpp)
set_gencode_flag_for_srcs(SRCS csrc/entry.cu csrc/kernel_sm120.cu ARCH compute_121a CODE sm_121a)
define_extension_target(_C DESTINATION vllm LANGUAGE CUDA SOURCES ${SRCS})
"""
KERNEL = """
#include "guard.cuh"
__global__ void tiny_kernel(float* out, const unsigned* in) {
#if defined(__CUDA_ARCH__) && ADMITTED(__CUDA_ARCH__)
  float c[4] = {};
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3},{%4,%4,%4,%4},{%4,%4},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(in[0]));
  out[0] = c[0] + c[1] + c[2] + c[3];
#else
  asm volatile("trap;");
#endif
}
int run_kernel(int x) { tiny_kernel<<<1, 1>>>(nullptr, nullptr); return x; }
"""
FILES = {
    "CMakeLists.txt": LISTS,
    "cmake/utils.cmake": "# the probe has its own\n",
    "csrc/guard.cuh": "#define ADMITTED(arch) (arch == 1200)\n",
    "csrc/kernel_sm120.cu": KERNEL,
    "csrc/entry.cu": (
        "int run_kernel(int); int from_torch(); int of_host();\n"
        "int answer(int x) { return run_kernel(x) + from_torch() + of_host(); }\n"
    ),
    "csrc/host.cpp": "int of_host() { return 2; }\n",
}
#: As much of torch's headers as a registration needs.
LIBRARY_H = """
#pragma once
struct Registrar {
  const char* place;
  void def(const char*);  // nowhere: an extension wheel defines no operator
  template <class F> void impl(const char*, F* f) {
    volatile auto kept = f;
    volatile auto at = place;
  }
};
#define TORCH_LIBRARY_FRAGMENT(library, m) TORCH_LIBRARY_IMPL(library, any, m)
#define TORCH_LIBRARY_IMPL(library, key, m) REGISTERS(__COUNTER__, m)
#define REGISTERS(number, m) REGISTERS_AS(number, m)
#define REGISTERS_AS(number, m)                                                    \\
  static void registers##number(Registrar& m);                                     \\
  static const bool registered##number =                                           \\
      [] { Registrar r{__FILE__}; registers##number(r); return true; }();          \\
  static void registers##number(Registrar& m)
"""
#: As the release's: it needs torch, the CUDA runtime and the C++ library.
EXTENSION = """
int from_torch();
extern "C" int cudaFree(void*);
int f() { try { throw from_torch(); } catch (int x) { return x + cudaFree(nullptr); } }
"""
OPERATOR = replace(
    load_operators()[0],
    name="_C::answer",
    rebuilt=("/kernel_sm120.cu",),
    units=("/entry.cu", "/host.cpp"),
    defines=(),
    header="torch/library.h",
    declaration="int answer(int x);",
    function="answer",
    kernels="tiny_kernel",
)
CURE = {"csrc/guard.cuh": b"#define ADMITTED(arch) (arch >= 1200 && arch < 1300)\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache: what is the same is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def request_of(tmp_path: Path, objects: Path, monkeypatch: pytest.MonkeyPatch) -> WheelRequest:
    """A request of everything that an extension wheel is made of, with the cure as its change."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(objects))
    nvcc, cuda = find_nvcc()
    compiler = Compiler(nvcc=nvcc, cuda=cuda, versions=compiler_versions(nvcc))
    return make_request(tmp_path, objects, Toolchain(compiler=compiler, includes=()))


def make_request(
    place: Path, cache: Path, tools: Toolchain, machine: str = os.uname().machine
) -> WheelRequest:
    """Sources, headers, and a base for a machine, made with the host compiler of ``tools``."""
    source = write(place / "source", FILES)
    versions = "".join(
        f"#define TORCH_VERSION_{name} {value}\n"
        for name, value in (("MAJOR", 2), ("MINOR", 10), ("PATCH", 0))
    )
    headers = {"torch/library.h": LIBRARY_H, "torch/headeronly/version.h": versions}
    include = write(cache / "include", headers)
    site = write(
        place / "site",
        {
            "vllm-1.0.dist-info/METADATA": "Name: vllm\nVersion: 1.0+cu130\n",
            "vllm-1.0.dist-info/WHEEL": f"Tag: cp38-abi3-linux_{machine}\n",
            "vllm-1.0.dist-info/RECORD": (
                "vllm/_C.abi3.so,,\nvllm-1.0.dist-info/METADATA,,\nvllm-1.0.dist-info/RECORD,,\n"
            ),
            "torch-2.10.0.dist-info/RECORD": (
                "torch/lib/libc10.so,,\ntorch-2.10.0.dist-info/METADATA,,\n"
            ),
            "torch-2.10.0.dist-info/METADATA": "Name: torch\nVersion: 2.10.0+cu130\n",
        },
    )
    toolkit = tools.compiler.libraries
    command, torch = tools.compiler.host.command, site / "torch/lib/libc10.so"
    shared(torch, "int from_torch() { return 1; }", command=command)
    runtime = toolkit / f"libcudart.so.{tools.compiler.cuda.partition('.')[0]}"
    shared(site / "vllm/_C.abi3.so", EXTENSION, str(torch), str(runtime), command=command)
    return WheelRequest(
        source=SourceTree(root=source, version="1.0", sha256="0" * 64, edited=True),
        change=SourceChange(name="cure", texts=CURE),
        arch_list="12.1a",
        tools=replace(tools, includes=(include,)),
        base=InstalledLibraries(DirTree(site), toolkit),
        operators=(OPERATOR,),
    )


def shared(target: Path, text: str, *words: str, command: str = "g++") -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    start = [command, "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-x", "c++", "-"]
    done = [*start, "-x", "none", *words, "-o", str(target)]
    subprocess.run(done, input=text, text=True, check=True)


def test_from_sources_to_the_same_wheel_twice(request_of: WheelRequest, tmp_path: Path) -> None:
    made = build_extension_wheel(request_of, tmp_path / "out")
    report = validated("compile-wheel", plain(made.report))
    assert report["companion"]["cuda_runtime"] == "shared"
    assert report["companion"]["kernels"]["by_target"] == {"sm_121a": 1}
    assert report["abi"]["symbols"]["libc10.so"] == 1
    first = made.path.read_bytes()
    with zipfile.ZipFile(made.path) as archive:
        assert archive.testzip() is None
        (name,) = [name for name in archive.namelist() if name.endswith("kernels.so")]
        library = archive.read(name)
    assert str(tmp_path.parent).encode() not in library, "a path of this machine"
    assert b"spark-build/cure/1.0" in library, "what torch shows as the place of registration"
    again = build_extension_wheel(request_of, tmp_path / "again")
    assert again.path.read_bytes() == first
    assert again.path.name == made.path.name


def test_an_image_works_as_a_base(request_of: WheelRequest, tmp_path: Path) -> None:
    site = tmp_path / "site"
    files = {
        path.relative_to(site).as_posix(): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file()
    }
    layers = [packed(tar_of(folder("opt/"), *python_items())), packed(tar_of(*site_items(files)))]
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    put_image(tmp_path / "image", *layers, architecture=architecture, config=CONFIG)
    ref = f"oci:{tmp_path / 'image'}"
    found = identify(
        BaseRequest(ref=Ref(ref), pins={}, index=PackageIndex(), tracked=DISTRIBUTIONS)
    )
    base = InstalledLibraries(found.tree, request_of.tools.compiler.libraries)
    made = build_extension_wheel(replace(request_of, base=base), tmp_path / "image-out")
    found.close()
    assert (
        made.path.read_bytes()
        == build_extension_wheel(request_of, tmp_path / "out").path.read_bytes()
    )


def test_an_ineffective_change_is_found_in_the_machine_code(
    request_of: WheelRequest, tmp_path: Path
) -> None:
    wrong = SourceChange(
        name="wrong", texts={"csrc/guard.cuh": b"#define ADMITTED(a) (a == 1000)\n"}
    )
    with pytest.raises(SparkBuildError, match="no QMMA in _Z11tiny_kernel") as caught:
        build_extension_wheel(replace(request_of, change=wrong), tmp_path / "out")
    assert caught.value.code == Exit.VERIFY_FAILED
    assert not (tmp_path / "out").exists()


def test_a_symbol_that_the_base_lacks_is_an_error(request_of: WheelRequest, tmp_path: Path) -> None:
    shared(tmp_path / "site/torch/lib/libc10.so", "int other() { return 1; }")
    with pytest.raises(SparkBuildError, match="it uses _Z10from_torchv, which no") as caught:
        build_extension_wheel(request_of, tmp_path / "out")
    assert caught.value.code == Exit.VERIFY_FAILED
    assert not (tmp_path / "out").exists()


def test_sources_of_another_release_are_refused(request_of: WheelRequest, tmp_path: Path) -> None:
    other = replace(request_of.source, version="1.1")
    with pytest.raises(
        UsageError, match=r"the base has vllm 1\.0, but the sources are those of 1\.1"
    ):
        build_extension_wheel(replace(request_of, source=other), tmp_path / "out")


def test_a_change_that_is_already_applied_compiles_nothing(request_of: WheelRequest) -> None:
    empty = SourceChange(name="cure", texts={}, upstream="0.9")
    with pytest.raises(SparkBuildError, match=r"upstream since 0\.9") as caught:
        plan_wheel(request_of.source, empty, "12.1a", "13.0", (OPERATOR,))
    assert caught.value.code == Exit.NOTHING_TO_DO


def test_a_unit_without_a_known_operator_reports_the_cost_of_a_full_build(
    request_of: WheelRequest,
) -> None:
    with pytest.raises(SparkBuildError) as caught:
        plan_wheel(request_of.source, request_of.change, "12.1a", "13.0")
    assert caught.value.code == Exit.NEEDS_REBUILD
    assert "which torch operator" in str(caught.value)
    assert "all of _C has to be compiled, not 1 of 3 units: 3 units" in str(caught.value)
    assert "from its sources" in caught.value.hint


# ------------------------------------------------------- the operator is found in the sources alone

FOUND = {
    "CMakeLists.txt": LISTS.replace("csrc/host.cpp", "csrc/host.cpp csrc/torch_bindings.cpp"),
    "csrc/ops.h": "#pragma once\nint answer(int x);\n",
    "csrc/torch_bindings.cpp": (
        '#include <torch/library.h>\n#include "ops.h"\n'
        'TORCH_LIBRARY(_C, m) { m.def("answer(int x) -> int"); '
        'm.impl("answer", torch::kCUDA, &answer); }\n'
    ),
    "csrc/entry.cu": '#include "ops.h"\n' + FILES["csrc/entry.cu"],
}


def found(request: WheelRequest, **files: str) -> WheelRequest:
    """The same request, of sources that say which operator it is."""
    write(request.source.root, {**FOUND, **{f"csrc/{k}.cu": text for k, text in files.items()}})
    return replace(request, operators=())


def test_an_operator_that_no_table_lists_is_registered_again(
    request_of: WheelRequest, tmp_path: Path
) -> None:
    request = found(request_of)
    plan = plan_wheel(request.source, request.change, "12.1a", "13.0")
    assert [unit.path for unit in plan.siblings] == ["csrc/entry.cu", "csrc/host.cpp"]
    made = build_extension_wheel(request, tmp_path / "out")
    about = validated("compile-wheel", plain(made.report))["companion"]
    assert about["operators"] == [{"name": "_C::answer", "key": "CUDA"}]
    assert about["kernels"]["by_target"] == {"sm_121a": 1}
    assert (about["kernels"]["writing"], about["kernels"]["as_released"]) == (1, [])


@pytest.mark.parametrize(
    ("stub", "said"),
    [('asm volatile("trap;");', "a trap in"), ("(void)out;", "nothing is written to memory by")],
)
def test_an_empty_kernel_is_an_error(
    request_of: WheelRequest, tmp_path: Path, stub: str, said: str
) -> None:
    request = found(request_of, kernel_sm120=KERNEL.replace('asm volatile("trap;");', stub))
    wrong = SourceChange(
        name="wrong", texts={"csrc/guard.cuh": b"#define ADMITTED(a) (a == 1000)\n"}
    )
    with pytest.raises(SparkBuildError, match=f"{said} _Z11tiny_kernel") as caught:
        build_extension_wheel(replace(request, change=wrong), tmp_path / "out")
    assert caught.value.code == Exit.VERIFY_FAILED
    assert not (tmp_path / "out").exists()


def test_a_unit_that_only_the_linker_needs_is_compiled_too(
    request_of: WheelRequest, tmp_path: Path
) -> None:
    """A macro declares the function: the sources do not say it, the linker does."""
    hidden = "#define DECLARE(name) int name()\nDECLARE(of_host);\n"
    text = FOUND["csrc/entry.cu"].replace(" int of_host();", "\n" + hidden)
    request = found(request_of, entry=text)
    plan = plan_wheel(request.source, request.change, "12.1a", "13.0")
    assert [unit.path for unit in plan.siblings] == ["csrc/entry.cu"]
    made = build_extension_wheel(request, tmp_path / "out")
    assert "csrc/host.cpp" in made.report.companion.units


def test_a_unit_that_registers_its_operator_itself(
    request_of: WheelRequest, tmp_path: Path
) -> None:
    """It would define the operator a second time, which torch refuses; that is left out."""
    own = (
        "#include <torch/library.h>\nstatic int own(int x) { return run_kernel(x); }\n"
        'TORCH_LIBRARY_FRAGMENT(_C, m) {\n  m.def("own(int x) -> int");\n}\n'
        'TORCH_LIBRARY_IMPL(_C, CUDA, m) {\n  m.impl("own", &own);\n}\n'
    )
    request = found(request_of, kernel_sm120=KERNEL + own)
    made = build_extension_wheel(request, tmp_path / "out")
    names = [operator.name for operator in made.report.companion.operators]
    assert names == ["_C::own", "_C::answer"]
    with zipfile.ZipFile(made.path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("kernels.so")]
        library = archive.read(name)
    assert b"spark-build/cure/1.0" in library
    assert b"own(int x) -> int" not in library
