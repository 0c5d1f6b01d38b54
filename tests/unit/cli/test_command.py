"""A command is made from the dataclass of its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from builder.cli.command import App, Command, _flat
from builder.common.options import Argument, Fields, Option


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Options that several commands share."""

    layers: Annotated[tuple[str, ...], Option("Layers.", "L", "-l")] = ()
    refresh: Annotated[bool, Option("Ask again.")] = False
    #: not an option
    internal: str = "kept"


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Options of one command."""

    target: Annotated[str, Argument("The target.", "TARGET")]
    folders: Annotated[tuple[Path, ...], Option("Folders.", "DIR", "--in")]
    inner: Annotated[
        Inner,
        Fields("layers", "refresh", layers=Annotated[tuple[str, ...], Option("Other words.")]),
    ]
    dry_run: Annotated[bool, Option("Only show.", names="-n")] = False
    #: the same option as the inner one
    refresh: Annotated[bool, Option("Ask again.")] = False


def called(function: Any, *words: str) -> None:
    """Run a command of this function."""
    app = App()
    app.command("x", cls=Command)(_flat(function))
    command: Any = typer.main.get_command(app)
    command(args=list(words), prog_name="x", standalone_mode=False)


def test_fields_are_options_and_arguments() -> None:
    seen: list[Outer] = []

    def take(options: Outer) -> None:
        seen.append(options)

    called(take, "there", "--in", "a", "--in", "b", "--layers", "x", "-n", "--refresh")
    called(take, "there", "--in", "a")
    given, bare = seen
    assert given == Outer(
        target="there",
        folders=(Path("a"), Path("b")),
        inner=Inner(layers=("x",), refresh=True),
        dry_run=True,
        refresh=True,
    )
    assert bare == Outer(target="there", folders=(Path("a"),), inner=Inner())


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["there"], id="an option without a default is missing"),
        pytest.param(["--in", "a"], id="an argument is missing"),
        pytest.param(["there", "--in", "a", "-l", "x"], id="a name that the command replaces"),
        pytest.param(["there", "--in", "a", "--internal", "x"], id="a field without an option"),
        pytest.param(["there", "--in", "a", "--no-dry-run"], id="the opposite of a flag"),
    ],
)
def test_other_words_are_refused(words: list[str]) -> None:
    def take(options: Outer) -> None:
        raise AssertionError(options)

    with pytest.raises(Exception, match=r"(?i)missing|no such option") as refused:
        called(take, *words)
    assert getattr(refused.value, "exit_code", None) == 2


def test_a_field_that_does_not_exist_is_refused() -> None:
    def take(options: Annotated[Inner, Fields("layrs")]) -> None:
        raise AssertionError(options)

    with pytest.raises(TypeError, match="Inner has no layrs"):
        _flat(take)


def test_shared_options_come_last() -> None:
    def take(
        options: Annotated[Inner, Fields("refresh")],
        *,
        json: Annotated[bool, Option("JSON.")] = False,
        name: Annotated[str, Option("A name.")] = "",
    ) -> None:
        raise AssertionError(options, json, name)

    made: Any = _flat(take)
    assert list(made.__signature__.parameters) == ["name", "refresh", "json"]
