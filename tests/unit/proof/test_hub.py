"""What is told of a checkpoint on Hugging Face that cannot be read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from builder.errors import RemoteError
from builder.proof.hub import hub_checkpoint

LONG = "We could not connect to the server.\n" * 40


def told(monkeypatch: pytest.MonkeyPatch, out: object, err: str = "") -> None:
    """Let the client's process end with this output."""
    text = out if isinstance(out, str) else json.dumps(out)

    def ended(words: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(words, 0, text, err)

    monkeypatch.setattr(subprocess, "run", ended)


def error(*kinds: str) -> dict[str, Any]:
    return {"error": {"kinds": [*kinds, "Exception"], "message": LONG}}


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (error("LocalEntryNotFoundError", "ConnectionError"), "its cache here lacks it"),
        (error("GatedRepoError", "RepositoryNotFoundError"), "gives access on request"),
        (error("RepositoryNotFoundError", "HTTPError"), "no such model, or it is private"),
        (error("ReadTimeout", "Timeout", "OSError"), "does not answer"),
        (error("KeyError"), "KeyError: We could not connect to the server."),
        ("", "no message"),
    ],
)
def test_an_error_is_one_sentence(reply: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    told(monkeypatch, reply)
    with pytest.raises(RemoteError, match=why) as caught:
        hub_checkpoint("a/b", python=Path("python"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "a/b" in str(caught.value)
    assert "http://mirror" in str(caught.value) or reply == ""
    assert caught.value.hint


def test_headers_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"kinds": ["NotASafetensorsRepoError"], "message": LONG}
    told(monkeypatch, {"folder": "x", "headers": missing})
    read = hub_checkpoint("a/b", python=Path("python"), headers=True)
    assert (read.folder, read.tensors) == (Path("x"), ())
    assert read.without_headers == "it has no safetensors files"
    told(monkeypatch, "noise\n" + json.dumps({"folder": "x", "tensors": [["a", "BF16", 4]]}))
    assert hub_checkpoint("a/b", python=Path("python")).tensors == (("a", "BF16", 4),)
