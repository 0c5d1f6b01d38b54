"""Run ``spark-build`` in this process, in an empty directory, with one layer of a user's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from tests.unit.fakes import REPLACE, layer_text, no_sandbox, write_tree

if TYPE_CHECKING:
    from pathlib import Path

LAYER = layer_text(REPLACE)


class Result:
    """How a command ended, and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Call:
    """Runs ``spark-build`` in the directory of the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> Result:
        self._capsys.readouterr()
        try:
            code = run([str(word) for word in words])
        except SystemExit as stop:
            code = int(str(stop.code))
        return Result(code, *self._capsys.readouterr())


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """With the one layer, no Docker Engine and no sandbox."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": LAYER.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    no_sandbox(monkeypatch)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return Call(capsys)
