"""A model's file from an id on Hugging Face: read by its own client, from a server of this test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.serving.models import read_model
from tests.unit.serving.checkpoints import checkpoint

from .cli import Ran
from .hubserver import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[..., Ran]

CONFIG: dict[str, Any] = {
    "architectures": ["X"], "model_type": "x", "max_position_embeddings": 4096,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}  # fmt: skip


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """A command, in an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def called(*words: object) -> Ran:
        capsys.readouterr()
        code = run([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return called


@pytest.fixture(name="asked")
def a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server with the model ``me/My-Model``, and what it was asked for."""
    model = tmp_path / "models" / "me" / "My-Model"
    for name in ("My-Model", "gated", "other"):
        (tmp_path / "models" / "me" / name).mkdir(parents=True)
    checkpoint(model, {"lm_head.weight": ("BF16", [200, 4000])}, CONFIG)
    (model / "modeling_x.py").write_text("raise SystemExit\n")
    (model.parent / "other" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub(tmp_path / "models") as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked


def test_an_id_is_read_without_weights_or_code(call: Call, asked: list[str]) -> None:
    done = call("models", "add", "me/My-Model", "--models", "own")
    assert done.code == 0, done.err
    model = read_model(Path(done.out.strip()))
    assert (model.name, model.id.value) == ("my-model", "me/My-Model")
    assert model.weight_bytes is not None
    assert model.weight_bytes.value == 1_600_000
    assert model.config is not None
    assert model.config.value["quantization_config"] == CONFIG["quantization_config"]
    weights = [path for path in asked if "model.safetensors" in path and "index" not in path]
    assert any("bytes=0-" in path for path in weights)
    assert not any("modeling_x" in path for path in asked)
    assert list(Path("../home").rglob("config.json"))
    assert not list(Path("../home").rglob("*.safetensors"))
    assert "exists" in call("models", "add", "me/My-Model", "--models", "own").err
    assert call("models", "add", "me/My-Model", "--models", "own", "--force").code == 0


@pytest.mark.usefixtures("asked")
def test_a_model_without_safetensors_is_told(call: Call) -> None:
    done = call("models", "add", "me/other", "--models", "own")
    assert done.code == 0
    assert "it has no safetensors files" in done.err
    assert read_model(Path("own/other.toml")).weight_bytes is None


@pytest.mark.usefixtures("asked")
def test_from_its_cache_without_a_network(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("models", "add", "me/My-Model", "--dry-run").code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = call("models", "add", "me/My-Model", "--models", "own")
    assert done.code == 0
    assert "the bytes of its weights are not known: HF_HUB_OFFLINE is set" in " ".join(
        done.err.split()
    )
    refused = call("models", "add", "me/never", "--models", "own")
    assert refused.code == 8
    assert len(refused.err.splitlines()) <= 4


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("me/none", "there is no such model, or it is private"),
        ("me/gated", "its owner gives access on request"),
        ("me/a/b", "is no id"),
    ],
)
def test_what_cannot_be_had_is_told_in_few_lines(call: Call, name: str, why: str) -> None:
    done = call("models", "add", name, "--id", "me/x", "--models", "own")
    assert done.code in (2, 8)
    assert why in " ".join(done.err.split())
    assert len(done.err.splitlines()) <= 4
    assert not Path("own").exists()


def test_no_network_is_told_in_few_lines(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = call("models", "add", "me/mine", "--models", "own")
    assert done.code == 8
    assert "cannot be reached" in " ".join(done.err.split())
    assert len(done.err.splitlines()) <= 4


def test_a_token_is_sent(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_folder = tmp_path / "models" / "me" / "own"
    checkpoint_folder.mkdir(parents=True)
    (checkpoint_folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub(tmp_path / "models", token="hf_x") as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert call("models", "add", "me/own", "--dry-run").code == 8
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        assert call("models", "add", "me/own", "--dry-run").code == 0
