"""Python's own programs are started in whatever folder the user is in: its modules do not run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builder.errors import RemoteError
from builder.proof.isolation import Command, call
from builder.proof.wholemodel import Release


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with modules that say that they were run."""
    monkeypatch.chdir(tmp_path)
    for name in ("pip", "this", "huggingface_hub", "json"):
        (tmp_path / f"{name}.py").write_text("open('run', 'w').close()\n")


def test_an_installation(tmp_path: Path) -> None:
    call(Command((sys.executable, "-m", "this")))
    assert not (tmp_path / "run").exists()


def test_a_download_from_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    release = cast("Any", Release.__new__(Release))
    release._prepared = SimpleNamespace(sandbox=SimpleNamespace(python=Path(sys.executable)))
    with pytest.raises(RemoteError, match="cannot read the configuration of a/b"):
        release.downloaded("a/b")
    assert not (tmp_path / "run").exists()
