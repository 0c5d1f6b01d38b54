"""Whether the command that an error suggests is one that the command line takes."""

from __future__ import annotations

import shlex
from contextlib import redirect_stdout
from typing import Any

import typer

from builder.__main__ import _common_first
from builder.cli.root import command_for
from builder.common.hints import PROGRAM


def problem(hint: str) -> str:
    """What is wrong with a hint that is a command; empty for others, and for good ones."""
    if hint.startswith("-"):
        return f"{hint}: options without their command"
    if not hint.startswith(f"{PROGRAM} "):
        return ""
    text = hint.partition(" > ")[0]
    try:
        with redirect_stdout(None):
            for command in text.split(" && "):
                _parse(_common_first(shlex.split(command)[1:]))
    except typer.Exit:  # of --help
        return ""
    except Exception as error:
        return f"{text}: {getattr(error, 'format_message', error.__repr__)()}"
    return ""


def _parse(words: list[str]) -> None:
    command: Any = command_for(words)
    context, name = None, PROGRAM
    while True:
        context = command.make_context(name, words, parent=context)
        if not hasattr(command, "commands"):
            return
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, words = command.resolve_command(context, rest)
