"""How a run ends from outside: signals, closed and full streams, a folder that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A command that starts something that starts something else, leaves files, and waits.
SLOW = """
    import os, subprocess, sys, tempfile
    import builder.cli.config
    from builder.__main__ import main

    def slow():
        with tempfile.TemporaryDirectory() as folder:
            print(folder, file=sys.stderr, flush=True)
            subprocess.run(["sh", "-c", "mktemp >&2; sleep 60 & echo $! >&2; wait"])

    builder.cli.config.cache_dir = slow
    sys.argv[1:] = ["config", "show"]
    main()
"""


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), **more}


def gone(process: int) -> bool:
    """Whether a process has ended, at most a few seconds from now."""
    for _ in range(100):
        stat = Path(f"/proc/{process}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_command_and_its_children(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = sorted(process.stderr.readline().strip() for _ in range(3))
    assert len(list(tmp_path.glob("tmp/*/*"))) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert gone(int(said[-1]) if said[-1].isdigit() else int(said[0]))
    assert list((tmp_path / "tmp").iterdir()) == []
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert err.splitlines()[0] == f"error: {what}; no partial output was left"


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As ``nohup`` has it."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + textwrap.dedent(SLOW)],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.terminate()
    process.communicate(timeout=600)
    assert process.returncode == 143


def shell(tmp_path: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``$SB WORDS`` in a script of bash."""
    program = f"{sys.executable} -m builder"
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=environment(tmp_path, SB=program, PYTHONPATH=root),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("words", [("schema", "plan"), ("layers", "list", "--json")], ids=" ".join)
def test_a_full_disk_below_stdout(tmp_path: Path, words: Sequence[str]) -> None:
    done = shell(tmp_path, '$SB "$@" > /dev/full', *words)
    assert done.returncode == 2
    command = f"{sys.executable} -m builder {' '.join(words)}"
    assert done.stderr.splitlines() == [
        "error: cannot write the output: No space left on device",
        f"  try: {command} > FILE, on a disk that has room",
    ]


@pytest.mark.parametrize("script", [
    '$SB schema plan | true; echo "${PIPESTATUS[0]}" >&2',
    '{ sleep 0.3; $SB schema plan; echo "$?" >&2; } | true',
])  # fmt: skip
def test_a_broken_pipe_is_quiet(tmp_path: Path, script: str) -> None:
    for _ in range(3):  # the reader may have gone before, or not yet
        done = shell(tmp_path, script)
        assert done.stderr in ("141\n", "0\n"), done.stderr
        if done.stderr == "141\n":
            return
    pytest.fail("the pipe never broke")


def test_a_full_stderr_pipe(tmp_path: Path) -> None:
    done = shell(tmp_path, "$SB layers check nonsense 2> /dev/full")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_closed_streams(tmp_path: Path) -> None:
    done = shell(tmp_path, "$SB schema >&-")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: stdout is closed, so the result cannot be printed",
        f"  try: {sys.executable} -m builder schema > /dev/null, if the result is not needed",
    ]
    done = shell(tmp_path, "$SB layers show nonsense 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = shell(tmp_path, "$SB diagnose - <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: standard input: The log is empty.\n")


@pytest.mark.parametrize(
    "words", [("layers", "new", "x"), ("plan", "-l", "b12x-full", "-b", "dir:site"), ("schema",)]
)
def test_a_deleted_working_directory(tmp_path: Path, words: Sequence[str]) -> None:
    (tmp_path / "gone").mkdir()
    done = shell(tmp_path, 'cd gone; rmdir ../gone; $SB "$@"', *words)
    if words == ("schema",):
        assert done.returncode == 0
        return
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 2
    assert "a bug" not in done.stderr
