"""The ``try:`` line of an error: a complete command with the user's own arguments."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from builder.common.hints import PROGRAM, again, words
from builder.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Options of the user's command that are copied to a suggested command.
_CARRIED = ("--patches", "--forge-clone", "--plain-http", "--platform", "--python")
#: An option at the start of a hint, and the word after it.
_OPTION = re.compile(r"(--?[a-z][a-z-]*)(?:[ =](?!-)('[^']*'|(?:[^\s,;]|,(?=\S))+))?")
_LEAVE_OUT = re.compile(r"leave ((?:--[a-z-]+(?:, | and |(?= )))+) out")


def next_command(hint: str, code: int) -> str:
    """A hint as it is printed: a command that can be pasted, where there is one.

    Options are added to the user's own command, and those to leave out removed from it.  Another
    command of spark-build gets the options that it shares with the user's.  An error without a hint
    gets one by its exit code.
    """
    if not hint:
        return _by_code(code)
    if hint.startswith("-"):
        return _with_options(hint)
    if match := _LEAVE_OUT.fullmatch(hint):
        return _leaving_out(hint, re.findall("--[a-z-]+", match[1]))
    if hint.startswith(f"{PROGRAM} "):
        return _with_carried(hint)
    return hint


def _by_code(code: int) -> str:
    if code in (Exit.USAGE, Exit.NOTHING_TO_DO):
        return shlex.join([PROGRAM, *_command(words())[0], "--help"])
    if code == Exit.REMOTE:
        return again()
    if code == Exit.STALE:
        return _with_carried(f"{PROGRAM} lock")
    if code == Exit.NEEDS_REBUILD:
        return f"{PROGRAM} compile --help"
    if code == Exit.ENGINE:
        return f"{PROGRAM} config show"
    return again("--verbose") if code != Exit.BUG else ""


def _command(given: Sequence[str]) -> tuple[list[str], Any]:
    """The path of the (sub)command in these words, and typer's object for it."""
    from builder.cli.root import command_for

    path: list[str] = []
    command: Any = command_for(list(given))
    for word in given:
        if word.startswith("-"):
            if path:
                break
            continue
        below = getattr(command, "commands", {}).get(word)
        if below is None:
            break
        path.append(word)
        command = below
    return path, command


def _option(command: Any, name: str) -> Any:
    """The option of that name; None if the command does not have it."""
    return next((p for p in command.params if name in getattr(p, "opts", ())), None)


def _with_options(hint: str) -> str:
    own = _command(words())[1]
    command, more, rest = words(), [], hint
    while (match := _OPTION.match(rest)) and (option := _option(own, match[1])) is not None:
        more.append(match[1])
        if not option.is_flag:
            more += shlex.split(match[2]) if match[2] else [option.metavar or "VALUE"]
        if not option.multiple:
            command = _without(command, option)
        rest = rest[match.end(1) if option.is_flag else match.end() :].lstrip()
    return shlex.join([PROGRAM, *command, *more]) if more and not rest else hint


def _leaving_out(hint: str, names: Sequence[str]) -> str:
    own, command = _command(words())[1], words()
    for name in names:
        option = _option(own, name)
        command = _without(command, option) if option is not None else command
    return shlex.join([PROGRAM, *command]) if command != words() else hint


def _without(given: Sequence[str], option: Any) -> list[str]:
    remaining, skip = [], False
    for word in given:
        if skip:
            skip = False
        elif word in option.opts:
            skip = not option.is_flag
        elif not word.startswith(tuple(f"{name}=" for name in option.opts)):
            remaining.append(word)
    return remaining


def _with_carried(hint: str) -> str:
    path, command = _command(hint.split()[1:])
    if not path:
        return hint
    own = _command(words())[1]
    more: list[str] = []
    for name in _CARRIED:
        option = _option(own, name)
        if option is None or _option(command, name) is None or name in hint:
            continue
        if name == "--python" and "--base" in hint and "pypi:" not in hint:
            continue
        for value in _values(words(), option):
            more += [name, value]
    head = " ".join([PROGRAM, *path])
    return hint.replace(head, f"{head} {shlex.join(more)}", 1) if more else hint


def _values(given: Sequence[str], option: Any) -> list[str]:
    values = []
    for word, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word in option.opts and following:
            values.append(following)
        elif equals and name in option.opts:
            values.append(value)
    return values
