"""A small vLLM with CUDA sources: its release as wheel and source archive, and pull requests."""

from __future__ import annotations

import copy
import io
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.forge import LocalForge, Pull, Repository
from tests.unit.compile.test_native import GUARDS, UTILS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.wheels.fakeindex import FakeIndex

RELEASE = "0.19.1"
EXTENSION = b"an extension"
CUTLASS = "csrc/quantization/w8a8/cutlass"
FP8 = f"{CUTLASS}/c3x/scaled_mm_sm120_fp8.cu"
DISPATCH = f"{CUTLASS}/c3x/scaled_mm_sm120_fp8_dispatch.cuh"
ENTRY = f"{CUTLASS}/scaled_mm_entry.cu"
BLOCKWISE = f"{CUTLASS}/c3x/scaled_mm_blockwise_sm120_fp8.cu"
C3X = f"{CUTLASS}/scaled_mm_c3x_sm120.cu"
COMMON = "csrc/cutlass_extensions/common.cpp"
BETWEEN = [ENTRY, C3X, BLOCKWISE, COMMON]


def cuda(name: str, **lines: str) -> str:
    """A source of twelve lines, some of them another's."""
    rows = [lines.get(f"at{n}", f"// {name} {n}") for n in range(12)]
    return "\n".join(rows) + "\n"


GUARDED = "using Kernel = enable_sm120_only<int>;"
FAMILY_LINE = "using Kernel = enable_sm120_family<int>;"
DISPATCHED = cuda("dispatch", at2=GUARDED)
PYTHON = "def kernels():\n    first = 1\n    second = 2\n    return first + second\n"
ROCM = cuda("rocm")
BINDINGS = """\
#include "ops.h"
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("cutlass_scaled_mm(Tensor! out) -> ()");
  ops.impl("cutlass_scaled_mm", torch::kCUDA, &cutlass_scaled_mm);
}
"""
LISTS = f"""\
cmake_minimum_required(VERSION 3.26)
project(vllm_extensions LANGUAGES CXX)
include(${{CMAKE_CURRENT_LIST_DIR}}/cmake/utils.cmake)
find_package(Torch REQUIRED)
clear_arches(CUDA_ARCHS "${{CMAKE_CUDA_FLAGS}}")
set(CUTLASS_REVISION "v4.2.1")
set(SRCS csrc/topk.cu {FP8} {ENTRY} {C3X} {BLOCKWISE})
set(HOST csrc/torch_bindings.cpp {COMMON})
# what is compiled for which chip
foreach(ARCH ${{CUDA_ARCHS}})
  set_gencode_flag_for_srcs(SRCS ${{SRCS}} ARCH compute_${{ARCH}} CODE sm_${{ARCH}})
endforeach()
define_extension_target(_C DESTINATION vllm LANGUAGE CUDA SOURCES ${{SRCS}} ${{HOST}} USE_SABI 3)
target_compile_definitions(_C PRIVATE A=1)
"""
START: dict[str, str | bytes] = {
    "CMakeLists.txt": LISTS,
    "cmake/utils.cmake": UTILS,
    "cmake/hipify.py": "print('for other chips')\n",
    "pyproject.toml": '[build-system]\nrequires = ["torch == 2.10.0"]\n',
    "csrc/torch_bindings.cpp": BINDINGS,
    "csrc/ops.h": cuda("ops"),
    "csrc/topk.cu": '#include "reduce.cuh"\n' + cuda("topk"),
    "csrc/reduce.cuh": cuda("reduce"),
    "csrc/rocm/attention.cu": ROCM,
    "csrc/guards.hpp": GUARDS,
    FP8: f'#include "guards.hpp"\n#include "scaled_mm_sm120_fp8_dispatch.cuh"\n{cuda("fp8")}',
    DISPATCH: DISPATCHED,
    ENTRY: cuda("entry"),
    C3X: cuda("c3x"),
    BLOCKWISE: cuda("blockwise"),
    COMMON: cuda("common"),
    "vllm/__init__.py": "",
    "vllm/envs.py": "environment_variables = {}\n",
    "vllm/kernels.py": PYTHON,
    "tests/test_kernels.py": "def test_kernels(): ...\n",
}

FAMILY, TILE, BOTH, ROCM_ONLY, ROCM_AND_PYTHON, CONFLICT, BACKPORTED = 1, 2, 3, 4, 5, 6, 7
NEW_HEADER, RENAMED, DELETED, NEW_UNIT, DEFINES, REVISION, NEW_OPERATOR = 8, 9, 10, 11, 12, 13, 14
UNKNOWN, COMMENT_ONLY, UPPER, TAKEN_OUT, RUST, ROCM_CONFLICT = 15, 16, 17, 18, 19, 20
PARTLY, BACKPORTED_AND_PYTHON, DECLARATIONS = 21, 22, 23


