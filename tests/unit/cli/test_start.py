"""A start imports the command that is named, and nothing that it can do without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import typer

from builder.cli.command import _kind
from builder.cli.commands import COMMANDS, GROUPS
from builder.cli.root import command_for
from tests.unit.commandlines import root
from tests.unit.fakes import layer_text, write_tree

if TYPE_CHECKING:
    from pathlib import Path


WHOLE: Any = root()


GAMMA = """op = "replace"
file = "vllm/kernels.py"
old = "kept = first_of_gamma << 1"
new = "kept = first_of_gamma * 2"
"""


@pytest.fixture
def plan(tmp_path: Path) -> tuple[str, ...]:
    """A plan for a released wheel."""
    text = layer_text(GAMMA, when=">=1.0.0")
    write_tree(tmp_path / "patches", {"fix/layer.toml": text.encode()})
    base = "pypi:vllm==1.3.0"
    return ("plan", "-l", "fix", "-b", base, "--patches", str(tmp_path / "patches"))


# --------------------------------------------------------------------- one command, as in the whole


def commands(group: Any, *words: str) -> list[tuple[str, ...]]:
    """The words of every command below a group."""
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        inner = commands(command, *words, name) if hasattr(command, "commands") else []
        found += inner or [(*words, name)]
    return found


def at(group: Any, words: tuple[str, ...]) -> Any:
    """The command of these words."""
    for word in words:
        group = group.commands[word]
    return group


@pytest.mark.parametrize("words", commands(WHOLE), ids=" ".join)
def test_a_command_loaded_alone_is_the_same(words: tuple[str, ...]) -> None:
    alone: Any = command_for(["-q", *words])
    assert list(alone.commands) == [words[0]]
    one, same = at(alone, words), at(WHOLE, words)
    context = typer.Context(same, info_name="x", help_option_names=["-h", "--help"])
    assert one.get_help(context) == same.get_help(context)
    assert [p.opts for p in one.params] == [p.opts for p in same.params]


@pytest.mark.parametrize("words", [[], ["nosuch"], ["--install-completion"]])
def test_other_arguments_load_all_commands(words: list[str]) -> None:
    some: Any = command_for(words)
    assert list(some.commands) == list(WHOLE.commands)


def test_the_list_of_commands_matches_their_help() -> None:
    listed: Any = command_for(["--help"])
    context = typer.Context(WHOLE, info_name="spark-build", help_option_names=["-h", "--help"])
    assert listed.get_help(context) == WHOLE.get_help(context)
    assert {entry.name for entry in (*COMMANDS, *GROUPS)} == set(WHOLE.commands)


# ----------------------------------------------------------------------- values as typer takes them


def parameters() -> list[Any]:
    """One parameter of each form: its type, whether there may be several, whether it is needed."""
    found: dict[Any, Any] = {}
    for words in commands(WHOLE):
        for parameter in at(WHOLE, words).params:
            annotation = parameter.type_descriptor.annotation
            found.setdefault((annotation, parameter.multiple, parameter.nargs), parameter)
    return list(found.values())


@pytest.mark.parametrize("parameter", parameters(), ids=lambda p: p.name)
def test_values_are_converted_like_by_typer(parameter: Any) -> None:
    kind = _kind(parameter)
    several = parameter.multiple or parameter.nargs == -1
    values: list[Any] = [True, False] if kind is bool else ["", "a", "ä/b", "-", "../x y"]
    values = [7] if kind is None else values
    context = typer.Context(at(WHOLE, ("plan",)))
    at(WHOLE, ("plan",)).get_params(context)
    theirs = type(parameter).get_runtime_param(parameter)
    ours = parameter.get_runtime_param()
    for value in [None, *([tuple(values), ()] if several else values)]:
        expected = theirs.coerce(value, param=parameter, ctx=context)
        got = ours.coerce(value, param=parameter, ctx=context)
        assert (got, type(got)) == (expected, type(expected)), value


def test_every_parameter_except_numbers_is_text() -> None:
    """A type that typer must check costs every start of its command the import of pydantic."""
    for parameter in parameters():
        if _kind(parameter) is None:
            assert parameter.type_descriptor.annotation is int, parameter.name
