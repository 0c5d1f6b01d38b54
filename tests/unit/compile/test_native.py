"""What a build makes of its sources, on a small source tree of our own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from builder.applier.values import ApplyError
from builder.compile import sources as units
from builder.compile.changes import named_change, patched
from builder.compile.costs import cost_of_units
from builder.compile.plans import runs_on_gb10
from builder.compile.sources import Sources, SourceTree, Unit, dead_guards, gencode_flags, lets_run
from builder.errors import EngineError, SparkBuildError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

LISTS = """
cmake_minimum_required(VERSION 9.0)
project(tiny LANGUAGES CXX)
include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
find_package(Torch REQUIRED)
clear_arches(CUDA_ARCHS "${CMAKE_CUDA_FLAGS}")
file(MAKE_DIRECTORY csrc/made)
file(WRITE csrc/made/made.cu "#include \\"../a.cuh\\"")
set(SRCS csrc/a_sm120.cu csrc/b.cpp csrc/made/made.cu)
foreach(ARCH ${CUDA_ARCHS})
  set_gencode_flag_for_srcs(SRCS csrc/a_sm120.cu ARCH compute_${ARCH} CODE sm_${ARCH})
endforeach()
define_extension_target(_C DESTINATION tiny LANGUAGE CUDA SOURCES ${SRCS} LIBRARIES z USE_SABI 3)
target_compile_definitions(_C PRIVATE A=1)
"""
UTILS = """
function(clear_arches OUT FLAGS)
  string(REGEX MATCHALL "compute_[0-9]+[af]?" FOUND "${FLAGS}")
  string(REPLACE "compute_" "" FOUND "${FOUND}")
  list(REMOVE_DUPLICATES FOUND)
  set(${OUT} ${FOUND} PARENT_SCOPE)
endfunction()
function(define_extension_target)
  message(FATAL_ERROR "the probe must take my place")
