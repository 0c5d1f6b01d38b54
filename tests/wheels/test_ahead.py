"""The kernels of an image are asked for while it is built: by the question that its proof asks.

Another question would be wasted, because the proof would ask again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.proof.cached import EvidenceCache
from builder.proof.runners import InSandbox
from builder.proof.sandbox import folder_of
from builder.proof.target import Refusal

from .cli import called

if TYPE_CHECKING:
    from pathlib import Path

    from builder.proof.replies import DispatchRequest


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What is asked ahead and by the proof; a sandbox is missing, and nothing is made."""
    asked: dict[str, list[Any]] = {"ahead": [], "proof": []}

    def record(name: str, result: object) -> Any:
        def ask(runner: InSandbox, request: DispatchRequest) -> object:
            asked[name].append((folder_of(runner._tree), request, runner._packages))
            return result

        return ask

    monkeypatch.setattr(EvidenceCache, "get", lambda *_: None)
    monkeypatch.setattr(EvidenceCache, "put", lambda *_: None)
    monkeypatch.setattr(InSandbox, "common_maker", lambda _: lambda: None)
    monkeypatch.setattr(InSandbox, "maker", lambda _: None)
    monkeypatch.setattr(InSandbox, "ahead", record("ahead", None))
    monkeypatch.setattr(InSandbox, "dispatch", record("proof", Refusal("not in this test")))
    return asked


@pytest.mark.parametrize(
    "words",
    [
        ("--layers", "b12x-full", "--base", "pypi:vllm==0.20.1"),
        ("--layers", "b12x-full", "--base", "pypi:vllm==0.33.0"),
        ("--layers", "marlin", "--base", "pypi:vllm==0.24.0"),
    ],
    ids=["many files", "few files", "marlin"],
)
def test_the_question_is_that_of_the_proof(
    words: tuple[str, ...], asked: dict[str, list[Any]], tmp_path: Path
) -> None:
    called("image", *words, "--output", "oci:out", cwd=tmp_path)
    assert len(asked["ahead"]) == 1
    assert asked["ahead"] == asked["proof"]
