"""The error boundary: every failure becomes one message and one documented exit code."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

from builder.errors import Exit

_INTERRUPTED = "interrupted; nothing half-written was left"


def _report(words: list[str], code: int, message: str, hint: str = "") -> int:
    from builder.console import console

    if "--json" in words:  # one document: what was found out, and why that is not all
        problem = {"code": code, "message": message, "hint": hint}
        _print_document({**(console.document or {"schema": 1}), "error": problem})
    else:
        console.error(message, hint)
    return code


def _print_document(document: dict[str, Any]) -> None:
    import json

    print(json.dumps(document, indent=2))


def _on_terminate(_signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


#: Options of the program that people also write after the command.
_COMMON = ("-q", "--quiet", "-v", "--verbose", "--debug")


def _common_first(words: list[str]) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    common = [word for word in words[:end] if word in _COMMON]
    return [*common, *(word for word in words[:end] if word not in _COMMON), *words[end:]]


def run(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code."""
    words = _common_first(sys.argv[1:] if argv is None else argv)
    try:
        from builder.cli.app import app
        from builder.console import console

        console.document = None
        result = app(args=words, prog_name="spark-build", standalone_mode=False)
        if result == Exit.INTERRUPTED:  # what typer makes of an interruption, without a word
            return _interrupted(words)
        if console.document is not None:
            _print_document(console.document)
    except KeyboardInterrupt:
        return _interrupted(words)
    except BrokenPipeError:
        sys.stderr.close()
        return Exit.OK
    except Exception as error:
        return _unexpected(words, error)
    return int(result or 0)


def _interrupted(words: list[str]) -> int:
    """By the user, or by a limit on the time."""
    from builder.deadline import limit_over

    if said := limit_over():
        hint = "a longer --time-limit; what was read and finished so far is kept in the cache"
        return _report(words, Exit.BUILD_FAILED, said, hint)
    return _report(words, Exit.INTERRUPTED, _INTERRUPTED)


def _is_interruption(error: BaseException | None) -> bool:
    """Whether an interruption is behind an error.

    A signal can come inside ``__set_name__`` while a module is imported; Python 3.11 makes a
    ``RuntimeError`` of whatever is raised there, with the interruption as its cause.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__
    return False


def _unexpected(words: list[str], error: Exception) -> int:
    if _is_interruption(error) or type(error).__name__ == "Abort":  # typer's KeyboardInterrupt
        return _interrupted(words)
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
    kind = type(error).__name__
    return _report(
        words, Exit.BUG, f"a bug of spark-build: {kind}: {error}", "the same with --debug"
    )


def main() -> None:
    """Console entry point."""
    signal.signal(signal.SIGTERM, _on_terminate)
    code = run()
    for number in (signal.SIGINT, signal.SIGTERM):  # all is done; nothing is left to interrupt
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
