"""``--help`` is quick and complete."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from builder.__main__ import run
from builder.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Slow to import, and of no use to ``--help`` and to shell completion.
HEAVY = ("requests", "urllib3", "docker", "jinja2", "pypi_simple", "packaging", "filelock")


def commands() -> Iterator[tuple[list[str], str]]:
    """Every command with its epilogue."""
    root = typer.main.get_command(app)
    pending: list[tuple[list[str], Any]] = [([], root)]
    while pending:
        words, command = pending.pop()
        yield words, command.epilog or ""
        for name, child in sorted(getattr(command, "commands", {}).items()):
            pending.append(([*words, name], child))


COMMANDS = {" ".join(words) or "spark-build": (words, epilog) for words, epilog in commands()}


@pytest.mark.parametrize(("words", "epilog"), COMMANDS.values(), ids=COMMANDS.keys())
def test_help(words: list[str], epilog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"Usage: spark-build{' ' * bool(words)}{' '.join(words)} ")
    assert " ".join(epilog.split()) in " ".join(out.split())


@pytest.mark.parametrize("name", ["plan", "image", "verify", "apply", "revert", "matrix"])
def test_the_main_commands_show_an_example(name: str) -> None:
    assert f"spark-build {name}" in COMMANDS[name][1]


@pytest.mark.parametrize("name", ["plan", "image", "verify", "apply", "revert", "layers show"])
def test_commands_that_read_or_build_take_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*name.split(), "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["image", "--help"], ["--version"]])
def test_heavy_modules_are_not_imported(words: list[str]) -> None:
    code = (
        "import json, sys\nfrom builder.__main__ import run\nrun(sys.argv[1:])\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *words]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(json.loads(answer.stderr))
    assert "builder.cli.app" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for word in ("0 ok", "2 usage", "3 nothing", "4 drift", "5 verification", "130 interrupted"):
        assert word in text
