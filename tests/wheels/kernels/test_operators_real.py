"""Which operators stand behind the units of real releases; facts were read in the sources by hand.

Nothing is compiled: a release's own build files and sources are read.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.wheels.cli import called

#: release -> CUDA units, and for how many of them the operators are found
SURVEY = {
    "0.17.1": (93, 73),
    "0.19.1": (84, 69),
    "0.20.1": (97, 57),
    "0.22.1": (95, 55),
    "0.24.0": (101, 81),
    "0.28.0": (107, 87),
    "0.33.0": (108, 88),
}


@cache
def survey(release: str) -> dict[str, Any]:
    """Units by path; in this process, where other tests have read the same build files."""
    ran = called("compile", "show", "--vllm", release, "--operators", "--json", cwd=Path.cwd())
    assert ran.code == 0, ran.err
    return {row["path"]: row for row in ran.json()["operators"]}


def named(row: dict[str, Any]) -> set[str]:
    """Operators with the key that is not CUDA's."""
    return {
        op["name"] if op["key"] == "CUDA" else f"{op['name']} {op['key']}"
        for op in row["operators"]
    }


@pytest.mark.parametrize("release", SURVEY)
def test_number_of_units_with_operators(release: str) -> None:
    rows = survey(release)
    found = [row for row in rows.values() if not row["refused"]]
    assert (len(rows), len(found)) == SURVEY[release]
    assert all(row["operators"] for row in found)
    refused = {path for path, row in rows.items() if row["refused"]}
    assert all("marlin" in path for path in refused), "its instances are most of an extension"


def test_the_operators_of_a_unit_that_defines_them() -> None:
    row = survey("0.19.1")["csrc/activation_kernels.cu"]
    plain = "silu_and_mul mul_and_silu gelu_and_mul gelu_tanh_and_mul fatrelu_and_mul"
    more = "swigluoai_and_mul gelu_new gelu_fast gelu_quick"
    assert named(row) == {f"_C::{name}" for name in f"{plain} {more}".split()}
    assert row["between"] == []
    assert named(survey("0.19.1")["csrc/layernorm_kernels.cu"]) == {
        "_C::rms_norm",
        "_C::fused_add_rms_norm",
    }


def test_a_unit_includes_its_entry_point_and_its_callees() -> None:
    """``nvfp4_quant_entry.cu`` is registered, calls three units, and one of these a fourth."""
    folder = "csrc/quantization/fp4"
    row = survey("0.33.0")[f"{folder}/nvfp4_quant_kernels.cu"]
    assert named(row) == {
        "_C::scaled_fp4_quant",
        "_C::scaled_fp4_quant.out",
        "_C::scaled_fp4_experts_quant",
        "_C::silu_and_mul_scaled_fp4_experts_quant",
        "_C::silu_and_mul_nvfp4_quant",
    }
    assert set(row["between"]) == {
        f"{folder}/nvfp4_quant_entry.cu",
        f"{folder}/activation_nvfp4_quant_fusion_kernels.cu",
        f"{folder}/nvfp4_experts_quant.cu",
        "csrc/cuda_utils_kernels.cu",
    }


def test_a_function_declared_in_the_body_that_calls_it() -> None:
    row = survey("0.20.1")["csrc/nvfp4_kv_cache_kernels.cu"]
    assert row["between"] == ["csrc/cache_kernels.cu"]
    assert "_C_cache_ops::reshape_and_cache_flash" in named(row)
    assert "_C_cache_ops::swap_blocks_batch CPU" in named(row)


def test_instances_that_macros_make_for_another_unit() -> None:
    row = survey("0.33.0")["csrc/fp32_router_gemm.cu"]
    assert named(row) == {"_C::fp32_router_gemm"}
    assert row["between"] == ["csrc/fp32_router_gemm_entry.cu"]


def test_units_that_register_themselves() -> None:
    row = survey("0.33.0")["csrc/attention/dcp_utils/dcp_direct_q_gather.cu"]
    assert named(row) == {"_C::direct_dcp_q_gather"}
    row = survey("0.19.1")["csrc/quantization/marlin/gptq_marlin_repack.cu"]
    assert named(row) == {"_C::gptq_marlin_repack"}


def test_operators_without_a_dispatch_key() -> None:
    row = survey("0.19.1")["csrc/moe/moe_permute_unpermute_op.cu"]
    assert named(row) == {
        "_moe_C::moe_permute",
        "_moe_C::moe_unpermute",
        "_moe_C::shuffle_rows",
        "_moe_C::moe_permute_unpermute_supported CompositeImplicitAutograd",
    }


def test_known_results_are_unchanged() -> None:
    """The table leaves the kernels of other chips out; the sources would not."""
    path = "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"
    row = survey("0.19.1")[path]
    assert named(row) == {"_C::cutlass_scaled_mm"}
    assert len(row["between"]) == 4
    assert named(survey("0.22.1")[path.replace("csrc/", "csrc/libtorch_stable/", 1)]) > named(row)
