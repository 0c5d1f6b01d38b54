"""The level ``binaries`` on modules that nvcc builds here: real machine code, real tools.

Needs ``nvcc`` 12.9 or later (family code); where there is none these tests are not run, and say so.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.proof.binaries import check_binaries
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    FakeRunner,
    dist_files,
    fake_base,
    make_plan_of,
    subject_of,
    vllm_files,
    write_tree,
)
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.proof.checks import Check

SOURCE = Path(__file__).with_name("prebuilt.cu")
MODULE = "vllm/_C_stable_libtorch.abi3.so"
LINES = {
    "cutlass": (
        "Using CutlassNvFp4LinearKernel for NVFP4 GEMM",
        "Using 'VLLM_CUTLASS' NvFp4 MoE backend",
    ),
    "marlin": ("Using MarlinNvFp4LinearKernel for NVFP4 GEMM",),
}
FP8, GEMM = "FP8 per-tensor GEMM (CUTLASS)", "NVFP4 GEMM (CUTLASS)"
GROUPED, QUANT = "NVFP4 grouped GEMM for experts (CUTLASS)", "NVFP4 quantisation of activations"
CUTLASS = {FP8, GEMM, GROUPED, QUANT}
MARLIN, REPACK = "NVFP4 GEMM (Marlin)", "Marlin weight repacking"


@pytest.fixture(scope="module")
def nvcc() -> str:
    """The compiler; without it nothing here is run."""
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        pytest.skip("NOT RUN: no nvcc on this machine, so no module can be built to look at")
    return found


@pytest.fixture
def checks(nvcc: str, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """Build a module, put it into a site-packages, and verify that."""

    def build_and_check(kernels: str, *codes: str, only_1200: bool = False) -> dict[str, Check]:
        site = write_tree(tmp_path / "site", vllm_files())
        command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", str(SOURCE)]
        command += ["-o", str(site / MODULE), f"-D{kernels.upper()}_KERNELS"]
        command += ["-DONLY_1200"] if only_1200 else []
        for code in codes:
            virtual = code.replace("sm_", "compute_")
            command += ["-gencode", f"arch={virtual},code={code}"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        plan = make_plan_of(fake_base(dist_files("vllm", "0.20.1", {})))
        lines = [{"kind": "any", "line": line} for line in LINES[kernels]]
        target = VerifyTarget(
            name="built",
            subject=subject_of(DirTree(site), "dir"),
            plan=planned(plan, expect=lines),
            layers=(),
            runner=FakeRunner(),
        )
        return {check.name: check for check in check_binaries(target)}

    return build_and_check


def failed(found: dict[str, Check]) -> set[str]:
    """Names of the checks that failed; none may be left out."""
    assert {c.status for c in found.values()} <= {"pass", "fail"}, found
    return {name for name, check in found.items() if check.status == "fail"}


def test_family_code_for_12_0_runs_on_sm121(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "sm_120f", "sm_90a")
    assert failed(found) == set()
    assert found[FP8].seen == (
        "1 kernel: 1 native (sm_120f); 1 x QMMA.16832.F32.E4M3.E4M3; no BPT.TRAP"
    )
    assert found[GEMM].figures == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 1}
    assert found[QUANT].figures == {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 1}
    assert found[MODULE].seen == (
        "machine code for sm_90a x1, sm_120f x1; PTX for nothing; of 4 kernels SM121 runs 4 "
        "natively, 0 compiled by the driver from PTX, 0 not at all"
    )


def test_code_for_12_1_only_runs_on_sm121(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "sm_121a")
    assert failed(found) == set()
    assert "1 native (sm_121a)" in found[GROUPED].seen


def test_code_for_12_0_only_does_not_load(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "sm_120a")
    assert failed(found) == {*CUTLASS, MODULE}
    for name in CUTLASS:
        assert found[name].seen == "1 kernel: 1 not loadable (sm_120a)"
        assert found[name].reason.startswith("needs a rebuild: SM121 loads none of sm_120a; ")


def test_a_build_for_12_1_with_the_old_guard_traps(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "sm_121a", only_1200=True)
    assert failed(found) == {FP8}
    assert found[FP8].seen == "1 kernel: 1 native (sm_121a); 1 x BPT.TRAP"
    assert found[FP8].reason.startswith("needs a rebuild: only a trap in 1 of 1; ")
    assert "enable_sm120_only admits 12.0 alone" in found[FP8].reason


def test_a_build_for_plain_12_1_has_no_fp4(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "sm_121")
    assert failed(found) == {GEMM, GROUPED, QUANT}
    assert "nothing of the kind in 1 of 1" in found[QUANT].reason


def test_ptx_of_the_family_is_compiled_by_the_driver(
    checks: Callable[..., dict[str, Check]],
) -> None:
    found = checks("cutlass", "compute_120f")
    assert failed(found) == set()
    assert "1 compiled by the driver from PTX (sm_120f)" in found[GEMM].seen
    assert list(found[QUANT].figures) == ["cvt.rn.satfinite.e2m1x2.f32"]


def test_ptx_of_another_chip_is_not_compiled(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("cutlass", "compute_120a")
    assert failed(found) == {*CUTLASS, MODULE}
    assert found[MODULE].seen.startswith("machine code for nothing; PTX for sm_120a x1; of 4 ")


def test_marlin_for_8_0_runs_only_from_its_ptx(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("marlin", "sm_80", "compute_80")
    assert failed(found) == set()
    assert found[MARLIN].seen == (
        "1 kernel: 1 compiled by the driver from PTX (sm_80); "
        "1 x mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32; no BPT.TRAP"
    )
    assert failed(checks("marlin", "sm_80")) == {MARLIN, REPACK, MODULE}


def test_marlin_for_12_0_is_native(checks: Callable[..., dict[str, Check]]) -> None:
    found = checks("marlin", "sm_120", "compute_80")
    assert failed(found) == set()
    assert found[MARLIN].seen == (
        "1 kernel: 1 native (sm_120); 1 x HMMA.16816.F32.BF16; no BPT.TRAP"
    )
