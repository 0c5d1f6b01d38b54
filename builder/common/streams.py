"""Handles standard streams that are closed or full, or whose reader has exited."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from builder.common.console import no_commands, plain_data

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Watched(io.FileIO):
    """A stream that records write errors, because buffers drop unwritten data."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _Shown(io.TextIOWrapper):
    """Stdout with control sequences escaped; in a workflow no line of it is a command."""

    _within = False

    def write(self, text: str, /) -> int:
        shown = plain_data(text, self)
        if os.environ.get("GITHUB_ACTIONS"):
            first, newline, rest = shown.partition("\n")
            first = first if self._within else no_commands(first)
            shown = first + newline + no_commands(rest)
            self._within = not text.endswith("\n") and bool(text or self._within)
        super().write(shown)
        return len(text)


def watch() -> bool:
    """Record errors of stdout and stderr from now on; returns whether stdout is closed.

    Closed streams are opened, so that no other file gets their descriptor.
    """
    closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = _watched(1, sys.stdout), _watched(2, sys.stderr)
    return closed


def _watched(number: int, stream: TextIO | None) -> TextIO:
    kind = _Shown if number == 1 else io.TextIOWrapper  # stderr: what the console says
    return kind(
        io.BufferedWriter(_Watched(number, "wb", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors=stream.errors if stream else "replace",
        line_buffering=number == 2 or os.isatty(number),
    )


def lost() -> OSError | None:
    """The error of stdout or stderr, or None."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Watched) and raw.error is not None:
            return raw.error
        try:
            stream.flush()
        except OSError as error:
            return error
    return None


def silence() -> None:
    """Discard unwritten data; otherwise Python retries at exit and prints an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
