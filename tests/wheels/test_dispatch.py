"""vLLM's own selector, asked on SM121 in the sandbox: what each profile gets on real releases.

Cold, each sandbox costs a download of some 200 to 400 MB once; warm, a question takes 5 to 10 s,
nearly all of it imports.  So each (release, profile, patched or not) is asked once per session,
and not every release is asked: one of each way in which vLLM chooses.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from builder import settings
from builder.applier.trees import Content, OverlayTree
from builder.common.paths import package_file
from builder.images.subject import Subject
from builder.proof.checks import KINDS
from builder.proof.dispatch import check_dispatch, make_request, own_settings
from builder.proof.opening import target_of_plan
from builder.proof.recorded import read_records
from builder.proof.recording import by_itself
from builder.proof.replies import DispatchReply
from builder.proof.sandbox import MODULE, Sandbox, operators, requirements_for, torch_folder
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.pypi import PackageIndex
    from builder.proof.checks import Check

    from .support import Planner

    Asked = Callable[[str, str, bool], dict[str, Check]]

DOCS = Path(__file__).parents[2] / "docs"
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
    ("flashinfer-cutlass", True): "Using NvFp4LinearBackend.FLASHINFER_CUTLASS for NVFP4 GEMM",
    ("flashinfer-cutlass", False): "Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM",
    ("cutlass-sm12x", True): "Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM",
    ("cutlass-sm12x", False): "Using CutlassNvFp4LinearKernel for NVFP4 GEMM",
}
MOE_OF = {
    "marlin": "Using 'MARLIN' NvFp4 MoE backend",
    "flashinfer-cutlass": "Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend",
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
        assert line in checks[kind].seen
    for check in checks.values():
        assert check.status == "pass", evidence(check)


@pytest.mark.parametrize("profile", ["marlin", "cutlass-sm12x", "flashinfer-cutlass"])
@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_the_other_profiles_are_selected(asked: Asked, release: str, profile: str) -> None:
    checks = asked(release, profile, True)
    old = release.startswith(("0.17.", "0.18.", "0.19."))
    for kind, line in ((LINEAR, LINEAR_OF[profile, old]), (MOE, MOE_OF[profile])):
        assert line in checks[kind].seen
    for check in checks.values():
        assert check.status == "pass", evidence(check)


@pytest.mark.parametrize(("release", "profile"), [("0.20.1", "b12x-full"), ("0.33.0", "marlin")])
def test_every_kind_of_layer_is_checked(asked: Asked, release: str, profile: str) -> None:
    assert set(asked(release, profile, True)) == set(KINDS)


def test_one_import_answers_each_kind_as_a_process_of_its_own_would(planned: Planner) -> None:
    """All kinds are asked in children of one process, which imports the release once."""
    made = planned("pypi:vllm==0.33.0", "b12x-full")
    target = target_of_plan(made.plan, made.base, "0.33.0", patched=True)
    request = make_request(target.plan, own_settings(target))
    together = target.runner.dispatch(request)
    assert isinstance(together, DispatchReply)
    assert len(together.answers) == len(request.ask) == 2 * len(KINDS)
    for ask, answer in zip(request.ask[: len(KINDS)], together.answers, strict=False):
        alone = target.runner.dispatch(replace(request, ask=(ask,)))
        assert isinstance(alone, DispatchReply)
        assert alone.answers == (answer,)


# --------------------------------------------------------------- each kind, seen to fail by itself


LINEAR_KERNELS = "vllm/model_executor/kernels/linear/__init__.py"
LAYERS = "vllm/model_executor/layers"


@dataclass(frozen=True)
class Break:
    """An edit of a release's own files, and the one kind of layer whose choice it changes."""

    kind: str
    file: str
    old: str
    new: str
    seen: str
    release: str = "0.33.0"


