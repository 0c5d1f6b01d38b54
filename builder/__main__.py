"""The entry point: turns every failure into one message and one documented exit code."""

from __future__ import annotations

import errno
import gc
import shlex
import sys
from contextlib import suppress
from typing import Any

from builder import settings
from builder.cli import COMMON
from builder.cli.commands import COMMAND_NAMES
from builder.common import console, shutdown
from builder.common.hints import (
    again,
    as_started,
    of_the_system,
    running,
    start_of_this_process,
    started_as,
)
from builder.errors import Exit

#: How a run that was ended from outside exits: as a shell shows a program that a signal ended.
_ENDED = {"SIGHUP": Exit.HUNG_UP, "SIGTERM": Exit.TERMINATED}

#: New objects between two searches for cycles.  Python's 700 suit a process that runs for long; a
#: plan makes a million objects, keeps most, and spent an eighth of its time on them.
_BETWEEN_COLLECTIONS = 200_000


def _report(words: list[str], code: int, message: str, hint: str = "") -> int:
    from builder.common.console import console

    with suppress(ImportError):  # what could not be imported is the error
        from builder.cli.nextcommand import next_command

        hint = next_command(hint, code)
    if "--json" in words:  # one document: what was found out, and why that is not all
        problem = {"code": code, "message": as_started(message), "hint": as_started(hint)}
        _print_document({**(console.document or {"schema": 1}), "error": problem})
    else:
        console.error(message, hint)
    return code


def _print_document(document: dict[str, Any]) -> None:
    import json

    # the same value, and no old workflow command of GitHub's, which may be anywhere in a line
    print(json.dumps(document, indent=2).replace("##[", "##\\u005b"))


def _common_first(words: list[str]) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    common = [word for word in words[:end] if word in COMMON]
    return [*common, *(word for word in words[:end] if word not in COMMON), *words[end:]]


def run(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code."""
    words = _common_first(sys.argv[1:] if argv is None else argv)
    before = (sys.stdout, sys.stderr)
    shutdown.ended.clear()
    try:
        with settings.during_a_command():
            code = _run(words)
    except OSError:  # the error cannot be shown
        if console.lost() is None:
            raise
        code = Exit.USAGE
    sys.stdout, sys.stderr = before  # which typer replaces when a pipe breaks
    error = console.lost()
    console.silence()
    if error is None or code in {*_ENDED.values(), Exit.INTERRUPTED}:
        return code
    if error.errno == errno.EPIPE:
        return Exit.BROKEN_PIPE
    with suppress(OSError):  # to stderr also with --json: the document has no place to go to
        hint = f"{again()} > FILE, on a disk that has room"
        _report([], Exit.USAGE, f"cannot write the output: {error.strerror}", hint)
    return Exit.USAGE


def _run(words: list[str]) -> int:
    try:
        from builder.cli.root import command_for
        from builder.common.console import NOTHING_LEFT, console

        console.document, console.left = None, NOTHING_LEFT
        running(words)
        result = command_for(words)(args=words, prog_name="spark-build", standalone_mode=False)
        if result == Exit.INTERRUPTED:  # what typer makes of an interruption, without a word
            return _interrupted(words)
        if console.document is not None:
            _print_document(console.document)
    except KeyboardInterrupt:
        return _interrupted(words)
    except SystemExit as error:  # what typer makes of a broken pipe, whosever it is
        if not isinstance(error.__context__, OSError):
            raise
        return _unexpected(words, error.__context__)
    except Exception as error:
        return _unexpected(words, error)
    return int(result or 0)


def _interrupted(words: list[str], then: Exception | None = None) -> int:
    """By the user, by a limit on the time, or by who ends the program.

    What failed after the interruption is in its message: then nobody knows what was left.
    """
    from builder.common.console import console
    from builder.common.shutdown import limit_over

    if message := limit_over():
        hint = "use a longer --time-limit; completed work is reused from the cache"
        return _report(words, Exit.BUILD_FAILED, message, hint)
    by = shutdown.ended_by()
    name = by.name if by else ""
    what = f"ended by {name}" if name in _ENDED else "interrupted"
    code = _ENDED.get(name, Exit.INTERRUPTED)
    left = f"after that: {then}" if then else console.left
    return _report(words, code, f"{what}; {left}", again())


def _is_interruption(error: BaseException | None) -> bool:
    """Whether an interruption is behind an error.

    A signal can come inside ``__set_name__`` while a module is imported; Python 3.11 makes a
    ``RuntimeError`` of whatever is raised there, with the interruption as its cause.  And what
    cleans up after an interruption can fail: then the interruption is the failure's context.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":  # typer's
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_passed_on(error: Exception) -> bool:
    """Whether an error only stands for an interruption, and nothing failed after that."""
    return type(error).__name__ == "Abort" or _is_interruption(error.__cause__)


def _unexpected(words: list[str], error: Exception) -> int:
    if isinstance(error, OSError) and console.lost():
        raise error  # not ours
    if _is_interruption(error):
        return _interrupted(words, None if _is_passed_on(error) else error)
    code, hint = getattr(error, "code", None), getattr(error, "hint", None)
    if isinstance(code, int) and isinstance(hint, str):  # SparkBuildError, or ApplyError
        return _report(words, code, str(error), hint)
    exit_code = getattr(error, "exit_code", None)
    if isinstance(exit_code, int):  # typer.Exit, typer.Abort and usage errors of the command line
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            return exit_code
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "spark-build"
        return _report(words, Exit.USAGE, str(format_message()), f"{command} --help")
    if "--debug" in words:
        raise error
    if message := of_the_system(error):
        return _report(words, Exit.USAGE, *message)
    kind = type(error).__name__
    return _report(
        words, Exit.BUG, f"internal error: {kind}: {error}", "run the same command with --debug"
    )


def main() -> None:
    """Console entry point."""
    gc.set_threshold(_BETWEEN_COLLECTIONS)
    started_as(start_of_this_process(), COMMAND_NAMES)
    shutdown.handle_signals()
    if console.watch():
        command = shlex.join(["spark-build", *sys.argv[1:]])
        hint = f"{command} > /dev/null, if the result is not needed"
        sys.exit(_report([], Exit.USAGE, "stdout is closed, so the result cannot be printed", hint))
    with shutdown.own_temporary_folder():
        code = run()
        shutdown.end_what_we_started()
        shutdown.ignore_signals()
    sys.exit(code)


if __name__ == "__main__":
    main()
