"""The benchmarks that need only this machine run without an error; their figures mean nothing."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import pytest

from benchmarks import __main__ as command
from benchmarks import chance
from benchmarks.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


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


# ------------------------------------------------------------------------------ what chance decides


def chance_of(
    patch: pytest.MonkeyPatch, folder: Path, code: str, *words: str
) -> tuple[int, list[str]]:
    """The exit code and the rows, where this Python code stands for spark-build."""
    patch.setattr(chance, "_START", code)
    patch.setattr(chance, "COMMANDS", {"image": (), "preflight": ()})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = chance.main(["--rounds", "2", "--work", str(folder), *words])
    return status, out.getvalue().splitlines()


def test_documents_that_differ_in_times_alone_are_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = (
        "import json, os, sys, time; cache = os.environ['SPARK_BUILD_CACHE']\n"
        "print(json.dumps({'empty': not os.path.exists(cache + '/second'),"
        " 'timings': {'plan': time.time()},"
        " 'when': time.strftime('%Y-%m-%dT%H:%M:%SZ'), 'cache': cache}))\n"
    )
    status, rows = chance_of(monkeypatch, tmp_path, code, "--busy", "1")
    assert status == 0
    assert [row.split(" | ")[1:4] for row in rows[2:6]] == [
        ["uv", "image", "0"], ["uv", "preflight", "0"],
        ["pip", "image", "0"], ["pip", "preflight", "0"],
    ]  # fmt: skip
    assert rows[6].startswith("image: 1 different documents")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('{\"by\": \"' + sys.argv[1] + '\"}')",
        "import sys; print('{}'); sys.exit(sys.argv[1] == 'pip')",
        "print('no document')\nraise SystemExit(1)",
    ],
)
def test_documents_that_differ_and_failures_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    assert chance_of(monkeypatch, tmp_path, code)[0] == 1


def test_an_installer_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chance.main(["--with", "uv,conda"])
    assert "no installer conda" in capsys.readouterr().err
