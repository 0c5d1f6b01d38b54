"""``preflight_weights``: which tensors a release is given, and which of its errors is a refusal."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.inimage import load
from tests.unit.serving.checkpoints import raw, safetensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

weights = load("preflight_weights")
probe = load("preflight_probe")

EXPERT = ("BF16", [4, 8])
LAYER = "model.layers.0.mlp.experts."


def tensors_of_experts(count: int) -> dict[str, Any]:
    return {f"{LAYER}{number}.up_proj.weight": EXPERT for number in range(count)}


def the_checkpoint(folder: Path, tensors: dict[str, Any]) -> Any:
    safetensors(folder / "model.safetensors", tensors)
    return weights.Checkpoint(str(folder))


def test_experts_between_the_first_and_the_last_are_left_out(tmp_path: Path) -> None:
    checkpoint = the_checkpoint(tmp_path, {**tensors_of_experts(5), "norm.weight": ("BF16", [8])})
    file = checkpoint.open(tmp_path / "model.safetensors")
    names = [f"{LAYER}{number}.up_proj.weight" for number in (0, 4)]
    assert file.keys() == [*names, "norm.weight"]
    assert checkpoint.tensors == 6


@pytest.mark.parametrize(
    "odd",
    [
        {f"{LAYER}2.up_proj.weight": ("BF16", [4, 9])},
        {f"{LAYER}2.up_proj.weight": ("F32", [4, 8])},
        {f"{LAYER}2.up_proj.scale": ("F32", [])},
    ],
    ids=["shape", "dtype", "name"],
)
def test_an_expert_that_differs_is_loaded(tmp_path: Path, odd: dict[str, Any]) -> None:
    checkpoint = the_checkpoint(tmp_path, {**tensors_of_experts(5), **odd})
    assert set(odd) <= set(checkpoint.open(tmp_path / "model.safetensors").keys())


@pytest.mark.parametrize(
    "header", ["{", "[]", '{"a": 1}', '{"a": {"dtype": 1, "shape": []}}', '{"a": {"dtype": "F32"}}']
)
def test_a_header_that_is_malformed(tmp_path: Path, header: str) -> None:
    raw(tmp_path / "model.safetensors", header.encode())
    with pytest.raises(weights.NotAskedError, match=r"model\.safetensors: its header is malformed"):
        weights.Checkpoint(str(tmp_path))


class Model:
    """A model with two parameters."""

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}

    def modules(self) -> list[Any]:
        return [self, *self._modules.values()]

    def named_parameters(self) -> list[tuple[str, object]]:
        return [("model.norm.weight", None), (f"{LAYER}w13_weight", None)]


RAISES = {
    "a name": "raise ValueError(\"There is no module or parameter named 'layers.0.odd' in Model\")",
    "a parameter": "raise ValueError(\"not initialized from checkpoint: {'model.norm.weight'}\")",
    "a key": '{}["layers.0.experts.w13_input_scale"]',
    "a shape": "class T: shape = 1\nassert T.shape == 2",
    "a message": 'assert False, "Tried to load weights of size torch.Size([1])"',
    "on purpose": "raise AttributeError(\"no parameter 'w2_odd' for 'model.layers.0.experts.0'\")",
}
OTHERS = {
    "by mistake": "None.data",
    "a size that is none": "tp_size = 1\nassert tp_size == 2",
    "no name": 'raise ValueError("2 is not supported")',
    "a key that is no name": '{}["cuda"]',
    "torch": 'raise RuntimeError("The size of tensor a (1) must match the size of tensor b (2)")',
    "a kind": 'raise NotImplementedError("model.norm.weight")',
}


def raised(code: str, folder: Path, place: str) -> Any:
    """What is said of an error that a line of this file raises while a tensor was read."""
    file = folder / place
    file.parent.mkdir(parents=True)
    file.write_text(code)
    checkpoint = the_checkpoint(folder, {"model.norm.weight": ("BF16", [8])})
    checkpoint.last = "model.norm.weight"
    try:
        exec(compile(code, str(file), "exec"), {})
    except Exception as error:
        return weights.refused(error, probe.failure(error, "loading"), Model(), checkpoint)
    raise AssertionError("it raises nothing")


@pytest.mark.parametrize("code", RAISES.values(), ids=RAISES)
def test_what_a_loader_raises_about_a_name_or_a_shape_is_a_refusal(
    code: str, tmp_path: Path
) -> None:
    said = raised(code, tmp_path, "vllm/loader.py")
    assert said["refusal"]["stage"] == "loading"
    assert said["refusal"]["message"]
    assert said["tensor"] == "model.norm.weight (BF16 [8])"


@pytest.mark.parametrize("code", OTHERS.values(), ids=OTHERS)
def test_another_error_of_a_loader_is_no_refusal(code: str, tmp_path: Path) -> None:
    said = raised(code, tmp_path, "vllm/loader.py")
    assert "refusal" not in said
    assert "it ended with " in said["not_asked"]
    assert "loader.py" in said["not_asked"]


@pytest.mark.parametrize("code", RAISES.values(), ids=RAISES)
def test_an_error_elsewhere_is_no_refusal(code: str, tmp_path: Path) -> None:
    assert "refusal" not in raised(code, tmp_path, "torch/nn/module.py")


def test_a_part_that_transformers_makes_may_have_other_names_in_an_image(tmp_path: Path) -> None:
    checkpoint = the_checkpoint(tmp_path, {"visual.norm.weight": ("BF16", [8])})
    tower = type("Tower", (), {"__module__": "transformers.models.x", "_modules": {}})()
    model = Model()
    model._modules["visual"] = tower
    failed = {"type": "KeyError", "message": "", "where": "", "innermost": "/vllm/x.py"}
    error = KeyError("visual.norm.weight")
    assert "Transformers" in weights.doubt(error, "", failed, model, checkpoint)
    assert not weights.doubt(KeyError("model.norm.weight"), "", failed, model, checkpoint)
    inside = ValueError("There is no module or parameter named 'layers.0.odd' in Tower. There are")
    assert "Transformers" in weights.doubt(inside, "", failed, model, checkpoint)


def refusal(where: str) -> Any:
    return {"refusal": {"where": where}}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([{}], {}),
        ([refusal("a"), {}], {}),
        ([refusal("a"), refusal("a")], refusal("a")),
        ([refusal("a"), refusal("b")], {"not_asked": "it ended in two ways: a and b"}),
    ],
    ids=["none", "without them alone", "the same", "another"],
)
def test_a_refusal_without_some_experts_is_asked_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Any], said: Any
) -> None:
    checkpoint = the_checkpoint(tmp_path, tensors_of_experts(5))
    left = list(answers)
    monkeypatch.setattr(weights, "attempt", lambda *_: left.pop(0))
    assert weights.loading(None, Model(), None, checkpoint, probe.failure) == said
    assert not left


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What is said of loading with a release whose loader does something."""
    nothing = contextlib.nullcontext
    torch = SimpleNamespace(device=nothing)
    vllm = SimpleNamespace(set_current_vllm_config=nothing)
    modules = {"torch": torch, "vllm.config": vllm}
    monkeypatch.setattr(probe.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(probe, "on_meta", nothing)

    def ask(does: Callable[[], object], folder: Path, log: Any) -> Any:
        def loads(*_: object) -> list[str]:
            does()
            return []

        monkeypatch.setattr(weights, "load", loads)
        config = SimpleNamespace(model_config=SimpleNamespace(model=str(folder)))
        return probe.loading_of(config, Model(), None, log)

    return ask


def test_loading_says_how_many_tensors_there_are(
    tmp_path: Path, release: Callable[..., Any]
) -> None:
    safetensors(tmp_path / "model.safetensors", {"model.norm.weight": ("BF16", [8])})
    log: dict[str, list[str]] = {"lines": ["before"], "warnings": []}
    (said,) = release(lambda: log["lines"].append("Checkpoint size: 0.00 GiB"), tmp_path, log)
    assert (said["part"], said["tensors"], said["refusal"]) == ("model", 1, None)
    assert log["lines"] == ["before"]
    assert set(said) == set(weights.LOADING)
    json.dumps(said)


def test_a_stand_in_that_loading_calls_is_no_answer(
    tmp_path: Path, release: Callable[..., Any]
) -> None:
    safetensors(tmp_path / "model.safetensors", {"model.norm.weight": ("BF16", [8])})
    before = list(probe.CALLED)

    def calls() -> None:
        with contextlib.suppress(Exception):
            probe.Operator("torch.ops._C.fp8")()
        raise KeyError("model.norm.weight")

    (said,) = release(calls, tmp_path, {"lines": [], "warnings": []})
    assert said["refusal"] is None
    assert "torch.ops._C.fp8" in said["not_asked"]
    assert before == probe.CALLED, "the rest of the answer stands"


def test_without_files_nothing_is_loaded(tmp_path: Path, release: Callable[..., Any]) -> None:
    def fails() -> None:
        raise AssertionError

    assert release(fails, tmp_path, {"lines": [], "warnings": []}) == []