@dataclass
class CudaWorld:
    """The repository, and its pull requests by number."""

    repository: Repository
    pulls: dict[int, Pull] = field(default_factory=dict)

    def forge(self) -> LocalForge:
        """A forge of its own for one test."""
        forge = LocalForge(self.repository)
        forge.pulls = copy.deepcopy(self.pulls)
        return forge

    def files(self) -> dict[str, bytes]:
        """The installed files of the release."""
        return {
            **self.repository.files(f"v{RELEASE}", "vllm"),
            "vllm/_C.abi3.so": EXTENSION,
        }

    def publish(self, index: FakeIndex) -> None:
        """Put the release on an index: a wheel, and the archive that it was made of."""
        index.add("vllm", RELEASE, self.files())
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for path, data in self.repository.files(f"v{RELEASE}", ".").items():
                info = tarfile.TarInfo(f"vllm-{RELEASE}/{path}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        index.files[f"vllm-{RELEASE}.tar.gz"] = out.getvalue()


def make_cuda_world(folder: Path) -> CudaWorld:
    """Make the history; the same every time."""
    repository = Repository(folder)
    world = CudaWorld(repository)
    repository.commit("before", {**START, BLOCKWISE: cuda("blockwise", at5="// as it was")})
    repository.git("tag", "v0.19.0")
    repository.commit("start", START)
    repository.git("tag", f"v{RELEASE}")

    def pull(
        number: int,
        changes: Mapping[str, str | bytes | None],
        start: str = f"v{RELEASE}",
        base: str = "main",
    ) -> None:
        repository.branch(f"pr-{number}", start)
        head = repository.commit(f"Pull {number}", changes)
        world.pulls[number] = Pull(head=head, title=f"Pull {number}", base=base)

    family = cuda("dispatch", at2=FAMILY_LINE)
    faster: dict[str, str | bytes | None] = {
        "vllm/kernels.py": PYTHON.replace("second = 2", "second = 22")
    }
    pull(FAMILY, {DISPATCH: family})
    pull(TILE, {DISPATCH: cuda("dispatch", at2=GUARDED, at9="// a tile of 64")})
    pull(BOTH, {DISPATCH: family, **faster, "tests/test_kernels.py": "def test_more(): ...\n"})
    rocm, wider = "csrc/rocm/attention.cu", cuda("rocm", at4="// wider")
    pull(ROCM_ONLY, {rocm: wider, "csrc/R.md": "R\n"})
    pull(ROCM_AND_PYTHON, {rocm: wider, **faster})
    there = {BLOCKWISE: cuda("blockwise")}
    pull(BACKPORTED, there, start="v0.19.0", base="old")
    pull(PARTLY, {**there, DISPATCH: family}, start="v0.19.0", base="old")
    pull(BACKPORTED_AND_PYTHON, {**there, **faster}, start="v0.19.0", base="old")
    pull(DECLARATIONS, {"csrc/ops.h": cuda("ops", at4="// one more")})
    tile = f"{CUTLASS}/c3x/tile.cuh"
    tiled = cuda("dispatch", at0='#include "tile.cuh"', at2=FAMILY_LINE)
    pull(NEW_HEADER, {DISPATCH: tiled, tile: cuda("tile")})
    moved = "scaled_mm_dispatch_sm120.cuh"
    unit, name = str(START[FP8]), DISPATCH.rpartition("/")[2]
    renamed = {DISPATCH: None, f"{CUTLASS}/c3x/{moved}": family, FP8: unit.replace(name, moved)}
    pull(RENAMED, renamed)
    pull(DELETED, {DISPATCH: None, FP8: unit.replace(f'#include "{name}"\n', "")})
    lists = LISTS.replace("csrc/topk.cu", "csrc/topk.cu csrc/fresh.cu")
    pull(NEW_UNIT, {"csrc/fresh.cu": cuda("fresh"), "CMakeLists.txt": lists})
    pull(DEFINES, {"CMakeLists.txt": LISTS.replace("PRIVATE A=1", "PRIVATE A=2")})
    pull(REVISION, {"CMakeLists.txt": LISTS.replace("v4.2.1", "v4.4.2")})
    bindings = BINDINGS.replace("}\n", '  ops.def("fresh(Tensor x) -> ()");\n}\n')
    topk = str(START["csrc/topk.cu"]) + "// fresh\n"
    pull(NEW_OPERATOR, {"csrc/torch_bindings.cpp": bindings, "csrc/topk.cu": topk})
    pull(UNKNOWN, {"csrc/reduce.cuh": cuda("reduce", at5="// another order")})
    pull(COMMENT_ONLY, {"CMakeLists.txt": LISTS.replace("# what is", "# exactly what is")})
    upper = cuda("dispatch", at2=FAMILY_LINE.replace("int", "long"))
    pull(UPPER, {DISPATCH: upper}, start=f"pr-{FAMILY}", base=f"pr-{FAMILY}")
    pull(TAKEN_OUT, {"CMakeLists.txt": LISTS.replace("csrc/topk.cu ", ""), "csrc/topk.cu": None})
    pull(RUST, {"rust/lib.rs": "fn main() {}\n", **faster})
    repository.branch("later", f"v{RELEASE}")
    other = cuda("dispatch", at2="using Kernel = something_else;")
    repository.commit("later", {DISPATCH: other, rocm: cuda("rocm", at4="// later")})
    another = cuda("dispatch", at2="using Kernel = yet_another;")
    pull(CONFLICT, {DISPATCH: another, **faster}, start="later", base="later")
    pull(ROCM_CONFLICT, {rocm: wider, **faster}, start="later", base="later")
    repository.git("branch", "old", "v0.19.0")
    return world