endfunction()
"""
GUARDS = """
template <typename Kernel>
struct enable_sm120_only : Kernel {
  void operator()() {
#if defined __CUDA_ARCH__
  #if __CUDA_ARCH__ == 1200
    Kernel::operator()();
  #else
    asm("trap;");
  #endif
#endif
  }
};
template <typename Kernel>
struct enable_sm120_family : Kernel {
  void operator()() {
#if defined __CUDA_ARCH__ && (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300)
    Kernel::operator()();
#endif
  }
};
"""


@pytest.fixture
def source(tmp_path: Path) -> SourceTree:
    root = tmp_path / "tiny"
    (root / "csrc" / "sub").mkdir(parents=True)
    (root / "cmake").mkdir()
    files = {
        "CMakeLists.txt": LISTS,
        "cmake/utils.cmake": UTILS,
        "csrc/a_sm120.cu": '#include "sub/guards.hpp"\n#include "a.cuh"\n',
        "csrc/a.cuh": "using K = enable_sm120_only<int>;\n",
        "csrc/b.cpp": "# include <sub/../c.h>\n",
        "csrc/c.h": '#include "c.h"\n',
        "csrc/sub/guards.hpp": GUARDS,
    }
    for name, text in files.items():
        (root / name).write_text(text)
    return SourceTree(root=root, version="1.0")


def test_guards_are_read_with_their_conditions(source: SourceTree) -> None:
    sources = Sources(source.root)
    assert sources.guards["enable_sm120_only"] == "__CUDA_ARCH__ == 1200"
    assert "1300" in sources.guards["enable_sm120_family"]
    unit = Unit(path="csrc/a_sm120.cu", extension="_C", gencodes=(("compute_120f", "sm_120f"),))
    assert dead_guards(sources, unit) == {}


@pytest.mark.parametrize(
    ("condition", "arch", "runs"),
    [
        ("__CUDA_ARCH__ == 1200", 1200, True),
        ("__CUDA_ARCH__ == 1200", 1210, False),
        ("defined __CUDA_ARCH__ && (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300)", 1210, True),
        ("defined __CUDA_ARCH__ && (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300)", 1300, False),
    ],
)
def test_conditions(condition: str, arch: int, runs: bool) -> None:
    assert lets_run(condition, arch) is runs


@pytest.mark.parametrize(
    ("real", "loads"),
    [
        ("sm_121a", True), ("sm_121", True), ("sm_120", True), ("sm_120f", True),
        ("sm_120a", False), ("sm_100f", False), ("sm_90", False), ("sm_110", False),
        ("compute_80", True), ("compute_120", True), ("compute_120f", True),
        ("compute_120a", False), ("compute_90a", False), ("compute_100f", False),
    ],
)  # fmt: skip
def test_code_that_loads_on_the_chip(real: str, loads: bool) -> None:
    assert runs_on_gb10(real) is loads


def test_gencode_flags_match_torch() -> None:
    assert gencode_flags("8.0 12.1a") == (
        "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_121a,code=sm_121a"
    )
    assert gencode_flags("9.0+PTX").endswith("code=compute_90")


@pytest.mark.parametrize("text", ["", "12.x", "sm_121a", "12.1b", "12.1a,12.0"])
def test_a_wrong_architecture_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="architecture list"):
        gencode_flags(text)


def test_without_cmake_the_hint_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(EngineError) as failed:
        units.cmake_program()
    assert isinstance(failed.value, SparkBuildError)
    assert "pip install" in failed.value.hint


@pytest.fixture
def kernels(source: SourceTree) -> Sources:
    folder = source.root / "csrc" / "c3x"
    folder.mkdir()
    (folder / "scaled_mm.cuh").write_text("enable_sm120_only<K>\nenable_sm90_or_later<K>\n")
    (folder / "scaled_mm_sm120_fp8_dispatch.cuh").write_text("enable_sm120_only<K>\n")
    return Sources(source.root)


def test_a_known_change_touches_its_files_only(kernels: Sources) -> None:
    change = named_change(kernels, "sm120-family")
    assert set(change.texts) == {
        "csrc/c3x/scaled_mm.cuh",
        "csrc/c3x/scaled_mm_sm120_fp8_dispatch.cuh",
    }
    text = change.texts["csrc/c3x/scaled_mm.cuh"]
    assert text == b"enable_sm120_family<K>\nenable_sm90_or_later<K>\n"


def test_an_applied_change_does_nothing(kernels: Sources) -> None:
    for path, text in named_change(kernels, "sm120-family").texts.items():
        (kernels.root / path).write_bytes(text)
    change = named_change(Sources(kernels.root), "sm120-family")
    assert change.texts == {}
    assert change.upstream == "0.22.0"


def test_a_source_tree_without_the_text_is_drift(source: SourceTree) -> None:
    with pytest.raises(SparkBuildError) as failed:
        named_change(Sources(source.root), "sm120-family")
    assert failed.value.code == 4


def test_an_unknown_change_is_refused(kernels: Sources) -> None:
    with pytest.raises(UsageError, match="did you mean 'sm120-family'"):
        named_change(kernels, "sm120family")


DIFF = """--- a/csrc/b.cpp
+++ b/csrc/b.cpp
@@ -1 +1,2 @@
 # include <sub/../c.h>
+int added;
"""


@pytest.mark.parametrize(
    ("diff", "code"),
    [
        (DIFF, 0),
        (DIFF.replace("sub/../c.h", "sub/c.h"), 4),
        (DIFF.replace("b.cpp", "none.cpp"), 2),
        ("not a diff", 2),
    ],
)
def test_a_diff_must_match_exactly(
    source: SourceTree, tmp_path: Path, diff: str, code: int
) -> None:
    patch = tmp_path / "my.diff"
    patch.write_text(diff)
    if code == 0:
        assert b"int added;" in patched(Sources(source.root), patch).texts["csrc/b.cpp"]
        return
    with pytest.raises((SparkBuildError, ApplyError)) as failed:
        patched(Sources(source.root), patch)
    assert vars(failed.value)["code"] == code


def unit_named(name: str) -> Unit:
    return Unit(path=f"csrc/{name}", extension="_C", gencodes=(("compute_121a", "sm_121a"),))


@pytest.mark.parametrize(
    ("memory", "cores", "jobs"), [(100.0, 2, 2), (100.0, 20, 3), (10.0, 20, 1), (1.0, 8, 1)]
)
def test_memory_limits_parallel_units(memory: float, cores: int, jobs: int) -> None:
    units = [unit_named("scaled_mm_sm120_fp8.cu"), unit_named("a.cu"), unit_named("b.cu")]
    assert cost_of_units([unit.path for unit in units], memory, cores=cores).jobs == jobs
