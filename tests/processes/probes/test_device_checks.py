"""From the probe's events to checks; kernels by name; probes that crash, hang or talk nonsense."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from builder.common.document import plain
from builder.images.engines import devicedata
from builder.layers.catalog import Catalog
from tests.documents import verified
from tests.unit.inimage import load
from tests.unit.plans import planned

checks = load("device_checks")

LINE = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
#: Kernels as profilers print them: the CuTe DSL's symbols as compiled here, the templates' as
#: c++filt prints those of the released libraries.
B12X = (
    "kernel_cutlass_kernel_flashinfergemmkernelsdense_blockscaled_gemm_sm120DenseGemmKernel_object_"
    "at__CopyAtom_ThrID10_TVLayoutSrc1819201_TVLayoutDst1819201_Valuetypef4E2M1FN_tensor00odiv2111_0"
)
B12X_LATER = B12X.replace("sm120Dense", "sm120_b12xDense")
B12X_MOE = (
    "kernel_cutlass_kernel_flashinferfused_moecute_dslblackwell_sm12xmoe_static_kernelMoEStaticKernel"
    "_object_at__tensorptrbf16_gmem_align16_o_645125121_tensorptri32_gmem_o_1281_tensorptrf32_gm_0"
)
MARLIN = "void marlin::Marlin<1125899906909960l, 1125899906909960l, 256, 1, 8, 8, false>"
MARLIN_MOE = "_ZN16marlin_moe_wna166MarlinILlELlELlELlELi256ELi1ELi8ELi8ELb1ELi4EL"
CUTLASS = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm120TmaWarpSpecializedBlockScaled"
    "<4, 3, cute::tuple<cute::C<1> > > > >::Params)"
)
CUTLASS_FP8 = CUTLASS.replace("BlockScaled<4, 3", "<5, 2")
QUANT = "void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>(int, int, __nv_bfloat16 const*)"


def executed(kind: str, line: str, names: list[str], vllm: str = "0.28.0") -> dict[str, Any]:
    made: dict[str, Any] = checks.executed_check(
        kind, plain(devicedata.kernel_for(kind, line, vllm)), names
    )
    return made


@pytest.mark.parametrize(
    ("kind", "line", "names", "status"),
    [
        ("nvfp4-linear", LINE, [QUANT, B12X], "pass"),
        ("nvfp4-linear", LINE, [B12X_LATER], "pass"),
        ("nvfp4-linear", LINE, [QUANT, MARLIN], "fail"),
        ("nvfp4-linear", LINE, [B12X, MARLIN], "fail"),
        ("nvfp4-linear", LINE, [QUANT, CUTLASS], "fail"),
        ("nvfp4-linear", LINE, [], "not-run"),
        ("nvfp4-linear", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM", [MARLIN], "pass"),
        ("nvfp4-linear", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM", [QUANT, B12X], "fail"),
        ("nvfp4-linear", "Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM", [MARLIN], "pass"),
        ("nvfp4-linear", "Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM", [CUTLASS], "pass"),
        ("nvfp4-linear", "Using CutlassNvFp4LinearKernel for NVFP4 GEMM", [QUANT, CUTLASS], "pass"),
        ("nvfp4-linear", "Using CutlassNvFp4LinearKernel for NVFP4 GEMM", [CUTLASS_FP8], "fail"),
        ("nvfp4-moe", "Using 'FLASHINFER_B12X' NvFp4 MoE backend", [B12X_MOE], "pass"),
        ("nvfp4-moe", "Using 'FLASHINFER_B12X' NvFp4 MoE backend", [B12X], "fail"),
        ("nvfp4-moe", "Using 'MARLIN' NvFp4 MoE backend", [MARLIN_MOE], "pass"),
        ("nvfp4-moe", "Using 'MARLIN' NvFp4 MoE backend", [MARLIN], "fail"),
        ("nvfp4-moe", "Using 'VLLM_CUTLASS' NvFp4 MoE backend", [CUTLASS], "pass"),
        ("fp8-linear", "Selected CutlassFP8ScaledMMLinearKernel for X", [CUTLASS_FP8], "pass"),
        ("fp8-linear", "Selected CutlassFP8ScaledMMLinearKernel for X", [MARLIN], "fail"),
        ("fp8-linear", "Selected FlashInferFP8ScaledMMLinearKernel for X", ["nvjet_1"], "not-run"),
        ("fp8-linear", "Selected FlashInferFP8ScaledMMLinearKernel for X", [MARLIN], "fail"),
        ("nvfp4-linear", "Using SomethingNewKernel for NVFP4 GEMM", [B12X], "not-run"),
    ],
)
def test_kernels_are_recognised_by_name(
    kind: str, line: str, names: list[str], status: str
) -> None:
    assert executed(kind, line, names)["status"] == status


def test_the_kernel_that_ran_is_shown_and_long_names_are_cut() -> None:
    check = executed("nvfp4-linear", LINE, [B12X, MARLIN + "x" * 400])
    assert check["seen"].startswith("void marlin::Marlin<")
    assert len(check["seen"]) == 160


@pytest.mark.parametrize("profile", sorted(Catalog.discover().profile_files))
def test_every_expected_line_has_kernel_names(profile: str) -> None:
    """Names to find in the profiler or to miss, and shapes to run: a new profile needs a row."""
    for expectation in Catalog.discover().profile(profile).expect:
        if expectation.line is None or expectation.kind in devicedata.OTHER_LAYERS:
            continue
        kernel = devicedata.kernel_for(expectation.kind, expectation.line, "0.28.0")
        assert kernel.names or kernel.never, expectation
        assert kernel.shapes, expectation


def test_marlin_of_0_17_rounds_twice_and_later_ones_once() -> None:
    early = devicedata.kernel_for(
        "nvfp4-linear", "Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM", "0.17.1"
    )
    late = devicedata.kernel_for(
        "nvfp4-linear", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM", "0.20.1"
    )
    assert (early.roundings, late.roundings) == (2, 1)


# ------------------------------------------------------------------------------- the probe's events

SELECTED = {"event": "selected", "kernel": ["FlashInferB12xNvFp4LinearKernel"], "lines": [LINE]}
GOOD: dict[str, Any] = {"event": "case", "name": "random", "shape": "1x128x128", "problems": []}
GOOD |= {"worst": 0.93, "relative": 0.0017}
BAD: dict[str, Any] = {"event": "case", "name": "zeros", "shape": "17x96x256"}
BAD |= {"problems": ["12 NaN and 0 infinite of 1632 values"], "worst": None, "relative": None}
KERNELS = {"event": "kernels", "names": [B12X]}
END = {"event": "end"}


def ran(source: str, timeout: float = 20.0) -> Any:
    """The probe's side played by a line of Python."""
    command = [sys.executable, "-c", f"import os, sys, time; sys.stdin.read(); {source}"]
    return checks.Probe({"kind": "nvfp4-linear"}, command=command, timeout=timeout)


