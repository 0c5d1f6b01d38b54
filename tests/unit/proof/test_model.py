"""Level ``model``: a wrong kernel, a refusal and a stand-in that was called are seen."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.errors import UsageError
from builder.proof.isolation import SandboxUnavailable
from builder.proof.model import check_model, kinds_of
from builder.proof.target import ModelToBuild, VerifyTarget
from builder.proof.wholemodel import LayerRow, ModelAnswer, Refusal, Release
from builder.serving.preflight import models_to_build
from tests.unit.fakes import FakeRunner, fake_base, make_plan_of, vllm_files
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from builder.proof.checks import Check

EXPECT = [
    {"kind": "nvfp4-linear", "line": "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"},
    {"kind": "nvfp4-moe", "line": "Using 'FLASHINFER_B12X' NvFp4 MoE backend"},
    {"kind": "fp8-linear", "selected": "*"},
    {"kind": "w4a16-linear", "selected": "Marlin*"},
    {"kind": "w4a16-moe", "refused": "does not support W4A16"},
]
LINEAR, MOE = ("--linear-backend", "b12x"), ("--moe-backend", "b12x")
CONFIG = {"architectures": ["A"], "model_type": "a"}
KNOWN = ModelToBuild(
    name="mine", kinds=frozenset({"nvfp4-linear", "nvfp4-moe"}), config=CONFIG, named=False
)


def row(kernel: str, **values: Any) -> LayerRow:
    given: dict[str, Any] = {
        "pattern": "model.layers.*.o_proj", "layer": "Linear", "quantisation": "ModelOpt",
        "kernels": (kernel,) if kernel else (), "attention": "", "experts": None, "count": 2,
        "bytes": 1 << 30, "token_bytes": 0,
    }  # fmt: skip
    return LayerRow(**{**given, **values})


B12X = row("FlashInferB12xNvFp4LinearKernel")
EXPERTS = row(
    "FLASHINFER_B12X", pattern="model.layers.*.experts", quantisation="ModelOptNvFp4FusedMoE",
    experts=(8, 128),
)  # fmt: skip


def answer(*layers: LayerRow, error: Refusal | None = None) -> ModelAnswer:
    return ModelAnswer(
        error=error, lines=(), warnings=(), settings={}, layers=layers, caches=(),
        parameter_bytes=sum(one.bytes for one in layers), simulated=("the device",),
    )  # fmt: skip


def refused(text: str, kind: str = "ValueError", stage: str = "model") -> ModelAnswer:
    error = Refusal(type=kind, message=text, where="vllm/a.py:1 in f", stage=stage)
    return replace(answer(error=error), settings={"experts": 8})


Said = ModelAnswer | list[ModelAnswer]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The checks when a release gives these answers: without flags, with the plan's, with all."""

    def ask(said: Said, *models: ModelToBuild) -> dict[str, Check]:
        def asked(
            _release: Release, folder: Path, choices: Sequence[tuple[str, ...]]
        ) -> list[ModelAnswer]:
            assert json.loads((folder / "config.json").read_bytes()) == CONFIG
            assert list(choices) == [(), LINEAR, (*LINEAR, *MOE)]
            return said if isinstance(said, list) else [said] * 3

        monkeypatch.setattr(Release, "ask", asked)
        return {check.name: check for check in check_model(target(*(models or (KNOWN,))))}

    return ask


def target(*models: ModelToBuild) -> VerifyTarget:
    base = fake_base(vllm_files())
    plan = planned(
        make_plan_of(base).document, expect=EXPECT, serve_flags=list(LINEAR),
        moe_serve_flags=list(MOE),
    )  # fmt: skip
    return VerifyTarget(
        name="oci:out", subject=base, plan=plan, layers=(), runner=FakeRunner(), models=models
    )


def test_flags_of_a_plan_that_name_code_are_not_asked_about() -> None:
    """A plan may be a stranger's; without the flag it would be another plan."""
    given = target(KNOWN)
    plan = replace(given.plan, serve_flags=[*LINEAR, "--log-config-file", "/x"])
    (check,) = check_model(dataclasses.replace(given, plan=plan))
    assert (check.status, check.moot) == ("not-run", False)
    assert "--log-config-file of its plan is not asked about" in check.reason


def test_the_expected_kernels_pass(checks: Any) -> None:
    made = checks(answer(B12X, EXPERTS))
    assert {name: check.status for name, check in made.items()} == {
        "mine starts": "pass", "mine nvfp4-linear": "pass", "mine nvfp4-moe": "pass",
    }  # fmt: skip
    assert made["mine starts"].seen == "starts; 4 layers, 2.00 GiB"
    assert (
        made["mine starts"].expected == "vllm serve mine --linear-backend b12x --moe-backend b12x"
    )
    assert made["mine nvfp4-moe"].seen == "2 x model.layers.*.experts: FLASHINFER_B12X"
    assert made["mine nvfp4-moe"].simulated == ("the device",)


def test_one_layer_with_another_kernel_fails(checks: Any) -> None:
    """The log has the expected line, too: other layers of the kind have the kernel."""
    other = row("FlashInferCutlassNvFp4LinearKernel", pattern="model.layers.*.down_proj", count=1)
    made = checks(answer(B12X, other, EXPERTS))
    failed = made["mine nvfp4-linear"]
    assert (failed.status, failed.seen) == (
        "fail", "1 x model.layers.*.down_proj: FlashInferCutlassNvFp4LinearKernel",
    )  # fmt: skip
    assert failed.reason == "1 layers have another kernel"
    assert made["mine nvfp4-moe"].status == "pass"


