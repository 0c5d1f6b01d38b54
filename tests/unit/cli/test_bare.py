"""A group of commands without a command, and completion that says what it changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.__main__ import run
from builder.cli.root import _command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called


@pytest.mark.parametrize(
    ("group", "command"),
    [("models", "list"), ("layers", "list"), ("cache", "show"), ("config", "show")],
)
def test_a_group_alone_shows_what_there_is(
    spark_build: Callable[..., Called], tmp_path: Path, group: str, command: str
) -> None:
    for options in ((), ("--json",)):
        bare, full = spark_build(group, *options), spark_build(group, command, *options)
        assert bare == full
        assert bare.code == 0
    assert f"Without a command: {command}." in spark_build(group, "--help").out
    assert spark_build(group, "nonsense").code == 2


@pytest.mark.parametrize("group", ["mods", "compile", "recipes"])
def test_other_groups_print_their_help(spark_build: Callable[..., Called], group: str) -> None:
    assert spark_build(group).out.startswith(f"Usage: spark-build {group}")


def test_completion_names_the_files_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    (tmp_path / ".bashrc").write_text("mine\n")
    _command.cache_clear()  # typer reads the variable when a command is made
    with pytest.raises(SystemExit) as ended:
        run(["--install-completion", "bash"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"  changed  {tmp_path}/.bashrc\n" in said
    assert f"  written  {tmp_path}/.bash_completions/spark-build.sh\n" in said
    files = {str(file) for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {line.split()[1] for line in said.splitlines() if line.startswith("  ")}
    assert Path.home() == tmp_path
