"""A released kernel compiled for SM121 as it is, and with the change: a trap, and real code.

Needs nvcc 13; where it is not there the tests are not run, and say so.
"""

from __future__ import annotations

import json
import platform
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.wheels.cli import called

UNIT = "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"
pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so no kernel is compiled here"
)


def compiled(*words: str, what: str = "run") -> tuple[int, dict[str, Any]]:
    """What ``compile`` says; in this process, which reads a release's build files once."""
    ran = called("compile", what, *words, "--json", cwd=Path.cwd())
    return ran.code, ran.json()


def test_every_released_kernel_is_a_trap() -> None:
    code, answer = compiled("--vllm", "0.19.1", "--unit", UNIT)
    assert code == 5
    assert "every kernel is a trap" in answer["error"]["message"]


def test_the_family_change_gives_real_code() -> None:
    code, answer = compiled("--vllm", "0.19.1", "--change", "sm120-family")
    assert code == 0
    (unit,) = answer["units"]
    assert unit["path"] == UNIT
    (cubin,) = unit["code"]
    assert cubin == {"target": "sm_121a", "tensor": {"QMMA.16832.F32.E4M3.E4M3": 1024}, "traps": 0}


CHANGE = ("--vllm", "0.19.1", "--change", "sm120-family")


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="NOT RUN: arm64's torch 2.10 has no CUDA"
)
def test_the_same_object_becomes_an_extension_wheel(tmp_path: Path) -> None:
    """Held against the released wheels: every symbol is there, every kernel is real."""
    code, answer = compiled(*CHANGE, "-o", str(tmp_path), what="wheel")
    assert code == 0, answer
    about, abi = answer["companion"], answer["abi"]
    assert about["kernels"] == {
        "by_target": {"sm_121a": 20},
        "instructions": {"QMMA.16832.F32.E4M3.E4M3": 1536},
    }
    assert about["cuda_runtime"] == "static", "the released 0.19.1 is of CUDA 12"
    assert about["capabilities"] == [[12, 1]]
    assert not abi["faults"]
    assert {"libc10.so", "libc10_cuda.so", "libtorch_cpu.so"} <= set(abi["symbols"])
    assert not [name for name in abi["needed"] if "cudart" in name or "python" in name]
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith("/kernels.so")]
        named = json.loads(archive.read(library.replace("kernels.so", "companion.json")))
    assert named == about
    first = wheel.read_bytes()
    wheel.unlink()
    assert compiled(*CHANGE, "-o", str(tmp_path), what="wheel")[0] == 0
    assert wheel.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--vllm", "0.22.1", "--change", "sm120-family"), 3, "upstream since 0.22.0"),
        ((*CHANGE, "--cuda", "11.8"), 6, "but --cuda says 11.8"),
        (("--vllm", "0.19.1"), 2, "--change or --patch"),
    ],
)
def test_an_impossible_extension_wheel_is_refused(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    found, answer = compiled(*words, "-o", str(tmp_path / "out"), what="wheel")
    assert found == code
    assert said in answer["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_an_unwritable_wheel_is_refused_before_compiling(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, answer = compiled(*CHANGE, "-o", str(file / "below"), what="wheel")
    assert code == 2
    assert f"{file} is a file" in answer["error"]["message"]


SAMPLER = (
    "--- a/csrc/sampler.cu\n+++ b/csrc/sampler.cu\n@@ -1,1 +1,1 @@\n"
    '-#include "dispatch_utils.h"\n+#include "./dispatch_utils.h"\n'
)
MARLIN = (
    "--- a/csrc/moe/marlin_moe_wna16/kernel.h\n+++ b/csrc/moe/marlin_moe_wna16/kernel.h\n"
    "@@ -2,1 +2,2 @@\n+// changed\n #ifndef MARLIN_NAMESPACE_NAME\n"
)


def test_operators_behind_a_patch_are_found_in_the_sources(tmp_path: Path) -> None:
    patch = tmp_path / "other.diff"
    patch.write_text(SAMPLER)
    words = ("--vllm", "0.19.1", "--patch", str(patch), "--dry-run")
    code, answer = compiled(*words, what="wheel")
    assert code == 0
    assert [unit["path"] for unit in answer["rebuild"]] == ["csrc/sampler.cu"]
    assert answer["between"] == []
    assert answer["operators"] == [
        "_C::apply_repetition_penalties_",
        "_C::top_k_per_row_prefill",
        "_C::top_k_per_row_decode",
    ]


def test_a_patch_that_affects_most_of_an_extension_is_refused(tmp_path: Path) -> None:
    patch = tmp_path / "other.diff"
    patch.write_text(MARLIN)
    words = ("--vllm", "0.19.1", "--patch", str(patch), "--dry-run")
    code, answer = compiled(*words, what="wheel")
    assert code == 10
    assert "15 of the 24 units of _moe_C would be compiled" in answer["error"]["message"]
    assert "all of _moe_C has to be compiled, not 15 of 89" in answer["error"]["message"]


def test_headers_of_another_torch_are_refused(tmp_path: Path) -> None:
    """What is compiled with newer headers may need symbols that the base's torch has not."""
    headers = tmp_path / "torch" / "include"
    (headers / "torch" / "csrc").mkdir(parents=True)
    (headers / "torch" / "headeronly").mkdir()
    rows = {"MAJOR": 2, "MINOR": 13, "PATCH": 0}
    text = "".join(f"#define TORCH_VERSION_{name} {value}\n" for name, value in rows.items())
    (headers / "torch" / "headeronly" / "version.h").write_text(text)
    code, answer = compiled(*CHANGE, "--torch", str(tmp_path), "-o", str(tmp_path), what="wheel")
    assert code == 2
    assert "has torch 2.10.0, but the headers are those of 2.13.0" in answer["error"]["message"]


@pytest.mark.parametrize(("release", "code"), [("0.22.1", 3), ("0.20.1", 0)])
def test_dry_run_says_what_would_be_compiled(release: str, code: int) -> None:
    """0.22.0 brought the change; before it, one unit is compiled again."""
    words = ("--vllm", release, "--change", "sm120-family", "--dry-run")
    found, answer = compiled(*words)
    assert found == code
    if code == 0:
        assert len(answer["rebuild"]) == 1
