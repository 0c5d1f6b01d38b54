"""Level ``binaries`` on released wheels: which of their kernels run on SM121, and which do not.

Needs ``cuobjdump`` and ``nvdisasm``, which spark-build installs; without them these
tests fail: nothing here is skipped.  Modules are read out of the wheels once (280 MB for all of
this); their summaries stay in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.pypi import PackageIndex
from builder.layers.pinned import IndexSources
from builder.proof.binaries import check_binaries
from builder.proof.opening import target_of_plan

from .cli import spark_build
from .support import Planner

if TYPE_CHECKING:
    from pathlib import Path

    from builder.proof.checks import Check

STABLE, OLD = "vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so"
FP8, GEMM = "FP8 per-tensor GEMM (CUTLASS)", "NVFP4 GEMM (CUTLASS)"
BLOCK = "FP8 block GEMM (CUTLASS)"
GROUPED, QUANT = "NVFP4 grouped GEMM for experts (CUTLASS)", "NVFP4 quantisation of activations"
MARLIN, REPACK = "NVFP4 GEMM (Marlin)", "Marlin weight repacking"
MARLIN_MOE = "NVFP4 GEMM for experts (Marlin)"


def seen_in(planned: Planner, release: str, profile: str) -> dict[str, Check]:
    """The checks of a release as it is on the index."""
    made = planned(f"pypi:vllm=={release}", profile)
    target = target_of_plan(made.plan, made.base, release, patched=False)
    return {check.name: check for check in check_binaries(target)}


@pytest.mark.parametrize("release", ["0.20.1", "0.22.1"])
def test_cutlass_kernels_of_cuda_13_wheels_contain_real_code(
    planned: Planner, release: str
) -> None:
    checks = seen_in(planned, release, "cutlass-sm12x")
    assert {name: c.status for name, c in checks.items()} == dict.fromkeys(
        [FP8, BLOCK, GEMM, GROUPED, QUANT, STABLE], "pass"
    )
    numbers = {
        FP8: ("16 kernels: 16", {"QMMA.16832.F32.E4M3.E4M3": 1024}),
        BLOCK: ("6 kernels: 6", {"QMMA.16832.F32.E4M3.E4M3": 576}),
        GEMM: ("4 kernels: 4", {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 384}),
        GROUPED: ("1 kernel: 1", {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64}),
        QUANT: ("22 kernels: 22", {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 88}),
    }
    for name, (head, figures) in numbers.items():
        assert checks[name].seen.startswith(f"{head} native (sm_120f); ")
        assert checks[name].seen.endswith("; no BPT.TRAP")
        assert checks[name].figures == figures
        assert checks[name].where.startswith(f"{STABLE} of")
    assert "sm_121" not in checks[STABLE].seen


def test_cutlass_kernels_of_cuda_12_wheels_do_not_load(planned: Planner) -> None:
    checks = seen_in(planned, "0.17.1", "cutlass-sm12x")
    ours = {FP8, BLOCK, GEMM, GROUPED, QUANT}
    assert {name for name, c in checks.items() if c.status == "fail"} == ours
    assert checks[FP8].seen == "16 kernels: 16 not loadable (sm_120a)"
    for name in ours:
        assert "sm_120a" in checks[name].seen
        assert checks[name].reason.startswith("needs a rebuild: SM121 loads none of ")
        assert "wheels from 0.20.0 on" in checks[name].reason
    module = checks[OLD]
    assert module.status == "pass"  # other kernels in it do run
    assert "sm_120 x36, sm_120a x16; PTX for" in module.seen


@pytest.mark.parametrize(("release", "status"), [("0.17.1", "fail"), ("0.20.1", "pass")])
def test_flashinfers_cutlass_needs_the_quantisation_of_a_cuda_13_wheel(
    planned: Planner, release: str, status: str
) -> None:
    """FlashInfer compiles its GEMM on the machine, for what a kernel of vLLM has quantised."""
    assert seen_in(planned, release, "flashinfer-cutlass")[QUANT].status == status


def test_marlin_of_early_wheels_is_compiled_by_the_driver(planned: Planner) -> None:
    checks = seen_in(planned, "0.20.1", "marlin")
    assert {c.status for c in checks.values()} == {"pass"}
    jit = "compiled by the driver from PTX"
    assert checks[MARLIN].seen.startswith(f"30 kernels: 30 {jit} (sm_80, sm_90); ")
    assert checks[MARLIN_MOE].seen.startswith(f"30 kernels: 30 {jit} (sm_80); ")
    assert checks[REPACK].seen == f"6 kernels: 6 {jit} (sm_80); no BPT.TRAP"


def test_b12x_uses_only_the_prebuilt_quantisation(planned: Planner) -> None:
    checks = seen_in(planned, "0.20.1", "b12x-full")
    assert {name: c.status for name, c in checks.items()} == {QUANT: "pass", STABLE: "pass"}


def test_one_module_is_read_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Planner
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path))
    index = PackageIndex()
    made = Planner(index, IndexSources(index))("pypi:vllm==0.20.1", "cutlass-sm12x")
    target = target_of_plan(made.plan, made.base, "fresh", patched=False)
    before = index.bytes_read
    checks = list(check_binaries(target))
    assert {c.status for c in checks} == {"pass"}
    assert 6_800_000 < index.bytes_read - before < 6_900_000  # of a wheel of 236 MB
    again = index.bytes_read
    assert list(check_binaries(target)) == checks
    assert index.bytes_read == again


def test_the_command_ends_with_5_where_a_rebuild_is_needed(tmp_path: Path) -> None:
    words = ("verify", "pypi:vllm==0.17.1", "-l", "cutlass-sm12x", "--level", "binaries")
    ended = spark_build(*words, "--html", "evidence.html", cwd=tmp_path, timeout=600)
    assert ended.code == 5
    assert "needs a rebuild: SM121 loads none of sm_120a" in ended.err
    page = (tmp_path / "evidence.html").read_text("utf-8")
    assert "16 kernels: 16 not loadable (sm_120a)" in page
    assert '<div class="bars' in page  # how many kernels run in which way
