"""Command lines that a text names are held against the parser."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import typer.main

from builder.cli.root import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Options of the program itself, which may stand after a command.
_COMMON = ("-q", "--quiet", "-v", "--verbose", "--debug")


@functools.cache
def root() -> Any:
    """The command that holds all others."""
    return typer.main.get_command(whole())


def parse(words: Sequence[str]) -> None:
    """Parse what follows ``spark-build``; an unknown command or option is an error."""
    rest = [word for word in words if word not in _COMMON]
    command = root()
    context = command.make_context("spark-build", [], resilient_parsing=True)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    assert not hasattr(command, "commands"), f"no command: {' '.join(words)}"
    context.resilient_parsing = False
    command.make_parser(context).parse_args(rest)
