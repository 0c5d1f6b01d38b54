"""``preflight_probe``: an answer that a stand-in had a part in is none of the release's."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.serving.preflight import Refusal, not_the_releases
from tests.unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Callable

probe = load("preflight_probe")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Any]:
    """The answer of a release that builds a model with this function."""
    config = SimpleNamespace(create_engine_config=lambda: None)
    module = SimpleNamespace(set_current_vllm_config=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=module))
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    monkeypatch.setattr(probe, "parsed", lambda *_: config)
    monkeypatch.setattr(probe, "record_log", lambda _: ([], []))
    monkeypatch.setattr(probe, "settings_of", lambda _: {})
    monkeypatch.setattr(probe, "layers_of", lambda _: [])
    monkeypatch.setattr(probe, "caches_of", lambda _: [])

    def ask(build: Callable[[], object]) -> Any:
        monkeypatch.setattr(probe, "built", lambda *_: build())
        return probe.answer({"model": "m", "flags": []}, None, "")

    return ask


def swallowed() -> None:
    with contextlib.suppress(Exception):
        probe.Operator("torch.ops._C.supports")()


def launched() -> None:
    with contextlib.suppress(NotImplementedError):
        probe.Kernel(swallowed)[1,]()


def refused_because_of_it() -> None:
    swallowed()
    raise ValueError("no kernel supports this layer")


@pytest.mark.parametrize("build", [swallowed, launched, refused_because_of_it])
def test_a_stand_in_that_was_called_is_no_answer_though_its_error_was_caught(
    answered: Any, build: Any
) -> None:
    error = answered(build)["error"]
    assert error is not None
    named = {name: error[name] for name in ("type", "message", "where", "stage")}
    assert "called" in not_the_releases(Refusal(**named)) or "launched" in error["message"]
    assert answered(lambda: None)["error"] is None, "nor has the next question it"


def test_a_release_that_refuses_says_so(answered: Any) -> None:
    def refuse() -> None:
        raise ValueError("no kernel")

    assert answered(refuse)["error"]["message"] == "no kernel"
