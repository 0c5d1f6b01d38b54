"""Handles standard streams that are closed or full, or whose reader has exited."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from builder.util.escape import plain_data

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Watched(io.FileIO):
    """Remembers why it could not be written: a buffer drops what it could not write."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _Shown(io.TextIOWrapper):
    """Stdout, which shows what others wrote and lets none of it command a terminal."""

    def write(self, text: str, /) -> int:
        super().write(plain_data(text, self))
        return len(text)


def watch() -> bool:
    """Notice from now on what goes wrong with stdout and stderr; whether stdout is closed.

    Streams that the caller closed are opened, so that no other file gets their number.
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
    """Why stdout or stderr does not take what was printed; None if they do."""
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
    """Send what cannot be written nowhere, or Python tries again at the end, and says so."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
