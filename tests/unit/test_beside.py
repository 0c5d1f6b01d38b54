"""Work beside other work: it ends with it, and its errors are somebody else's to tell."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from builder.beside import beside, check_wanted, wait_for_beside
from builder.console import Console
from builder.verify.installer import Command, SandboxUnavailable, call


def test_it_goes_on_beside() -> None:
    begun, done = threading.Event(), []

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        done.append(1)

    with beside(work):
        assert begun.wait(5)
        assert not done
        wait_for_beside()
        assert done


def test_an_error_is_not_told_here(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ValueError

    with beside(work):
        wait_for_beside()
    assert capsys.readouterr() == ("", "")


def test_nothing_to_do() -> None:
    with beside(None):
        wait_for_beside()
    check_wanted()


def interrupted(begun: threading.Event, work: object) -> None:
    assert callable(work)
    with beside(work):
        assert begun.wait(5)
        raise KeyboardInterrupt


def test_what_counts_ends_with_an_interruption() -> None:
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


def test_what_it_runs_ends_with_an_interruption() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            call(Command((sys.executable, "-c", "import time; time.sleep(60)")))
        finally:
            ended.set()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted(begun, work)
    assert ended.is_set()
    assert time.monotonic() - began < 5


def test_a_command_that_fails_gives_its_last_words() -> None:
    code = "import sys; print('no such package', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SandboxUnavailable, match="no such package"):
        call(Command((sys.executable, "-c", code)))
