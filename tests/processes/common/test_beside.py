"""Work beside other work: it ends with it, and its errors are somebody else's to tell."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from builder.common.background import check_cancelled, in_background, wait_for_background
from builder.common.console import Console
from builder.proof import sandbox
from builder.proof.isolation import Command, SandboxUnavailable, call
from builder.proof.sandbox import Torch


def test_it_runs_in_the_background() -> None:
    begun, done = threading.Event(), []

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        done.append(1)

    with in_background(work):
        assert begun.wait(600)
        assert not done
        wait_for_background()
        assert done


def test_a_background_error_is_raised_later(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ValueError

    with in_background(work):
        wait_for_background()
    assert capsys.readouterr() == ("", "")


def test_nothing_to_do() -> None:
    with in_background(None):
        wait_for_background()
    check_cancelled()


def interrupted(begun: threading.Event, work: object) -> None:
    assert callable(work)
    with in_background(work):
        assert begun.wait(600)
        raise KeyboardInterrupt


def test_an_interruption_stops_a_loop() -> None:
    begun, ended = threading.Event(), threading.Event()
    console = Console()
    console.quiet = True

    def work() -> None:
        try:
            with console.progress("torch", 10**12) as bar:
                while True:
                    bar.advance(1)
                    begun.set()
                    time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        interrupted(begun, work)
    assert ended.is_set()


def test_an_interruption_stops_a_subprocess(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()
    whole = tmp_path / "it ran to its end"
    code = f"import pathlib, time; time.sleep(120); pathlib.Path({str(whole)!r}).touch()"

    def work() -> None:
        begun.set()
        try:
            call(Command((sys.executable, "-c", code)))
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        interrupted(begun, work)
    assert ended.is_set()
    assert not whole.exists()


def test_a_failed_command_reports_its_last_lines() -> None:
    code = "import sys; print('no such package', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SandboxUnavailable, match="no such package"):
        call(Command((sys.executable, "-c", code)))


def test_background_work_stops_when_the_main_work_fails() -> None:
    """Two deep: the one in the middle waits for the other, and neither is wanted any more."""
    begun, ended = threading.Event(), []

    def inner() -> None:
        begun.set()
        try:
            while True:
                check_cancelled()
                time.sleep(0.01)
        finally:
            ended.append("inner")

    def outer() -> None:
        try:
            with in_background(inner):
                wait_for_background()
        finally:
            ended.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted(begun, outer)
    assert sorted(ended) == ["inner", "outer"]


def test_torch_and_the_dsl_are_fetched_while_the_rest_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = threading.Barrier(3)
    torch = Torch(folder=Path("torch"), version="1", what="a torch")
    calls: list[str] = []

    def begun(what: str) -> None:
        if what not in calls:  # later calls find it in the cache
            calls.append(what)
            every.wait(600)

    def fetched(wanted: str) -> Torch:
        begun(wanted)
        return torch

    def dsl(_sandbox: sandbox.Sandbox, _packages: object) -> Path:
        begun("dsl")
        return Path("dsl")

    monkeypatch.setattr(sandbox, "torch_folder", fetched)
    monkeypatch.setattr(sandbox.Sandbox, "prepare", lambda _: begun("packages"))
    monkeypatch.setattr(sandbox.Sandbox, "dsl", dsl)
    made = sandbox.make(sandbox.requirements_for("0.20.1"), "2.9.0", {"vllm": "0.20.1"})
    assert made.torch == torch
    assert made.paths == (Path("dsl"), Path("torch"))
    assert set(calls) == {"2.9.0", "packages", "dsl"}


def test_a_torch_that_is_not_available_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(_wanted: str) -> Torch:
        raise SandboxUnavailable("no torch")

    monkeypatch.setattr(sandbox, "torch_folder", fetched)
    monkeypatch.setattr(sandbox.Sandbox, "prepare", lambda _: None)
    monkeypatch.setattr(sandbox.Sandbox, "dsl", lambda _, __: Path("dsl"))
    with pytest.raises(SandboxUnavailable, match="no torch"):
        sandbox.make(sandbox.requirements_for("0.20.1"), "2.9.0", {"vllm": "0.20.1"})
