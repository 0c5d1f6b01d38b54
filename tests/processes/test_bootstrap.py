"""The lanes of the whole suite, started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from builder import bootstrap
from tests.unit.fakes import write_tree
from tests.unit.test_bootstrap import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def lanes(capfd: pytest.CaptureFixture[str], **scripts: str) -> tuple[int, list[str]]:
    """The exit status and the lines of lanes that are Python programs."""
    commands = {name: [sys.executable, "-c", text] for name, text in scripts.items()}
    code = bootstrap.run_lanes(commands)
    return code, capfd.readouterr().out.splitlines()


def test_lanes_report_while_they_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second lane's line arrives before its end: it ends only when the first has seen it."""
    seen = tmp_path / "seen"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(seen)!r}).exists(): time.sleep(.01)"
    code, lines = lanes(capfd, fast=f"open({str(seen)!r}, 'w'); print('1\\n2')", slow=waits)
    assert code == 0
    assert lines == ["fast | 1", "fast | 2"]


#: Stands for a Python whose pip installs for long, and says so when it is interrupted.
PIP = """#!/bin/sh
trap 'echo Traceback; exit 1' INT
echo pip runs >&2
i=0
while [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done
"""


@pytest.mark.parametrize("during", ["venv", "pip"])
def test_an_interrupted_set_up_has_no_traceback(tmp_path: Path, during: str) -> None:
    """As Ctrl-C: all processes of the terminal's group get the signal."""
    if during == "pip":
        for name in ("pip", "python"):
            file = write_tree(tmp_path / "venv", {f"bin/{name}": PIP.encode()}) / "bin" / name
            file.chmod(0o755)
    set_up = subprocess.Popen(
        [sys.executable, str(ROOT / "builder" / "bootstrap.py"), "models"],
        env={**os.environ, "SPARK_BUILD_VENV": str(tmp_path / "venv")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert set_up.stderr is not None
    first = set_up.stderr.readline()
    if during == "pip":
        assert set_up.stderr.readline() == "pip runs\n"
    os.killpg(set_up.pid, signal.SIGINT)
    _, rest = set_up.communicate(timeout=60)
    assert first.startswith("• setting up ")
    assert set_up.returncode == 130
    assert rest == "error: interrupted; the same command goes on where this one stopped\n"


@pytest.mark.parametrize("broken", ["one", "two"])
def test_a_failed_lane_fails_the_run(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    scripts = {"one": "print('a')", "two": "print('b')", broken: "raise SystemExit(5)"}
    assert lanes(capfd, **scripts)[0] == 5


def test_progress_and_failures_come_in_whole_lines(pytester_run: Any) -> None:
    done = pytester_run(
        "import pytest\n@pytest.mark.parametrize('n', range(120))\ndef test_it(n): assert n != 70\n"
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert re.match(r"50 of 120 tests, 0 failed, 0:\d\d$", lines[0])
    assert lines[1] == "FAILED test_it.py::test_it[70] (call)"
    assert re.match(r"100 of 120 tests, 1 failed, ", lines[2])
    assert re.match(r"120 of 120 tests, 1 failed, ", lines[3])
    assert lines[-1].startswith("1 failed, 119 passed in ")


@pytest.fixture
def pytester_run(tmp_path: Path) -> Any:
    """Run a file of tests with the lanes' plugin."""

    def run(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lane", "--rootdir=."]
        return subprocess.run(
            [*command, "test_it.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run
