"""A unit test that starts a program, opens a port or waits fails, whatever catches the refusal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest

from builder.ptx.native import core
from tests.unit.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable


def open_a_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


REFUSED: dict[str, Callable[[], object]] = {
    "starts a program: subprocess.Popen": lambda: subprocess.run(
        [sys.executable, "-c", ""], check=True
    ),
    "starts a program: os.posix_spawn": lambda: os.posix_spawn(sys.executable, ["python"], {}),
    "starts a program: os.system": lambda: os.system("true"),
    "starts a process: os.fork": os.fork,
    "starts a process: multiprocessing": get_context("spawn").Process(target=print).start,
    "opens a port: socket.bind": open_a_port,
    "sleeps for 0.02 s": lambda: time.sleep(0.02),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_unit_test_is_refused(what: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"a unit test {what}"), LIMITS.hold():
        REFUSED[what]()


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_that_is_caught_still_fails(what: str) -> None:
    def catches_everything() -> None:
        with suppress(BaseException):
            REFUSED[what]()

    with pytest.raises(pytest.fail.Exception, match=f"a unit test {what}"), LIMITS.hold():
        catches_everything()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_a_test_is_refused() -> None:
    def threaded() -> None:
        thread = threading.Thread(target=open_a_port)
        thread.start()
        thread.join()

    with pytest.raises(pytest.fail.Exception, match="opens a port"), LIMITS.hold():
        threaded()


def test_the_rest_is_allowed() -> None:
    with LIMITS.hold():
        time.sleep(0.001)
        assert threading.Event().wait(0) is False


def test_other_tests_are_not_held() -> None:
    """Those of other folders run in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIMITS, "_refused", None)
        with LIMITS.hold():
            pass
        open_a_port()


def test_these_tests_are_held() -> None:
    """``conftest.py`` holds each of them, this one too."""
    with pytest.raises(pytest.fail.Exception, match="opens a port"):
        open_a_port()
    refused = LIMITS._refused
    assert refused
    refused.clear()


def test_the_core_of_the_executor_is_compiled_before_the_first_test() -> None:
    """Else the first test that runs a kernel, whichever it is, would start a compiler."""
    core()