def said(*events: object, then: str = "pass") -> Any:
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    return ran(f"print({lines!r}, end='', flush=True); {then}")


def by_name(probe: Any) -> dict[str, dict[str, Any]]:
    kernel = plain(devicedata.kernel_for("nvfp4-linear", LINE, "0.28.0"))
    made = verified(checks.checks_of("nvfp4-linear", kernel, probe))
    return {check["name"]: check for check in made}


def test_a_sound_run() -> None:
    made = by_name(said(SELECTED, GOOD, KERNELS, END))
    assert list(made) == [
        "nvfp4-linear selected",
        "nvfp4-linear random 1x128x128",
        "nvfp4-linear executed",
    ]
    assert {check["status"] for check in made.values()} == {"pass"}
    assert {check["level"] for check in made.values()} == {"device"}


def test_nan_is_reported_as_a_failure() -> None:
    check = by_name(said(SELECTED, GOOD, BAD, KERNELS, END))["nvfp4-linear zeros 17x96x256"]
    assert (check["status"], check["seen"]) == ("fail", "12 NaN and 0 infinite of 1632 values")


def test_an_unexpected_kernel_is_a_failure() -> None:
    other = {**SELECTED, "lines": ["Using MarlinNvFp4LinearKernel for NVFP4 GEMM"]}
    check = by_name(said(other, GOOD, KERNELS, END))["nvfp4-linear selected"]
    assert check["status"] == "fail"
    assert check["seen"] == "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("os.kill(os.getpid(), 11)", "the process ended with signal 11 after random 1x128x128"),
        ("os._exit(3)", "the process ended with exit status 3 after random 1x128x128"),
    ],
)
def test_a_crash_keeps_earlier_results(then: str, words: str) -> None:
    made = by_name(said(SELECTED, GOOD, then=f"print('trap', file=sys.stderr, flush=True); {then}"))
    assert made["nvfp4-linear random 1x128x128"]["status"] == "pass"
    check = made["nvfp4-linear ran"]
    assert (check["status"], check["seen"], check["reason"]) == ("fail", words, "trap")
    assert "nvfp4-linear executed" not in made


