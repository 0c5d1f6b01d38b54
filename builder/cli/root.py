"""The program's entry; it loads only the command that is used.

Each command's options are in a module of their own, and only that module is imported.
"""

from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from builder.applier.files import DOCUMENT, read_regular
from builder.cli import COMMON
from builder.cli.command import CONTEXT, MAIN, App, examples, group_of
from builder.cli.commands import COMMANDS, GROUPS, Entry
from builder.common.console import console

_ABOUT = (
    "Container images that run NVFP4 models on NVIDIA DGX Spark (GB10, SM121): patch a vLLM "
    "release, prove without a GPU which kernels it selects, publish it."
)
_CODES = (
    "Exit codes: 0 ok, 2 usage, 3 nothing to do, 4 drift, 5 verification failed, 6 engine "
    "missing, 7 build failed, 8 remote failed, 9 stale, 10 needs a rebuild, 130 interrupted, "
    "143 terminated."
)
#: Options that need only the list of commands.
_WITHOUT_COMMAND = ("-h", "--help", "-V", "--version")


def _version(value: bool) -> None:
    if value:
        from builder import __version__

        print(f"spark-build {__version__}")
        raise typer.Exit


def common(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every detail.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback on unexpected errors.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Set the verbosity."""
    del debug, version  # --debug is read by the error boundary, --version by its callback
    console.quiet, console.verbose = quiet, verbose


def _held(entry: Entry) -> App:
    import_module(f"builder.cli.{entry.module}")
    return MAIN if entry in COMMANDS else group_of(entry.name)


def root() -> App:
    """The program, without commands."""
    one = App(
        name="spark-build",
        help=_ABOUT,
        epilog=examples(
            "spark-build plan -l b12x-full -b pypi:vllm==0.20.1",
            "spark-build image -l b12x-full",
            "docker logs NAME 2>&1 | spark-build diagnose -",
            note=_CODES,
        ),
        context_settings=CONTEXT,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    one.callback()(common)
    return one


def whole() -> App:
    """The program with all commands, in the order in which help lists them."""
    one = root()
    one.registered_commands = [_held(entry).info_of(entry.name) for entry in COMMANDS]
    for group in GROUPS:
        one.add_typer(_held(group), name=group.name, rich_help_panel=group.panel)
    return one


def listed() -> App:
    """The program with the names of all commands, to list them: nothing else is imported."""

    def nothing() -> None:
        pass

    one = root()
    for entry in (*COMMANDS, *GROUPS):
        one.command(entry.name, rich_help_panel=entry.panel, help=entry.summary)(nothing)
    return one


def command_for(words: list[str]) -> Any:
    """The part of the program that these words need: one command, or all."""
    return _command(next((word for word in words if word not in COMMON), ""))


@cache
def _command(named: str) -> Any:
    command: Any = typer.main.get_command(_app(named))
    for parameter in command.params:
        if parameter.name == "install_completion":
            parameter.callback = partial(_install_completion, parameter.callback)
    return command


#: Files below the home directory that typer writes for a shell's completion.
_COMPLETION_FILES = (
    ".bashrc",
    ".bash_completions/spark-build.sh",
    ".zshrc",
    ".zfunc/_spark-build",
    ".config/fish/completions/spark-build.fish",
)


def _install_completion(install: Any, context: Any, parameter: Any, value: Any) -> Any:
    """Install completion as typer does, which ends the program, and name the files that changed."""
    files = [Path.home() / name for name in _COMPLETION_FILES]
    before = {file: read_regular(file, DOCUMENT) if file.is_file() else None for file in files}
    try:
        return install(context, parameter, value)
    finally:
        for file, old in before.items():
            if file.is_file() and read_regular(file, DOCUMENT) != old:
                print(f"  {'written' if old is None else 'changed'}  {file}")


def _app(named: str) -> App:
    if named in _WITHOUT_COMMAND:
        return listed()
    one = root()
    for group in GROUPS:
        if group.name == named:
            one.add_typer(_held(group), name=named, rich_help_panel=group.panel)
            return one
    for entry in COMMANDS:
        if entry.name == named:
            one.registered_commands = [_held(entry).info_of(named)]
            return one
    return whole()
