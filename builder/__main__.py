"""The error boundary: every failure becomes one message and one documented exit code."""

from __future__ import annotations

import json
import signal
import sys
from typing import NoReturn

from builder.errors import Exit
from builder.runtime.spark_apply import ApplyError


def _report(code: int, message: str, hint: str = "") -> int:
    from builder.console import console

    if "--json" in sys.argv[1:]:
        print(json.dumps({"schema": 1, "error": {"code": code, "message": message, "hint": hint}}))
    else:
        console.error(message, hint)
    return code


def _on_terminate(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def run(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code."""
    from builder.cli.app import app

    try:
        result = app(args=argv, prog_name="spark-build", standalone_mode=False)
    except ApplyError as error:
        return _report(error.code, str(error), error.hint)
    except KeyboardInterrupt:
        return _report(Exit.INTERRUPTED, "interrupted; nothing half-written was left")
    except BrokenPipeError:
        sys.stderr.close()
        return Exit.OK
    except Exception as error:
        return _unexpected(error)
    return int(result or 0)


def _unexpected(error: Exception) -> int:
    exit_code = getattr(error, "exit_code", None)
    if isinstance(exit_code, int):  # typer.Exit, typer.Abort and usage errors of the command line
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            return exit_code
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "spark-build"
        return _report(Exit.USAGE, str(format_message()), f"{command} --help")
    if type(error).__name__ == "Abort":
        return _report(Exit.INTERRUPTED, "interrupted; nothing half-written was left")
    if "--debug" in sys.argv[1:]:
        raise error
    kind = type(error).__name__
    return _report(Exit.BUG, f"a bug of spark-build: {kind}: {error}", "the same with --debug")


def main() -> None:
    """Console entry point."""
    signal.signal(signal.SIGTERM, _on_terminate)
    sys.exit(run())


if __name__ == "__main__":
    main()
