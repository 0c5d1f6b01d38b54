"""Known configurations, and the nearest one of a checkpoint that is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from builder.cli import lint as command
from builder.errors import RemoteError
from builder.proof.wholemodel import Refusal
from builder.serving.configurations import FORMS, _published, name_of, nearest
from builder.serving.lint import LintReport, lint
from builder.serving.models import Models
from tests.unit.serving.test_asked import FakeRelease
from tests.unit.serving.test_lint import FakeLinter

if TYPE_CHECKING:
    from builder.serving.preflight import Preflight, PreflightRequest


@pytest.mark.parametrize(
    ("model", "of", "own"),
    [
        ("nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-NVFP4", True),
        ("Qwen/Qwen3.8-Flash-Next", "Qwen/Qwen3.8-Flash-Next", True),
        ("/models/ZhipuAI--GLM-5.3-Flash", "zai-org/GLM-5.3-Flash", False),
        ("/hf/models--zai-org--GLM-5.2/snapshots/1", "zai-org/GLM-5.2", False),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", "deepseek-ai/DeepSeek-V4-Flash", False),
        ("me/Qwen3.6-35B-A3B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4", False),
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit",
         "nvidia/Qwen3.6-35B-A3B-NVFP4, in W4A16 as the name says", False),
        ("Qwen/Qwen3.5-27B-FP8", "Qwen/Qwen3.5-27B, in FP8 as the name says", False),
        ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", False),
        ("me/Qwen3.5-120B-A9B", "Qwen/Qwen3.5-122B-A10B", False),
        ("me/MiniMax-M2-AWQ", "MiniMaxAI/MiniMax-M2.7, in AWQ as the name says", False),
        ("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4-Flash", False),
        ("me/MiMo-V2.6-Flash-RL", "XiaomiMiMo/MiMo-V2-Flash", False),
        ("me/Qwen3-Coder-30B-A3B-Instruct-FP4", "nvidia/Qwen3-30B-A3B-NVFP4", False),
        # the list of what it leaves out is not complete where it was read
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
         "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", False),
    ],
)  # fmt: skip
def test_the_nearest_configuration(model: str, of: str, own: bool) -> None:
    found = nearest(model, Models.discover())
    assert found is not None
    assert (found.of, found.own) == (of, own)


@pytest.mark.parametrize(
    "model",
    ["me/Other-7B", "me/Qwen3.6-35B-A3B-GGUF", "me/GLM-5.3-Flash-TR3-4bpw", "m", "/models/x",
     "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp", "deepseek-ai/DeepSeek-V4-Pro",
     "Qwen/Qwen3-VL-30B-A3B-Instruct", "zai-org/GLM-4.7", "me/MiniMax-M4",
     # one without experts is none of one with experts
     "Qwen/Qwen3-0.6B"],
)  # fmt: skip
def test_no_configuration_is_near(model: str) -> None:
    assert nearest(model, Models.discover()) is None


@pytest.mark.parametrize(
    ("model", "of", "differs", "sized"),
    [
        ("me/Qwen3.6-35B-A3B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4", "", True),
        ("me/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "another size: the name says 9B", False),
        ("me/Qwen3.5", "Qwen/Qwen3.5-122B-A10B", "the name says no size, and there are several",
         False),
        ("me/MiniMax-M2", "MiniMaxAI/MiniMax-M2.7", "another model of the family", False),
        ("me/Qwen3.9-35B-A3B", "Qwen/Qwen3.5-35B-A3B", "another model of the family", True),
        ("nvidia/DeepSeek-V3.2-NVFP4", "nvidia/DeepSeek-V3.2-NVFP4",
         "what it leaves in 16 bits is not complete here", True),
    ],
)  # fmt: skip
def test_what_is_assumed_is_said(model: str, of: str, differs: str, sized: bool) -> None:
    found = nearest(model, Models.discover())
    own = nearest("nvidia/Kimi-K2.6-NVFP4", Models.discover())
    assert found is not None
    assert own is not None
    assert (found.of, found.differs, found.sized) == (of, differs, sized)
    said = f"the configuration of {of}"
    assert (found.assumed, own.assumed) == (f"{said} ({differs})" if differs else said, "")


def test_the_quantisation_is_that_of_the_name() -> None:
    found = nearest("me/Qwen3.5-27B-NVFP4", Models.discover())
    plain = nearest("me/Qwen3.6-27B-BF16", Models.discover())
    assert found is not None
    assert plain is not None
    assert found.config["quantization_config"] == FORMS["NVFP4"]
    assert "quantization_config" not in plain.config
    assert found.config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_lists_of_modules_are_whole() -> None:
    known = {one.id: one for one in _published()}
    names = known["zai-org/GLM-5.2-FP8"].config["quantization_config"]["modules_to_not_convert"]
    assert len(names) == len(set(names)) == 541
    assert not [name for one in known.values() for name in str(one.config).split() if "{3-" in name]


def test_every_configuration_names_its_model_and_source() -> None:
    for one in _published():
        assert one.config["architectures"], one.id
        assert one.source


@pytest.mark.parametrize(
    ("model", "name"),
    [("a/b", "b"), ("/m/a--b/", "b"), ("/c/models--a--b/snapshots/0", "b"), ("b", "b")],
)
def test_names(model: str, name: str) -> None:
    assert name_of(model) == name


# --------------------------------------------------------------------------------------- asked with


def offline(release: FakeRelease, text: str) -> LintReport:
    def asked(request: PreflightRequest) -> Preflight:
        if not request.model.startswith("/"):
            raise RemoteError("no network")
        return release(request)

    return lint([("x.sh", text)], FakeLinter(release="0.33.0", ask=asked), Models.discover())


def test_a_known_checkpoint_is_asked_offline() -> None:
    release = FakeRelease({"9": ("model", "no kernel")})
    report = offline(release, "vllm serve nvidia/Kimi-K2.6-NVFP4 --moe-backend 9")
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("refused", "error")
    (asked,) = report.asked
    assert (asked.answer, asked.configuration) == ("refused", "nvidia/Kimi-K2.6-NVFP4")


def test_what_a_near_configuration_is_refused_is_a_note() -> None:
    text = "vllm serve me/Qwen3.5-27B-NVFP4 --moe-backend marlin"
    report = offline(FakeRelease({"marlin": ("model", "no kernel")}), text)
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("refused", "note")
    assert "asked with the configuration of Qwen/Qwen3.5-27B, in NVFP4" in finding.message
    (asked,) = report.asked
    assert (asked.answer, asked.left_out) == ("settings accepted", ())
    report = offline(FakeRelease(), text)
    assert report.findings == ()
    assert report.asked[0].answer == "would start"
    assert report.asked[0].assumed == (
        "the configuration of Qwen/Qwen3.5-27B, in NVFP4 as the name says"
    )


def test_what_is_assumed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command._print(offline(FakeRelease(), "vllm serve me/Qwen3.5-27B-NVFP4"))
    out = capsys.readouterr().out
    assert "vLLM 0.33.0: would start, assumed: the configuration of Qwen/Qwen3.5-27B, in" in out


def test_a_note_of_a_near_configuration_hides_no_error_of_the_source() -> None:
    release = FakeRelease({"many": ("configuration", "this needs another model")})
    findings = offline(release, "vllm serve me/Qwen3.5-27B-NVFP4 --port many").findings
    assert [(one.rule, one.severity) for one in findings] == [
        ("bad-value", "error"), ("refused", "note"),
    ]  # fmt: skip


def test_another_size_says_nothing_of_memory() -> None:
    release = FakeRelease(
        {"9": ("memory", "needs 9 GiB more than are free")}, cache_bytes=-(3 << 30)
    )
    report = offline(release, "vllm serve me/Qwen3.5-9B --max-model-len 9")
    assert report.findings == ()
    assert report.asked[0].answer == "would start"
    assert not any(request.fits for request in release.asked if request.model.startswith("/"))


def test_what_no_model_decides_is_an_error_even_then() -> None:
    release = FakeRelease({"--ports": ("arguments", "unrecognized arguments: --ports")})
    (finding,) = offline(release, "vllm serve me/Qwen3.5-27B-NVFP4 --ports").findings
    assert (finding.rule, finding.severity) == ("refused", "error")
    assert "asked with" not in finding.message


def test_a_near_configuration_that_does_not_fit_is_a_note() -> None:
    release = FakeRelease(cache_bytes=-(3 << 30))
    (finding,) = offline(release, "vllm serve me/Qwen3.5-27B-NVFP4").findings
    assert (finding.rule, finding.severity) == ("does-not-fit", "note")


def test_a_refused_model_is_a_note_too() -> None:
    refusal = Refusal(type="ValueError", message="not supported", where="x.py:1", stage="model")
    release = FakeRelease()

    def refused(request: PreflightRequest) -> Preflight:
        if not request.model.startswith("/"):
            raise RemoteError("no network")
        answer = release(request)
        return structs.replace(answer, starts="no", refusal=refusal)

    linter = FakeLinter(release="0.33.0", ask=refused)
    files = [("x.sh", "vllm serve /models/ZhipuAI--GLM-5.3-Flash")]
    (finding,) = lint(files, linter, Models.discover()).findings
    assert finding.severity == "note"
    assert "refuses this: not supported" in finding.message


def test_a_release_is_not_asked_about_what_only_an_image_has() -> None:
    release = FakeRelease({"--of-a-fork": ("arguments", "unrecognized arguments: --of-a-fork")})
    text = "docker run eugr/spark-vllm-b12x vllm serve nvidia/Kimi-K2.6-NVFP4 --moe-backend b12x"
    report = offline(release, text)
    (asked,) = report.asked
    assert (asked.answer, report.findings) == ("starts", ())
    assert asked.left_out == ("--moe-backend b12x: only the image has it",)
    assert release.asked[-1].flags == ()
    report = offline(release, f"{text} --of-a-fork")
    assert [(one.rule, one.severity) for one in report.findings] == [("refused", "note")]
    assert report.asked[0].answer == "settings accepted"
