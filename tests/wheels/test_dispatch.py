"""vLLM's own selector, asked on SM121 in the sandbox: what each profile gets on real releases.

Cold, each sandbox costs a download of some 200 to 400 MB once; warm, a question takes 5 to 10 s,
nearly all of it imports.  So each (release, profile, patched or not) is asked once per session,
and not every release is asked: one of each way in which vLLM chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.verify.dispatch import check_dispatch
from builder.verify.targets import target_of_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.verify import Check

    from .support import Planner

    Asked = Callable[[str, str, bool], dict[str, Check]]

LINEAR, MOE = "nvfp4-linear", "nvfp4-moe"
B12X_LINES = {
    LINEAR: "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM",
    MOE: "Using 'FLASHINFER_B12X' NvFp4 MoE backend",
}
#: 0.20.1: everything is brought in; 0.22.1: the variable; 0.24.0: the flag, reachable by a layer
#: only; 0.28.0 and 0.33.0: the flag.
B12X_RELEASES = ("0.20.1", "0.22.1", "0.24.0", "0.28.0", "0.33.0")
#: One release of each form of the settings (0.28.0 is asked with b12x-full).
OTHER_RELEASES = ("0.17.1", "0.20.1", "0.23.0", "0.24.0", "0.33.0")
LINEAR_OF = {
    ("marlin", True): "Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM",
    ("marlin", False): "Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
    ("cutlass-sm12x", True): "Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM",
    ("cutlass-sm12x", False): "Using CutlassNvFp4LinearKernel for NVFP4 GEMM",
}
MOE_OF = {
    "marlin": "Using 'MARLIN' NvFp4 MoE backend",
    "cutlass-sm12x": "Using 'VLLM_CUTLASS' NvFp4 MoE backend",
}


@pytest.fixture(scope="module")
def asked(planned: Planner) -> Asked:
    """Dispatch checks of a release by kind, each asked once."""
    answers: dict[tuple[str, str, bool], dict[str, Check]] = {}

    def ask(release: str, profile: str, patched: bool) -> dict[str, Check]:
        key = (release, profile, patched)
        if key not in answers:
            made = planned(f"pypi:vllm=={release}", profile)
            target = target_of_plan(made.plan, made.base, release, patched=patched)
            answers[key] = {check.name: check for check in check_dispatch(target)}
        return answers[key]

    return ask


def evidence(check: Check) -> str:
    """What a failing assertion should show."""
    return f"{check.name}: seen {check.seen!r}; {check.reason}"


@pytest.mark.parametrize("release", B12X_RELEASES)
def test_b12x_is_selected(asked: Asked, release: str) -> None:
    checks = asked(release, "b12x-full", True)
    for kind, line in B12X_LINES.items():
        assert checks[kind].status == "pass", evidence(checks[kind])
        assert line in checks[kind].seen


@pytest.mark.parametrize("profile", ["marlin", "cutlass-sm12x"])
@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_the_other_profiles_are_selected(asked: Asked, release: str, profile: str) -> None:
    checks = asked(release, profile, True)
    old = release.startswith(("0.17.", "0.18.", "0.19."))
    for kind, line in ((LINEAR, LINEAR_OF[profile, old]), (MOE, MOE_OF[profile])):
        assert checks[kind].status == "pass", evidence(checks[kind])
        assert line in checks[kind].seen


def test_unpatched_0_20_1_refuses_the_choice(asked: Asked) -> None:
    """Without the layers vLLM says that there is no such choice, and takes FlashInfer CUTLASS."""
    checks = asked("0.20.1", "b12x-full", False)
    linear, moe = checks[LINEAR], checks[MOE]
    assert linear.status == moe.status == "fail"
    assert "Invalid value 'flashinfer-b12x' for VLLM_NVFP4_GEMM_BACKEND" in linear.seen
    assert "without these settings it is: FlashInferCutlassNvFp4LinearKernel" in linear.reason
    assert "flashinfer_b12x" in moe.seen
    assert "without these settings it is: FLASHINFER_CUTLASS" in moe.reason


def test_unpatched_0_24_0_has_no_such_kernel(asked: Asked) -> None:
    """0.24.0 takes the flag's value and then finds no kernel of that name."""
    checks = asked("0.24.0", "b12x-full", False)
    assert checks[LINEAR].status == "fail"
    assert "no 'flashinfer_b12x' kernel exists for NVFP4 layers" in checks[LINEAR].seen
    assert "FlashInferCutlassNvFp4LinearKernel" in checks[LINEAR].reason
    assert checks[MOE].status == "pass", evidence(checks[MOE])


@pytest.mark.parametrize("release", ["0.20.1", "0.24.0"])
def test_the_evidence_says_what_was_simulated(asked: Asked, release: str) -> None:
    """A simulated device is never passed off as a real one."""
    for check in asked(release, "b12x-full", True).values():
        text = " ".join(check.simulated)
        assert "compute capability 12.1" in text
        assert "CPU build" in text
        assert "torch.ops._C.cutlass_scaled_mm_supports_fp4" in text
