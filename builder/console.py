"""Talk: steps, notes and progress, on stderr.  Data goes to stdout through the commands."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


class Console:
    """Prints talk; quiet mode drops everything but warnings and errors."""

    def __init__(self) -> None:
        self.quiet = False
        #: the JSON document of the command, printed when it ends, with its error if there is one
        self.document: dict[str, Any] | None = None
        self.verbose = False
        #: title of the step that is running, or was when the command ended
        self.running = ""

    @staticmethod
    def _coloured() -> bool:
        if os.environ.get("NO_COLOR"):
            return False
        return bool(os.environ.get("CLICOLOR_FORCE")) or sys.stderr.isatty()

    def style(self, text: str, name: str) -> str:
        """``text`` in a style, when stderr takes colour."""
        return f"\033[{_STYLES[name]}m{text}\033[0m" if self._coloured() else text

    def say(self, message: str = "") -> None:
        """Ordinary talk."""
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def detail(self, message: str) -> None:
        """Talk for ``--verbose``."""
        if self.verbose:
            self.say(self.style(message, "dim"))

    def warn(self, message: str) -> None:
        """Something the user should know even in quiet mode."""
        print(f"{self.style('warning', 'yellow')}: {message}", file=sys.stderr, flush=True)

    def error(self, message: str, hint: str = "") -> None:
        """The one error of a failed command, and the next command to try."""
        print(f"{self.style('error', 'red')}: {message}", file=sys.stderr)
        if hint:
            print(f"  try: {hint}", file=sys.stderr)
        sys.stderr.flush()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step with its wall time; the time is not printed when it fails."""
        began = time.monotonic()
        self.running = title
        self.say(self.style(f"• {title}", "bold"))
        yield
        self.detail(f"  {title}: {time.monotonic() - began:.1f} s")


console = Console()


def megabytes(size: int) -> str:
    """A byte count for people, in units of 1000."""
    if size < 1000:
        return f"{size} B"
    if size < 1_000_000:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:.1f} MB"
