"""Programs that get so much processor time, however busy the machine is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from builder.proof.isolation import ended, processor_time

#: The work is in a child, as the compiler's is.
SPINS = """
import os
if os.fork() == 0:
    while True: pass
os.wait()
"""
SLEEPS = "import time; time.sleep({}); print('done')"


def started(code: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-S", "-c", code]
    return subprocess.Popen(
        words, stdin=-1, stdout=-1, stderr=-1, text=True, start_new_session=True
    )


def test_the_work_of_children_counts() -> None:
    process = started(SPINS)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            ended(process, "", 0.5, busy=True)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def test_a_program_that_waits_for_its_turn_has_not_used_its_time() -> None:
    with started(SLEEPS.format(0.8)) as process:
        assert ended(process, "", 0.5, busy=True) == ("done\n", "")
    with started(SLEEPS.format(30)) as process, pytest.raises(subprocess.TimeoutExpired):
        ended(process, "", 0.5)


def test_a_program_that_waits_for_ever_is_ended_all_the_same() -> None:
    with started(SLEEPS.format(600)) as process, pytest.raises(subprocess.TimeoutExpired):
        ended(process, "", 0.1, busy=True)


def test_the_time_of_a_process_that_ended_is_unknown() -> None:
    assert processor_time(os.getpid()) > 0
    process = started("")
    process.communicate()
    with pytest.raises(OSError, match=str(process.pid)):
        processor_time(process.pid)
