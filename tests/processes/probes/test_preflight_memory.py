"""``preflight_probe``: a configuration decides how much is made, so memory and time are bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from builder.proof.wholemodel import Refusal, not_the_releases
from tests.unit.inimage import load

if TYPE_CHECKING:
    import pytest

probe = load("preflight_probe")


def test_a_question_has_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_MEMORY", 1 << 27)

    def greedy(*_: object) -> Any:
        try:
            return {"bytes": len(bytearray(1 << 28))}
        except MemoryError as error:
            return {"error": probe.failure(error, "model")}

    monkeypatch.setattr(probe, "answer", greedy)
    reply = probe.Child({}, SimpleNamespace(simulated=[]), "").reply()
    assert reply["error"]["type"] == "MemoryError"
    error = Refusal(type="MemoryError", message="")
    assert "memory" in not_the_releases(error)


def test_a_question_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MOST_SECONDS", 1)

    def endless(*_: object) -> Any:
        while True:
            pass

    monkeypatch.setattr(probe, "answer", endless)
    error = probe.Child({}, SimpleNamespace(simulated=[]), "").reply()["error"]
    told = Refusal(type=error["type"], message=error["message"])
    assert not_the_releases(told) == "building it takes more than 1 s of a processor"
