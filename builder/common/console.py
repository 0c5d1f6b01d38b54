"""Messages, notes and progress on stderr. Commands print their results on stdout."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from builder.common.escape import below, no_commands, plain
from builder.common.hints import as_started
from builder.common.progress import Bar, Bars, megabytes, on_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.common.document import Document
    from builder.common.progress import Unit

__all__ = ["Console", "console", "megabytes"]

#: Steps that take at least this many seconds print their duration.
_LONG = 5.0
#: What an interruption leaves of a command, unless it has delivered something before.
NOTHING_LEFT = "no partial output was left"
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


class Console:
    """Prints messages; quiet mode drops everything except warnings and errors."""

    def __init__(self) -> None:
        self.quiet = False
        #: the command's JSON document, printed at its end, with its error if there is one
        self.document: dict[str, Any] | None = None
        self.verbose = False
        #: title of the current or last step
        self.running = ""
        #: what an interruption would leave now, for its message
        self.left = NOTHING_LEFT
        self._bars = Bars()
        self._data = False

    def _coloured(self) -> bool:
        if os.environ.get("NO_COLOR"):
            return False
        stream = sys.stdout if self._data else sys.stderr
        return bool(os.environ.get("CLICOLOR_FORCE")) or stream.isatty()

    def style(self, text: str, name: str) -> str:
        """``text`` in a style, if the stream supports colour."""
        return f"\033[{_STYLES[name]}m{text}\033[0m" if self._coloured() else text

    def say(self, message: str = "") -> None:
        """Print a message."""
        message = as_started(no_commands(plain(message, styled=self._coloured())))
        if self._data:
            print(message)
        elif not self.quiet:
            self._bars.say(message)

    @contextmanager
    def as_data(self) -> Iterator[None]:
        """Messages in the block are the command's data: on stdout, also in quiet mode."""
        self._data = True
        try:
            yield
        finally:
            self._data = False

    def detail(self, message: str) -> None:
        """Print a message with ``--verbose``."""
        if self.verbose:
            self.say(self.style(message, "dim"))

    def warn(self, message: str) -> None:
        """Print a warning, also in quiet mode."""
        self._bars.say(f"{self.style('warning', 'yellow')}: {below(as_started(plain(message)))}")

    def error(self, message: str, hint: str = "") -> None:
        """Print the error of a failed command, and the next command to try."""
        print(f"{self.style('error', 'red')}: {below(as_started(plain(message)))}", file=sys.stderr)
        if hint:
            print(f"  try: {below(as_started(plain(hint)))}", file=sys.stderr)
        sys.stderr.flush()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step with its duration, which is printed unless the step fails."""
        began = time.monotonic()
        self.running = title
        self.say(self.style(f"• {title}", "bold"))
        with self._watched(Bar(title, None, "", whole=True)):
            yield
        seconds = time.monotonic() - began
        tell = self.say if seconds >= _LONG else self.detail
        tell(self.style(f"  {title}: {seconds:.1f} s", "dim"))

    @contextmanager
    def _watched(self, bar: Bar) -> Iterator[None]:
        try:
            if not self.quiet:
                self._bars.add(bar)
            yield
        finally:
            self._bars.remove(bar)

    @contextmanager
    def progress(
        self,
        title: str,
        total: int | None = None,
        unit: Unit = "bytes",
        *,
        said: bool = True,
        whole: bool = False,
    ) -> Iterator[Bar]:
        """Show the progress of long work: ``bar.advance(n)``, of ``total`` bytes or files.

        On a terminal a bar, after half a second; elsewhere an occasional line, never a
        control character.  ``said``: one line remains with the title, the size, and on a
        terminal the duration.  ``whole``: its parts are shown instead.  Any thread may show
        progress.
        """
        bar = Bar(title, total, unit, whole=whole)
        drawn = on_terminal()
        if said and not drawn:
            self.say(f"  {bar.heading()}")
        with self._watched(bar):
            yield bar
        if said and drawn:
            self.say(f"  {bar.heading()}{self.style(f'  {bar.seconds:.1f} s', 'dim')}")


console = Console()


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_json(value: Document | dict[str, Any]) -> None:
    """Set the command's JSON document, which is printed on stdout when the command ends."""
    if not isinstance(value, dict):
        from builder.common.document import plain

        value = plain(value)
    console.document = value
