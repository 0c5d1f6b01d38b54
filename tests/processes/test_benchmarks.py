"""The benchmarks that need only this machine run without an error; their figures mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import __main__ as command
from benchmarks.__main__ import main

if TYPE_CHECKING:
    import pytest


def test_quick_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "start,diagnose"]) == 0
    assert "diagnose: 9 ways ran" in capfd.readouterr().out


def test_an_earlier_version_takes_part(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--only", "start", "--earlier", command.COMMAND]
    assert main(words) == 0
    assert "start: 4 ways ran" in capfd.readouterr().out
    assert main([*words[:-1], "false"]) == 1


def test_a_command_that_fails_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COMMAND", "false")
    assert main(["--quick", "--only", "start"]) == 1
    assert "start: failed" in capfd.readouterr().err