def test_an_error_of_the_kernel_is_a_failure() -> None:
    error = {"event": "error", "stage": "run", "type": "AcceleratorError", "tail": ["here"]}
    error["message"] = "CUDA error: an illegal instruction was encountered"
    check = by_name(said(SELECTED, GOOD, error, END))["nvfp4-linear ran"]
    assert check["status"] == "fail"
    assert check["seen"].startswith("AcceleratorError: CUDA error: an illegal instruction")
    assert check["seen"].endswith("after random 1x128x128")


def test_an_unknown_layer_is_not_run() -> None:
    error = {"event": "error", "stage": "run", "type": "UnknownLayerError", "tail": []}
    error["message"] = "ReplicatedLinear has a parameter weight_zero, unknown to this check"
    assert by_name(said(error, END))["nvfp4-linear ran"]["status"] == "not-run"


def test_a_failed_profiler_keeps_the_numbers() -> None:
    error = {"event": "error", "stage": "profiler", "type": "RuntimeError", "tail": []}
    error["message"] = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    made = by_name(said(SELECTED, GOOD, error, END))
    assert made["nvfp4-linear executed"]["status"] == "not-run"
    assert "nvfp4-linear ran" not in made


def test_a_probe_that_ends_without_a_case_is_a_failure() -> None:
    assert by_name(said(END))["nvfp4-linear ran"]["status"] == "fail"


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_hanging_probe_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    child = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    source = (
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    )
    probe = ran(source, timeout=1.5)
    assert probe.ended == "did not end within 2 s"
    assert ended(int(file.read_text())), "its child still runs"


def test_other_text_on_stdout_is_not_an_event() -> None:
    probe = ran(f"print('hello'); print({json.dumps(END)!r})")
    assert probe.events == [END]


# ---------------------------------------------------------------------------------- the whole level

PLANNED = planned(
    vllm="0.28.0",
    serve_flags=["--linear-backend", "flashinfer_b12x"],
    moe_serve_flags=["--moe-backend", "flashinfer_b12x"],
    expect=[
        {"kind": "nvfp4-linear", "line": LINE},
        {"kind": "nvfp4-moe", "line": "Using 'FLASHINFER_B12X' NvFp4 MoE backend"},
    ],
)
PLAN = plain(PLANNED)


def test_without_a_gpu_nothing_is_run_and_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "look", lambda: ([], "no libcuda.so.1"))
    made = verified(checks.run(PLAN, plain(devicedata.device_data(PLANNED, "me/image:1"))))
    assert [(c["name"], c["status"]) for c in made] == [
        ("environment", "not-run"),
        ("nvfp4-linear", "not-run"),
        ("nvfp4-moe", "not-run"),
    ]
    assert (
        "docker run --rm --gpus all --ipc host --entrypoint spark-verify me/image:1"
        in made[0]["reason"]
    )


def test_each_expectation_is_checked_with_the_flags_of_the_plan() -> None:
    asked = [
        request for _, request in checks.requests(PLAN, plain(devicedata.device_data(PLANNED)))
    ]
    assert [request["kind"] for request in asked] == ["reference", "nvfp4-linear", "nvfp4-moe"]
    assert asked[1]["linear_backend"] == asked[2]["moe_backend"] == "flashinfer_b12x"
    assert asked[1]["activations"] == "fp4"


def test_a_kind_without_a_check_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "look", lambda: ([], ""))
    probe = said(GOOD, END)
    monkeypatch.setattr(checks, "Probe", lambda *_args, **_kwargs: probe)
    expect = [{"kind": "mxfp4-moe", "line": "Using 'B12X' Mxfp4 MoE backend"}]
    plan = planned(PLANNED, expect=expect)
    made = verified(checks.run(plain(plan), plain(devicedata.device_data(plan))))
    assert [(c["name"], c["status"]) for c in made] == [
        ("reference random 1x128x128", "pass"),
        ("mxfp4-moe", "not-run"),
    ]
