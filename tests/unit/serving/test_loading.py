"""What preflight says of loading a checkpoint's weights by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder.cli import preflight as command
from builder.proof import wholemodel as asked
from builder.proof.weightheaders import WeightHeaders, weight_headers
from builder.proof.wholemodel import Loading, ModelReply, Refusal
from builder.serving.loading import loading_words, loadings, refusal_to_load
from tests.unit.serving.checkpoints import safetensors
from tests.unit.serving.test_preflight import a_release, answer, document, layer

NAME = "There is no module or parameter named 'x'"
KNOWN = WeightHeaders(files={"model.safetensors": b""})


def refused(message: str, kind: str = "ValueError", innermost: str = "/s/vllm/a.py") -> Loading:
    error = Refusal(
        type=kind, message=message, where="vllm/a.py:1 in f", stage="loading", innermost=innermost
    )
    return Loading(tensors=3, refusal=error, tensor="x.weight (BF16 [8])")


def words_of(*said: Loading, weights: WeightHeaders = KNOWN, **values: Any) -> list[str]:
    return list(loading_words(loadings(answer(loading=said, **values), weights)))


def test_what_a_loader_took() -> None:
    assert words_of(Loading(tensors=3)) == [
        "the release's loader refuses none of 3 tensors by name and shape"
    ]


def test_parameters_that_got_nothing_are_named() -> None:
    names = tuple(f"{number}.input_scale" for number in range(4))
    (words,) = words_of(Loading(tensors=3, without_weight=names, without_weight_total=129))
    assert words.endswith(
        "; it fills 129 parameters from none: 0.input_scale, 1.input_scale, 2.input_scale, ..."
    )


def test_a_refusal_is_not_said_twice() -> None:
    assert words_of(refused(NAME)) == ["the release refuses it: ValueError, as above"]


def test_without_headers_loading_is_not_asked_and_says_why() -> None:
    assert words_of(weights=WeightHeaders(unknown="no files")) == ["not asked: no files"]


def test_what_was_asked_without_an_answer_is_not_known() -> None:
    (words,) = words_of(Loading(tensors=3, not_asked="an operator was called", tensor="x.weight"))
    assert words == "not known: an operator was called; last tensor: x.weight"


def test_a_draft_model_has_its_own_words() -> None:
    draft = (layer(part="draft"),)
    assert words_of(Loading(tensors=3), layers=draft)[1] == (
        "draft model: not asked: the names of its tensors are not known"
    )
    both = (Loading(tensors=3), Loading(part="draft", not_asked="--load-format x has another"))
    assert words_of(*both, layers=draft)[1].startswith("draft model: not asked: --load-format x")


def test_a_model_that_was_not_built_has_no_loading() -> None:
    error = Refusal(type="ValueError", message="no kernel")
    assert loadings(answer(error=error), KNOWN) == ()


def test_a_refusal_says_which_tensor_and_is_short() -> None:
    names = ", ".join(f"layers.{number}.weight" for number in range(1000))
    error = refusal_to_load([refused(f"Following weights were not initialized: {names}")])
    assert error is not None
    assert error.message.endswith("...; last tensor: x.weight (BF16 [8])")
    assert len(error.message) < 500
    assert refusal_to_load([Loading(tensors=3)]) is None


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (refused(NAME), True),
        (refused(NAME, "AttributeError"), True),
        (refused(NAME, innermost="/s/torch/nn/module.py"), False),
        (refused(NAME, innermost="/builder/probes/preflight_weights.py"), False),
        (refused("Cannot copy out of meta tensor; no data!", "KeyError"), False),
        (refused("its library is not here", "StandInError"), False),
    ],
)
def test_whether_an_error_of_loading_is_the_releases(said: Loading, counts: bool) -> None:
    (judged,) = loadings(answer(loading=(said,)), KNOWN)
    assert (judged.refusal is not None) is counts
    assert bool(judged.not_asked) is not counts


def test_the_answer_shows_it_in_the_text_and_in_json() -> None:
    shown = document(starts="yes", refusal=None, loading=(Loading(not_asked="no files"),))
    assert "  loading    not asked: no files" in list(command._lines(shown))
    assert any("loading" in line for line in command._lines(shown))


def test_an_answer_that_is_not_whole_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a release was not asked may depend on this machine."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    release, requests = a_release(tmp_path, monkeypatch)
    torn = answer(loading=(Loading(tensors=3, not_asked="MemoryError"),))
    with monkeypatch.context() as patch:
        patch.setattr(asked, "ask_server", lambda *_, **_more: ModelReply(answers=(torn,)))
        release.ask(tmp_path, [()])
    release.ask(tmp_path, [()])
    assert len(requests) == 1


def test_headers_of_a_draft_reach_the_release_where_those_of_the_model_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        safetensors(folder / "model.safetensors", {"norm.weight": ("BF16", [8])})
        (folder / "config.json").write_text(json.dumps({"model_type": folder.name}))
    release, requests = a_release(tmp_path, monkeypatch)
    flags = ["--speculative-config", json.dumps({"method": "eagle", "model": str(draft)})]
    release.ask(model, [flags], weights=weight_headers(model))
    release.ask(model, [flags])
    folders = [request["questions"][0]["models"] for request in requests]
    files = [[sorted(f.name for f in Path(one).iterdir()) for one in row] for row in folders]
    both = ["config.json", "model.safetensors"]
    assert files == [[both, both], [["config.json"], ["config.json"]]]
