"""What preflight asks: read from serve commands, with the options of the command line first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.pipeline.options import PlanOptions
from builder.serving.options import Given
from builder.serving.preflightfile import request_of

if TYPE_CHECKING:
    from pathlib import Path

    from builder.serving.preflight import PreflightRequest

SCRIPT = """\
export VLLM_USE_DEEP_GEMM=0 PATH=/own
vllm serve org/model --moe-backend marlin --max-model-len 4096
"""
COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.24.0-cu130
    environment: {VLLM_USE_DEEP_GEMM: "0"}
    command: --model org/model --moe-backend marlin
"""
RECIPE = "# org/model on vLLM 0.27.1, profile marlin, solo\nvllm serve org/model\n"
TWO = "vllm serve org/a\nvllm serve org/b\nvllm serve org/b\n"


def asked(model: str, *flags: str, **options: Any) -> PreflightRequest:
    return request_of(Given(model=model, flags=flags, **options))


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "serve.sh").write_text(SCRIPT)
    return str(tmp_path / "serve.sh")


def test_a_script(script: str) -> None:
    request = asked(script, release="0.33.0")
    assert request.model == "org/model"
    assert request.flags == ("--moe-backend", "marlin", "--max-model-len", "4096")
    assert request.variables == ("VLLM_USE_DEEP_GEMM=0",), "PATH is not the release's"
    assert request.plan.base == "pypi:vllm==0.33.0"


def test_options_go_before_the_file(script: str, tmp_path: Path) -> None:
    request = asked(
        script, "--max-model-len", "8192", release="0.33.0", checkpoint=tmp_path,
        variables=("VLLM_USE_DEEP_GEMM=1",),
    )  # fmt: skip
    assert request.flags == ("--max-model-len", "8192", "--moe-backend", "marlin")
    assert request.variables[-1] == "VLLM_USE_DEEP_GEMM=1"
    assert request.model == str(tmp_path)


def test_a_compose_file_names_the_release(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)
    request = asked(str(file))
    assert request.model == "org/model"
    assert request.flags == ("--moe-backend", "marlin")
    assert request.plan.base == "pypi:vllm==0.24.0"
    assert asked(str(file), release="0.33.0").plan.base == "pypi:vllm==0.33.0"
    own = COMPOSE.replace("vllm/vllm-openai:v0.24.0-cu130", "me/vllm:1")
    file.write_text(own.replace("--model org/model", "vllm serve org/model"))
    assert asked(str(file)).plan.base == "me/vllm:1"


def test_a_recipe_names_its_release_and_profile(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(RECIPE)
    request = asked(str(file))
    assert (request.plan.base, request.plan.names) == ("pypi:vllm==0.27.1", ("marlin",))
    other = asked(str(file), plan=PlanOptions(layers=("b12x-full",)))
    assert other.plan.names == ("b12x-full",)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("vllm serve org/model --moe-backend marlin", ()),
        ("vllm", ("serve", "org/model", "--moe-backend", "marlin")),
        ("docker run vllm/vllm-openai:v0.33.0 --model org/model --moe-backend marlin", ()),
    ],
)
def test_the_command_itself(model: str, flags: tuple[str, ...]) -> None:
    request = asked(model, *flags, plan=PlanOptions(base="oci:out"))
    assert request.model == "org/model"
    assert request.flags == ("--moe-backend", "marlin")


def test_a_value_of_the_moment_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    request = asked("vllm serve org/model --max-model-len $LEN --enforce-eager", release="0.33.0")
    assert request.flags == ("--enforce-eager",)
    assert "--max-model-len is left out" in capsys.readouterr().err


def test_a_model_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (str(tmp_path), str(tmp_path / "config.json"), "org/model", "gpt-oss-120b"):
        assert asked(model, release="0.33.0").model == model


def test_one_of_several_commands(tmp_path: Path) -> None:
    file = tmp_path / "both.sh"
    file.write_text(TWO)
    with pytest.raises(UsageError, match=r"2 different serve commands, on lines 1 .*3 \(org/b\)"):
        asked(str(file), release="0.33.0")
    assert asked(f"{file}:2", release="0.33.0").model == "org/b"
    with pytest.raises(UsageError, match="no vllm serve command on line 9"):
        asked(f"{file}:9", release="0.33.0")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("echo nothing", {"release": "0.33.0"}, "contains no vllm serve command"),
        ("vllm serve $MODEL", {"release": "0.33.0"}, "the model is known only when"),
        ("vllm serve /no/such/folder", {"release": "0.33.0"}, "is not a folder here"),
        ("vllm serve org/model", {}, "one of them is needed"),
        ("org/model", {}, "one of them is needed"),
        ("org/model", {"release": "x"}, "is not a version"),
        ("org/model", {"release": "0.33.0", "releases": "all"}, "only one of them"),
        (
            "org/model",
            {"release": "0.33.0", "plan": PlanOptions(base="oci:out")},
            "only one of them",
        ),
    ],
)
def test_what_is_not_clear(model: str, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(model, **options)


def test_a_checkpoint_is_for_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a model itself"):
        asked("org/model", release="0.33.0", checkpoint=tmp_path)


@pytest.mark.parametrize("memory", ["0", "7", "4097", "-1", "many", "1e3", "nan", "9" * 5000, ""])
def test_memory_of_no_machine(memory: str) -> None:
    with pytest.raises(UsageError, match="memory of a machine"):
        request_of(Given(model="./m", release="0.33.0", memory=memory))


def test_memory_of_a_smaller_machine() -> None:
    asked = request_of(Given(model="./m", release="0.33.0", memory="60.5"))
    assert asked.memory == int(60.5 * 2**30)


def test_flags_of_a_file_that_name_code_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--worker-cls a.b --max-model-len 9 --log-config-file=/x"
    (tmp_path / "serve.sh").write_text(f"vllm serve org/model {words}\n")
    request = asked(str(tmp_path / "serve.sh"), "--tokenizer", "own", release="0.33.0")
    assert request.flags == ("--tokenizer", "own", "--max-model-len", "9"), "the user's own stay"
    assert [text.split()[0].partition("=")[0] for text in request.left_out] == [
        "--worker-cls", "--log-config-file",
    ]  # fmt: skip
    assert "--worker-cls is left out: it names code" in capsys.readouterr().err


def test_a_parser_that_comes_with_a_plugin_is_left_out_with_it(tmp_path: Path) -> None:
    """A release would refuse its name, and tool choice without it."""
    words = "--enable-auto-tool-choice --tool-call-parser own --tool-parser-plugin own.py --seed 1"
    (tmp_path / "serve.sh").write_text(f"vllm serve org/model {words}\n")
    request = asked(str(tmp_path / "serve.sh"), release="0.33.0")
    assert "--seed" in request.flags
    assert not any("tool" in word for word in request.flags)
    assert len(request.left_out) == 3
    (tmp_path / "serve.sh").write_text("vllm serve org/model --tool-call-parser hermes\n")
    assert "--tool-call-parser" in asked(str(tmp_path / "serve.sh"), release="0.33.0").flags