def test_a_refusal_fails_with_the_releases_line(checks: Any) -> None:
    (check,) = checks([answer(B12X), answer(B12X), refused("no kernel for this layer")]).values()
    assert (check.status, check.seen) == ("fail", "ValueError: no kernel for this layer")
    assert check.where == "vllm/a.py:1 in f, vllm in oci:out"


def test_a_called_stand_in_is_not_run(checks: Any) -> None:
    said = refused("the Triton kernel f was launched", "StandInError")
    (check,) = checks(said).values()
    assert check.status == "not-run"
    assert "launched while building" in check.reason


def test_a_refusal_that_the_profile_names_passes_and_a_start_fails(checks: Any) -> None:
    model = dataclasses.replace(KNOWN, kinds=frozenset({"w4a16-moe"}))
    (check,) = checks(refused("b12x does not support W4A16"), model).values()
    assert (check.status, check.expected) == ("pass", "refused: does not support W4A16")
    assert check.refusal.startswith("W4A16 MoE models will not start with this profile")
    made = checks(answer(EXPERTS), model)
    assert made["mine starts"].status == "fail"


def test_other_experts_than_a_profile_promises_are_a_limit(checks: Any) -> None:
    said = [answer(EXPERTS), answer(EXPERTS), refused("no act_and_mul")]
    (check,) = checks(said, dataclasses.replace(KNOWN, activation="relu2")).values()
    assert (check.status, check.refusal) == (
        "pass",
        (
            "Models with relu2 experts will not start with --moe-backend b12x: "
            "ValueError: no act_and_mul"
        ),
    )
    named = dataclasses.replace(KNOWN, activation="relu2", named=True)
    assert [one.status for one in checks(said, named).values()] == ["fail"]
    plain_too = [answer(EXPERTS), refused("no kernel"), refused("no kernel")]
    (check,) = checks(plain_too, dataclasses.replace(KNOWN, activation="relu2")).values()
    assert check.status == "fail"


def test_a_model_that_a_release_refuses_with_any_flags_says_nothing_of_the_profile(
    checks: Any,
) -> None:
    said = refused("unknown quantisation", stage="configuration")
    (check,) = checks(said).values()
    assert (check.status, check.moot) == ("not-run", True)
    (check,) = checks(said, dataclasses.replace(KNOWN, named=True)).values()
    assert check.status == "fail"
    (check,) = checks(refused("broken")).values()  # the patched code, while it builds the model
    assert check.status == "fail"


def test_a_release_that_names_no_kernel_is_not_a_pass(checks: Any) -> None:
    made = checks(answer(row("", quantisation="ModelOptNvFp4LinearMethod"), EXPERTS))
    assert made["mine nvfp4-linear"].status == "not-run"


def test_a_sandbox_that_cannot_be_made_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(*_: object) -> list[ModelAnswer]:
        raise SandboxUnavailable("no network", hint="try later")

    monkeypatch.setattr(Release, "ask", no_sandbox)
    (check,) = check_model(target(KNOWN))
    assert (check.status, check.reason) == ("not-run", "no network; try: try later")
    (check,) = check_model(target())
    assert check.status == "not-run"


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (B12X, ("nvfp4-linear", "w4a16-linear")),
        (EXPERTS, ("nvfp4-moe", "w4a16-moe")),
        (row("MARLIN", quantisation="ModelOptNvFp4LinearMethod"), ("nvfp4-linear", "w4a16-linear")),
        (row("", quantisation="CompressedTensorsW4A4Fp4"), ("nvfp4-linear", "w4a16-linear")),
        (row("FlashInferFP8ScaledMMLinearKernel"), ("fp8-linear", "fp8-block")),
        (row("MARLIN", quantisation="Mxfp4MoEMethod", experts=(4, 128)), ()),
        (row("TRITON", quantisation="Fp8MoEMethod", experts=(4, 128)), ()),
        (row("", quantisation="ModelOptFp8KVCacheMethod", attention="FLASHINFER"), ()),
        (row("", quantisation="UnquantizedLinearMethod"), ()),
    ],
)
def test_kinds_by_the_releases_names(layer: LayerRow, kinds: tuple[str, ...]) -> None:
    assert kinds_of(layer) == kinds


def test_which_models_are_built(tmp_path: Path) -> None:
    known = models_to_build(None, (), {"nvfp4-moe"}, "0.33.0")
    assert {"qwen3-30b-a3b", "nemotron-3-super"} <= {model.name for model in known}
    assert all(model.config and not model.named for model in known)
    assert "gpt-oss-120b" not in {model.name for model in known}
    assert len({model.kinds for model in known}) == len(known), "one of each set of kinds"
    (one,) = models_to_build("nemotron-3-nano", (), {"fp8-block"}, "0.33.0")
    assert (one.named, one.activation) == (True, "relu2")
    (other,) = models_to_build("me/unknown", (), (), "0.33.0")
    assert (other.name, other.config, other.folder) == ("me/unknown", None, None)
    (folder,) = models_to_build(str(tmp_path), (), (), "0.33.0")
    assert folder.folder == tmp_path
    with pytest.raises(UsageError, match="unknown model 'nemotron-3-nan'"):
        models_to_build("nemotron-3-nan", (), (), "0.33.0")
