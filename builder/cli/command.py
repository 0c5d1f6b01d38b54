"""How a command is made: its options from a dataclass, its place in help, examples to copy."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from builder.cli.commands import (
    BUILD,
    COMMANDS,
    DEVELOP,
    GROUPS,
    INSPECT,
    MAINTAIN,
    PUBLISH,
    SERVE,
    Entry,
)
from builder.common.hints import as_started
from builder.common.options import Argument, Fields, Option
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from typer.models import CommandFunctionType, CommandInfo


_F = TypeVar("_F", bound="Callable[..., None]")

#: In the order in which help lists them.
_GROUPS = (BUILD, SERVE, INSPECT, PUBLISH, MAINTAIN, DEVELOP)
#: Options that may be empty: comma-separated names, and words for ``vllm serve``.
_MAY_BE_EMPTY = ("layers", "level", "require", "serve_args")
#: Options that many commands have, and that come last in their help.
_LAST = " forge_clone locked refresh _plain_http json "
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


#: The commands of the table whose modules were imported.
MAIN = App()
_groups: dict[str, App] = {}


def command(
    name: str, *lines: str, note: str = "", detail: str = "", unknown: bool = False
) -> Callable[[_F], _F]:
    """Register a command of the table, with examples; ``detail`` follows its summary.

    With ``unknown``, options that it does not have are arguments.
    """
    entry = _entry(COMMANDS, name)
    text = f"{entry.summary}\n\n{detail}" if detail else entry.summary
    context = {**CONTEXT, "ignore_unknown_options": True} if unknown else None
    settings = {"rich_help_panel": entry.panel, "context_settings": context}
    return _registered(MAIN, name, examples(*lines, note=note), text, **settings)


class Group(App):
    """The commands below a name of the table; registered when its module is imported."""

    def __init__(self, name: str, *lines: str, default: str = "") -> None:
        kind = running(default) if default else Commands
        super().__init__(help=_entry(GROUPS, name).summary, epilog=examples(*lines), cls=kind)
        _groups[name] = self

    def sub(self, name: str, *lines: str, note: str = "") -> Callable[[_F], _F]:
        """Register a command below this name; its docstring is its help."""
        return _registered(self, name, examples(*lines, note=note))


def group_of(name: str) -> App:
    """The registered commands below that name."""
    return _groups[name]


def _entry(entries: Iterable[Entry], name: str) -> Entry:
    return next(entry for entry in entries if entry.name == name)


def _registered(
    app: App, name: str, epilog: str, text: str | None = None, **settings: Any
) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        about = text or function.__doc__
        app.command(name, epilog=epilog, help=about, **settings)(_flat(function))
        return function

    return register


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: with the fields of dataclasses as parameters."""
    given = signature(function).parameters.values()
    spread = _Spread(function, ((p.name, p.annotation, p.default) for p in given), Fields())

    def run(**values: Any) -> None:
        spread.call(values)

    parameters = sorted(spread.parameters.values(), key=lambda p: _LAST.find(f" {p.name} "))
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


class _Spread:
    """A function or a dataclass, and the parameters that its arguments come from."""

    def __init__(
        self, call: Callable[..., Any], given: Iterable[tuple[str, Any, Any]], taken: Fields
    ) -> None:
        rows = list(given)
        if unknown := taken.names - {name for name, _, _ in rows}:
            raise TypeError(f"{call.__name__} has no {', '.join(sorted(unknown))}")
        self._call = call
        self._own: list[str] = []
        self._inner: dict[str, _Spread] = {}
        self.parameters: dict[str, Parameter] = {}
        for name, annotation, default in rows:
            wanted = taken.changed.get(name, annotation)
            is_annotated = get_origin(wanted) is Annotated
            kind, *hints = get_args(wanted) if is_annotated else (wanted,)
            if is_dataclass(kind):
                part = next((hint for hint in hints if isinstance(hint, Fields)), Fields())
                inner = ((f.name, f.type, f.default) for f in fields(kind))
                self._inner[name] = _Spread(kind, inner, part)  # type: ignore[arg-type]
                for key, parameter in self._inner[name].parameters.items():
                    self.parameters.setdefault(key, parameter)
            elif hints and taken.has(name):
                self._own.append(name)
                self.parameters.setdefault(name, _parameter(name, kind, hints[0], default))

    def call(self, values: Mapping[str, Any]) -> Any:
        """The result, with the values that were given; None means the default."""
        own = {
            name: tuple(value) if isinstance(value, list) else value
            for name in self._own
            if (value := values[name]) is not None
        }
        return self._call(**own, **{name: part.call(values) for name, part in self._inner.items()})


def _parameter(name: str, kind: Any, option: Option, default: Any) -> Parameter:
    needed = default in (MISSING, Parameter.empty)
    if get_origin(kind) is tuple:  # typer knows lists
        several: Any = list[get_args(kind)[0]]  # type: ignore[misc]
        kind, default = (several if needed else several | None), default or None
    info = _info(name, option)
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, info],
        default=Parameter.empty if needed else default,
    )


def _info(name: str, option: Option) -> Any:
    """Typer's description of an option."""
    settings: dict[str, Any] = {
        "help": option.help,
        "metavar": option.metavar,
        "autocompletion": _completion(option.complete),
        "envvar": option.envvar,
        "callback": option.callback,
        "min": option.least,
        "max": option.most,
    }
    if isinstance(option, Argument):
        return typer.Argument(**settings)
    names = option.names.split()
    if not any(word.startswith("--") for word in names):
        names = [f"--{name.strip('_').replace('_', '-')}", *names]
    return typer.Option(*names, **settings)


def _completion(words: tuple[str, ...] | str) -> Any:
    from builder.cli import complete

    if isinstance(words, str):
        return getattr(complete, words)
    return complete.one_of(*words) if words else None


# ---------------------------------------------------------------------- options of several commands


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def _ask_for_plain_http(hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Called for every command that has the option, given or not: each run starts afresh."""
    from builder.images.registry.reference import ask_for_plain_http

    ask_for_plain_http(hosts or ())
    return hosts


#: Its callback stores it; registry clients read it from ``Options.from_environment``.
PlainHttp = Annotated[
    tuple[str, ...],
    Option(
        "A registry to contact over plain HTTP; may be repeated (also: SPARK_BUILD_PLAIN_HTTP).",
        "HOST[:PORT]",
        callback=_ask_for_plain_http,
    ),
]


def seconds_of(text: str) -> int:
    """``30d`` as seconds; seconds, minutes, hours, days and weeks.

    Raises:
        UsageError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration such as 90s, 45m, 12h, 30d or 2w")
    return int(match[1]) * _SECONDS[match[2]]


def bytes_of(text: str) -> int:
    """``5GB`` as bytes; units of 1000, or of 1024 as in ``5GiB``.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _BYTES:
        raise UsageError(f"{text!r} is not a size such as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * _BYTES[match[2].upper()])
