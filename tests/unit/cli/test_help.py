"""``--help`` is quick and complete."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.cli.root import whole
from tests.unit.commandlines import parse, root

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer

#: Slow to import, and of no use to ``--help`` and to shell completion.
ROOT = "spark-build"
#: Names of commands that only hold others.
GROUPS: list[str] = []


def commands() -> Iterator[tuple[list[str], str]]:
    """Every command with its epilogue."""
    pending: list[tuple[list[str], Any]] = [([], root())]
    while pending:
        words, command = pending.pop()
        yield words, command.epilog or ""
        if hasattr(command, "commands"):
            GROUPS.append(" ".join(words) or ROOT)
        for name, child in sorted(getattr(command, "commands", {}).items()):
            pending.append(([*words, name], child))


COMMANDS = {" ".join(words) or ROOT: (words, epilog) for words, epilog in commands()}


LEAVES = {name: COMMANDS[name] for name in COMMANDS if name not in GROUPS}


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line prints; no output else."""
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def examples_of(epilog: str) -> list[str]:
    """The lines of an epilogue that can be copied."""
    return [line.strip() for line in epilog.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize(("words", "epilog"), COMMANDS.values(), ids=COMMANDS.keys())
def test_help(words: list[str], epilog: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([*words, "--help"], capsys)
    assert out == shown([*words, "-h"], capsys)
    assert out.startswith(f"Usage: spark-build{' ' * bool(words)}{' '.join(words)} ")
    lines = out.splitlines()
    assert all(f"    {line}" in lines for line in examples_of(epilog)), "each on a line of its own"
    assert max(map(len, lines)) <= 80
    assert not re.search(r"<[a-z]|\{|\.\.\.\]\.\.\.", out), "typer's own names of types"
    cut = re.findall(r"^.* \S*\.\.\.$", rows_of(out), re.MULTILINE)
    assert not cut, "a summary that does not fit"


def rows_of(out: str) -> str:
    """The rows of the sections that list commands."""
    sections = re.findall(r"^(?!Usage|Options|Arguments)\w+:\n((?:  .*\n?)+)", out, re.MULTILINE)
    return "\n".join(sections)


@pytest.mark.parametrize(("words", "epilog"), COMMANDS.values(), ids=COMMANDS.keys())
def test_every_help_shows_working_examples(words: list[str], epilog: str) -> None:
    lines = examples_of(epilog)
    assert lines
    for line in lines:
        said = shlex.split(re.sub(r"^IMG=\$\((.*)\)$", r"\1", line).rpartition("| ")[2])
        said = said[: said.index(">")] if ">" in said else said
        assert said[: len(words) + 1] == ["spark-build", *words]
        parse(said[1:])


#: Groups that show something if no command is named (``test_bare.py``).
SHOWING = ("models", "layers", "cache", "config")


@pytest.mark.parametrize(
    "words", [[], *([name] for name in GROUPS if name not in ("spark-build", *SHOWING))]
)
def test_no_command_prints_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(words, capsys) == shown([*words, "--help"], capsys)


def test_commands_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([], capsys)
    titles = re.findall(r"^(\w+):$", out, re.MULTILINE)
    assert titles == ["Options", "Build", "Serve", "Inspect", "Publish", "Maintain", "Develop"]
    listed = re.findall(r"^  ([a-z][a-z-]+)  +\w", rows_of(out), re.MULTILINE)
    assert sorted(listed) == sorted(name for name in COMMANDS if " " not in name and name != ROOT)


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS.values()], ids=COMMANDS.keys())
def test_every_option_value_has_a_name(words: list[str]) -> None:
    command = root()
    for word in words:
        command = command.commands[word]
    for parameter in command.params:
        if parameter.param_type_name == "argument" or not parameter.is_flag:
            assert parameter.metavar, parameter.name


def test_the_version_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(["-V"], capsys) == shown(["--version"], capsys)


@pytest.mark.parametrize("words", [words for words, _ in LEAVES.values()], ids=LEAVES.keys())
def test_every_command_takes_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--json" in shown([*words, "--help"], capsys)


def test_typer_evaluates_no_annotation() -> None:
    """Strings, which ``from __future__ import annotations`` makes, are compiled at every start."""
    pending: list[typer.Typer] = [whole()]
    while pending:
        one = pending.pop()
        pending += [group.typer_instance for group in one.registered_groups if group.typer_instance]
        for command in one.registered_commands:
            assert command.callback is not None
            for annotation in command.callback.__annotations__.values():
                assert not isinstance(annotation, str), command.callback.__name__


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for word in ("0 ok", "2 usage", "3 nothing", "4 drift", "5 verification", "130 interrupted"):
        assert word in text
