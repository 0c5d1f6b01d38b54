"""Which layers of b12x-full are necessary on vLLM 0.20.1: vLLM's own words, and the compiler's.

What the other tests of this session have already asked of the same files is not asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.reference import Ref
from builder.layers.catalog import Catalog
from builder.proof.checks import PROOF_LEVELS
from builder.proof.necessity import prove, whole
from builder.proof.opening import Opening, open_target
from builder.proof.run import verify

from .cli import spark_build

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.pypi import PackageIndex
    from builder.layers.pinned import IndexSources
    from builder.proof.checks import Necessity

TARGET = "pypi:vllm==0.20.1"
#: layer -> level, check, and what is seen without it; None where nothing fails.
PROOFS = {
    "cutlass-dsl-cu13": (
        "codegen",
        "b12x GEMM, tile 128x128",
        "Unexpected instruction types specified for '_mma'",
    ),
    "cutlass-dsl-sm121a": (
        "codegen",
        "NVFP4 warp MMA",
        "OpError: expects arch to be one of ['sm_120a'], but got Arch.sm_121a",
    ),
    "flashinfer-b12x": ("dispatch", "nvfp4-linear", "FlashInfer b12x requires SM120+"),
    "flashinfer-sm121": None,
    "flashinfer-b12x-moe-barrier": None,
    "flashinfer-narrow-experts": None,
    "flashinfer-b12x-store-wait": None,
    "flashinfer-w4a16-store-wait": None,
    "flashinfer-b12x-moe-rows": None,
    "vllm-b12x-backend": ("static", "layer b12x-env", "is not a choice of vllm 0.20.1"),
    "vllm-b12x-reachable": None,
    "vllm-linear-fallback": None,
    "vllm-b12x-experts-scales": None,
    "vllm-b12x-padding": None,
    "b12x-env": ("dispatch", "nvfp4-linear", "Using FlashInferCutlassNvFp4LinearKernel"),
}
#: These change the source of a kernel: what it computes, level ``numbers`` alone can tell
#: (``test_numbers.py``).
KERNELS = {
    "flashinfer-sm121",
    "flashinfer-b12x-moe-barrier",
    "flashinfer-b12x-store-wait",
    "flashinfer-b12x-moe-rows",
}


@pytest.fixture(scope="module")
def verdicts(index: PackageIndex, sources: IndexSources) -> dict[str, Necessity]:
    """The verdicts by layer, with a full set that passes every check."""
    selection = Catalog.discover().select(["b12x-full"])
    opened = open_target(Ref(TARGET), Opening(index=index, sources=sources, selection=selection))
    with whole(opened) as (full, apart):
        report = verify(full, PROOF_LEVELS)
        assert report.passed(PROOF_LEVELS), report.of("fail") or report.of("not-run")
        return {verdict.layer: verdict for verdict in prove(full, apart, report)}


def test_every_layer_has_a_verdict(verdicts: dict[str, Necessity]) -> None:
    assert list(verdicts) == list(PROOFS)


@pytest.mark.parametrize("layer", PROOFS)
def test_each_layer_is_necessary_for_exactly_one_check(
    verdicts: dict[str, Necessity], layer: str
) -> None:
    verdict, proof = verdicts[layer], PROOFS[layer]
    expected = "unknown" if layer in KERNELS else proof is not None
    assert verdict.necessary == expected, verdict
    if proof is None:
        assert verdict.check == ""
        return
    assert (verdict.level, verdict.check) == proof[:2]
    assert proof[2] in verdict.seen


def test_an_unnecessary_layer_was_checked_at_every_level(
    verdicts: dict[str, Necessity],
) -> None:
    words = "no check fails without it (static, imports, dispatch, codegen)"
    for layer in KERNELS:
        unasked = f"{words}, but numbers was not requested (--level numbers)"
        assert verdicts[layer].reason == unasked
    assert verdicts["vllm-b12x-reachable"].state == "not-applicable"


def test_the_command_proves_necessity_with_the_given_levels(tmp_path: Path) -> None:
    """Files alone: nothing is claimed, and the exit status is that of the full set."""
    words = ("verify", TARGET, "-l", "b12x-full", "--prove-necessary", "--level", "static,imports")
    ran = spark_build(*words, "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    report = ran.json()
    assert report["target"] == f"{TARGET} as planned"
    verdicts = {v["layer"]: v["necessary"] for v in report["necessity"]}
    assert verdicts.pop("vllm-b12x-reachable") is False
    assert verdicts.pop("vllm-linear-fallback") is False
    assert verdicts.pop("vllm-b12x-padding") is False
    assert verdicts.pop("flashinfer-narrow-experts") is False
    assert verdicts.pop("flashinfer-w4a16-store-wait") is False
    assert set(verdicts.values()) == {"unknown"}
    assert "without b12x-env (1 of 10)" in ran.err


def test_a_full_set_that_fails_is_a_failure(tmp_path: Path) -> None:
    """No CPU build of torch to be had: the required level did not run."""
    words = ("verify", TARGET, "-l", "marlin", "--prove-necessary", "--require", "dispatch")
    env = {"SPARK_BUILD_TORCH": "0.0.0"}
    ran = spark_build(*words, "--level", "dispatch", "--json", cwd=tmp_path, env=env)
    assert ran.code == 5
    verdicts = ran.json()["necessity"]
    assert {v["necessary"] for v in verdicts} == {"unknown"}
    verdict = verdicts[-1]
    assert "dispatch nvfp4-linear did not run" in verdict["reason"]
