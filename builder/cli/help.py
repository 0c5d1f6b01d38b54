"""The layout of help texts: groups of commands, and examples to copy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from builder.cli.commands import BUILD, DEVELOP, INSPECT, MAINTAIN, PUBLISH, SERVE
from builder.common.hints import as_started

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.models import CommandFunctionType, CommandInfo

#: In the order in which help lists them.
_GROUPS = (BUILD, SERVE, INSPECT, PUBLISH, MAINTAIN, DEVELOP)
#: Options that may be empty: comma-separated names, and words for ``vllm serve``.
_MAY_BE_EMPTY = ("layers", "level", "require", "serve_args")
#: The names of ``--help``, on every command.
_HELP = ["-h", "--help"]
CONTEXT = {"help_option_names": _HELP}


def examples(*lines: str, note: str = "") -> str:
    """An epilogue with one line for each example, printed verbatim."""
    title = "Examples:" if len(lines) > 1 else "Example:"
    text = "\n".join(("\b", title, *(f"  {line}" for line in lines)))
    return f"{text}\n\n{note}" if note else text


def _group(command: Any) -> str | None:
    """The group of a command; typer has a placeholder if it has none."""
    panel = getattr(command, "rich_help_panel", None)
    return panel if panel in _GROUPS else None


class _AsWritten:
    """Converts flags, texts, paths and lists of these without pydantic.

    Typer uses pydantic, whose import takes as long as a warm plan.
    """

    def __init__(self, kind: Callable[[str], object]) -> None:
        self._kind = kind

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        """The value that the command receives.

        Raises:
            BadParameter: the value is empty, as from an unset shell variable.
        """
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        source = ctx.get_parameter_source(param.name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and param.name not in _MAY_BE_EMPTY and (value == "" or (several and "" in value)):
            raise typer.BadParameter("it is empty", ctx=ctx, param=param)
        return [self._kind(word) for word in value] if several else self._kind(value)


def _kind(parameter: Any) -> type | None:
    """The parameter's type if it is ``bool``, ``str``, ``Path`` or a list of one of them."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if get_origin(annotation) is list:
        (annotation,) = get_args(annotation)
    return annotation if annotation in (bool, str, Path) else None


def _as_written(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if kind := _kind(parameter):
            given = _AsWritten(kind)
            parameter.get_runtime_param = lambda given=given: given
    return parameters


class Commands(TyperGroup):
    """Commands in their groups; without a command they print their help, with exit 0."""

    #: the command that runs if none is named
    default = ""

    def get_params(self, ctx: Any) -> list[Any]:
        """Like the base class, but without pydantic; includes ``--help``."""
        return _as_written(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Like the base class, but no command means ``default``, or else ``--help``."""
        if not ctx.resilient_parsing:
            if not args:
                args = [self.default or "--help"]
            elif self.default and args[0].startswith("-") and args[0] not in _HELP:
                args = [self.default, *args]
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Like the base class, with commands as the user starts them."""
        return as_started(super().get_help(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Like the base class, and which command runs if none is named."""
        super().format_help_text(ctx, formatter)
        if self.default:
            formatter.write_paragraph()
            formatter.write_text(f"  Without a command: {self.default}.")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group; commands without a group get the section of the base class."""
        shown = [(n, c) for n in self.list_commands(ctx) if (c := self.get_command(ctx, n))]
        shown = [(name, command) for name, command in shown if not command.hidden]
        widest = max((len(name) for name, _ in shown), default=0)
        for group in (*_GROUPS, None):
            rows = [
                (name.ljust(widest), command.get_short_help_str(formatter.width - widest - 6))
                for name, command in shown
                if _group(command) == group
            ]
            if rows:
                with formatter.section(group or "Commands"):
                    formatter.write_dl(rows)


def running(name: str) -> type[Commands]:
    """Commands of which one runs if none is named."""
    return type("Running", (Commands,), {"default": name})


class Command(TyperCommand):
    """A command whose help shows arguments by name only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        parameters: list[Any] = self.params
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                # typer would add its type: "TARGET <str>"
                parameter.display_type_rich = lambda ctx: None  # noqa: ARG005

    def get_params(self, ctx: Any) -> list[Any]:
        """Like the base class, but without pydantic; includes ``--help``."""
        return _as_written(super().get_params(ctx))

    def get_help(self, ctx: Any) -> str:
        """Like the base class, with commands as the user starts them."""
        return as_started(super().get_help(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Like the base class, but ``TARGET`` instead of typer's ``{TARGET}``."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*)\}(\.\.\.)?$", r"\1\2", piece) for piece in pieces]


class App(typer.Typer):
    """Our commands, in groups."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Commands, **options})

    def command(
        self, *args: Any, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Like the base class, with :class:`Command`."""
        return super().command(*args, **{"cls": Command, **options})

    def info_of(self, name: str) -> CommandInfo:
        """The registered command of that name."""
        return next(info for info in self.registered_commands if _name(info) == name)


def _name(info: CommandInfo) -> str:
    """The name that typer gives the command."""
    return info.name or str(getattr(info.callback, "__name__", "")).replace("_", "-")