BREAKS = [
    Break(
        kind=LINEAR,
        file=LINEAR_KERNELS,
        old="        CutlassNvFp4LinearKernel,\n        # Weight-only",
        new="        # Weight-only",
        seen="Using FlashInferCutlassNvFp4LinearKernel",
    ),
    Break(
        kind=MOE,
        file=f"{LAYERS}/fused_moe/experts/cutlass_moe.py",
        old="return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)",
        new="return False",
        seen="'VLLM_CUTLASS' does not support",
    ),
    Break(
        kind="fp8-linear",
        file=LINEAR_KERNELS,
        old="        CutlassFP8ScaledMMLinearKernel,\n        B12xTensor",
        new="        B12xTensor",
        seen="Selected FlashInferFP8ScaledMMLinearKernel",
    ),
    Break(
        kind="fp8-block",
        file=LINEAR_KERNELS,
        old="        CutlassFp8BlockScaledMMKernel,\n        B12xFp8Block",
        new="        B12xFp8Block",
        seen="Selected DeepGemmFp8BlockScaledMMKernel",
    ),
    Break(
        kind="fp8-block",
        release="0.19.1",
        file=f"{LAYERS}/quantization/utils/fp8_utils.py",
        old="        if use_cutlass:\n            return self._run_cutlass",
        new="        if not use_cutlass:\n            return self._run_cutlass",
        seen="selected W8A8BlockFp8LinearOp._run_triton",
    ),
    Break(
        kind="w4a16-linear",
        file=LINEAR_KERNELS,
        old="        FlashInferCuteDslNvFp4W4A16LinearKernel,\n        MarlinNvFp4LinearKernel,\n"
        "        FlashInferTrtllm",
        new="        MarlinNvFp4LinearKernel,\n        FlashInferCuteDslNvFp4W4A16LinearKernel,\n"
        "        FlashInferTrtllm",
        seen="Using MarlinNvFp4LinearKernel",
    ),
    Break(
        kind="w4a16-linear",
        release="0.22.1",
        file=f"{LAYERS}/quantization/compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py",
        old="    apply_fp4_marlin_linear,\n    prepare",
        new="    apply_fp4_marlin_linear as apply_something_else,\n    prepare",
        seen="NameError",
    ),
    Break(
        kind="w4a16-moe",
        file=f"{LAYERS}/fused_moe/experts/cutlass_moe.py",
        old="return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)",
        new="return weight_key == kNvfp4Static",
        seen="Using 'VLLM_CUTLASS'",
    ),
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: f"{b.release}-{b.kind}")
def test_a_changed_choice_fails_only_the_check_of_its_kind(planned: Planner, broken: Break) -> None:
    made = planned(f"pypi:vllm=={broken.release}", "cutlass-sm12x")
    text = (made.base.tree.read(broken.file) or b"").decode()
    assert text.count(broken.old) == 1
    tree = OverlayTree(made.base.tree)
    tree.update({broken.file: Content.of(text.replace(broken.old, broken.new).encode())})
    base = Subject(made.base.identity, tree)
    trust = TrustedSources(everything=True)
    target = target_of_plan(made.plan, base, broken.release, patched=True, trust=trust)
    checks = {check.name: check for check in check_dispatch(target)}
    assert [name for name, check in checks.items() if check.status != "pass"] == [broken.kind]
    assert checks[broken.kind].status == "fail"
    assert broken.seen in checks[broken.kind].seen


# ------------------------------------------------------------------------------ real and simulated


@pytest.mark.parametrize(
    ("release", "stand_in"),
    [
        pytest.param("0.20.1", "a generated libcuda.so.1", id="0.20.1, 7 MB of its wheel"),
        pytest.param(
            "0.33.0",
            "libspark_build_cuda.so: a generated stand-in that defines cublasHgemm",
            id="0.33.0, 37 MB: it calls functions of cuBLAS that its torch does not",
        ),
    ],
)
def test_the_real_operator_library_matches_the_simulation(
    asked: Asked,
    planned: Planner,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    stand_in: str,
) -> None:
    """The release's own library for this machine, beside generated stand-ins."""
    simulated = asked(release, "cutlass-sm12x", True)
    monkeypatch.setenv(settings.REAL_EXTENSIONS.name, "1")
    made = planned(f"pypi:vllm=={release}", "cutlass-sm12x")
    target = target_of_plan(made.plan, made.base, release, patched=True)
    checks = {check.name: check for check in check_dispatch(target)}
    assert {n: (c.status, c.seen) for n, c in checks.items()} == {
        n: (c.status, c.seen) for n, c in simulated.items()
    }
    parts = "\n".join(checks[LINEAR].simulated)
    assert stand_in in parts
    assert "torch.ops._C." not in parts
    assert "torch.ops._C." in "\n".join(simulated[LINEAR].simulated)


HOST_FUNCTIONS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from builder.probes import dispatch_device, stub_driver
for path in json.loads(sys.argv[3]):
    assert stub_driver.loads(path), path
import torch
module, scratch = sys.argv[2], sys.argv[4]
stub_driver.load_driver(print, scratch, [module])
torch.ops.load_library(module)
for name, simulated in dispatch_device.HOST_FUNCTIONS.items():
    for capability in (75, 80, 86, 89, 90, 100, 103, 110, 120, 121):
        real = getattr(torch.ops._C, name)(capability)
        assert real == simulated(capability), (name, capability, real)
print("alike")
"""


def test_each_simulated_host_function_matches_the_real_one(
    planned: Planner, index: PackageIndex, tmp_path: Path
) -> None:
    planned("pypi:vllm==0.20.1", "marlin")
    real = operators("0.20.1", index)
    sandbox = Sandbox(requirements_for("0.20.1"))
    sandbox.prepare()
    torch = torch_folder("2.11.0").folder
    answer = subprocess.run(
        [
            str(sandbox.python),
            "-c",
            HOST_FUNCTIONS,
            str(package_file().parent),
            real.extensions[MODULE],
            json.dumps(real.libraries),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(torch)},
    )
    assert answer.stdout.endswith("alike\n"), answer.stderr


# ---------------------------------------------------------------------------------- kept evidence


def test_a_release_still_matches_its_evidence(planned: Planner) -> None:
    """One release of the table, asked again by default and with each of its choices."""
    made = planned("pypi:vllm==0.20.1", "marlin")
    now = by_itself(made.plan, made.base)
    (kept,) = (r for r in read_records(DOCS / "evidence") if r.vllm == "0.20.1")
    assert now.default == kept.default
    assert now.choices == kept.choices
    assert kept.base.digest == made.base.identity.digest


# -------------------------------------------------------------------------------- without a layer


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
def test_the_evidence_lists_simulated_parts(asked: Asked, release: str) -> None:
    """A simulated device is never passed off as a real one."""
    for check in asked(release, "b12x-full", True).values():
        text = " ".join(check.simulated)
        assert "compute capability 12.1" in text
        assert "torch 2.11.0 (CUDA build, with generated stand-ins" in text
        assert "torch.ops._C.cutlass_scaled_mm_supports_fp4" in text
