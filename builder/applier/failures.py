"""Errors with exit codes, and messages on stderr.  Imports no sibling."""

from __future__ import annotations

import sys

EXIT_USAGE, EXIT_DRIFT, EXIT_MISSING, EXIT_REMOTE, EXIT_REBUILD = 2, 4, 6, 8, 10


class ApplyError(Exception):
    """A failure with its exit code and, if known, the next command to try."""

    def __init__(self, message: str, code: int = EXIT_DRIFT, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def say(message: str) -> None:
    """Print a message on stderr; stdout is for data."""
    print(message, file=sys.stderr, flush=True)
