"""Asking a release: what its own code replies is not believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builder.errors import SparkBuildError
from builder.proof import opening, recording
from builder.proof.replies import DispatchReply, reply_of
from tests.unit.fakes import BACKEND, FakeRunner, fake_base, make_layer, make_plan_of, vllm_files


@pytest.mark.parametrize("reply", [None, [], {"answers": 3}, {"answers": [{"kind": 1}]}], ids=str)
def test_a_malformed_reply_is_an_error(reply: object, monkeypatch: pytest.MonkeyPatch) -> None:
    base = fake_base(vllm_files())
    runner = FakeRunner(ask=lambda _request: reply_of(reply, DispatchReply))
    target = SimpleNamespace(name="t", runner=runner)
    monkeypatch.setattr(opening, "target_of_plan", lambda *_, **__: target)
    with pytest.raises(SparkBuildError, match="the probe's answer is malformed"):
        recording.by_itself(make_plan_of(base, make_layer("fix", BACKEND)), base)


@pytest.mark.parametrize("where", ["answers", "choices", "fatal"])
def test_what_this_machine_caused_is_never_recorded(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a killed child would stand in the table as a refusal of the release."""
    error = {"type": "Crashed", "message": "the child that asked ended with signal 9"}
    answer: Any = {"kind": "nvfp4-linear", "selected": None, "lines": [], "error": error}
    reply = reply_of({where: error if where == "fatal" else [answer]}, DispatchReply)
    base = fake_base(vllm_files())
    target = SimpleNamespace(name="t", runner=FakeRunner(ask=lambda _request: reply))
    monkeypatch.setattr(opening, "target_of_plan", lambda *_, **__: target)
    with pytest.raises(SparkBuildError, match="t: the child that asked ended with signal 9"):
        recording.by_itself(make_plan_of(base, make_layer("fix", BACKEND)), base)
