"""Progress of long work: a bar on a terminal, occasional lines elsewhere.

One thread reads all counters.  ``rich`` is imported when the first bar
is shown, which is only on a terminal and only for longer work.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal

from builder.common.background import check_cancelled
from builder.common.escape import plain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Unit = Literal["bytes", "files", "checks", ""]

#: Seconds before a bar is shown, before a step's bar is shown, and between updates.
_MOMENT, _LONG_MOMENT, _LOOK = 0.4, 2.0, 0.1
#: Seconds between lines about the same work without a terminal.
_EVERY = 10.0


def megabytes(size: float) -> str:
    """A human-readable byte count, in units of 1000."""
    if size < 1000:
        return f"{size:.0f} B"
    return f"{size / 1e3:.1f} kB" if size < 1_000_000 else f"{size / 1e6:.1f} MB"


class Bar:
    """A progress counter; thread-safe."""

    def __init__(self, title: str, total: int | None, unit: Unit, *, whole: bool = False) -> None:
        self.title, self.unit = plain(title), unit
        #: whether it is a whole step or level: shown later, and only if no part is shown
        self.whole = whole
        #: the total; None if unknown
        self.total = total
        self.done = 0
        self.began = self.spoke = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """Add to the count; negative if work was lost and is repeated."""
        check_cancelled()
        with self._lock:
            self.done += count

    def _of(self, count: int) -> str:
        return megabytes(count) if self.unit == "bytes" else f"{count} {self.unit}".rstrip()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def heading(self) -> str:
        """The title and the total."""
        return f"{self.title} ({self._of(self.total)})" if self.total else self.title

    def said(self) -> str:
        """The current progress as text."""
        if self.total:
            part = f"{self.done / 1e6:.1f}" if self.unit == "bytes" else f"{self.done}"
            if self.unit == "bytes" and self.total < 1_000_000:
                part = megabytes(self.done)
            return f"{part} of {self._of(self.total)}"
        return self._of(self.done) if self.unit and self.done else ""


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Bars:
    """All current progress.  ``say`` prints a line."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bars: dict[Bar, TaskID | None] = {}
        self._drawn: Progress | None = None
        self._idle = threading.Event()

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bars."""
        with self._lock:
            if self._drawn is None:
                print(line, file=sys.stderr, flush=True)
                return
            from rich.text import Text

            self._drawn.console.print(Text.from_ansi(line), soft_wrap=True)

    def add(self, bar: Bar) -> None:
        """Start to show a counter."""
        with self._lock:
            first = not self._bars
            self._bars[bar] = None
            if first:
                self._idle = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._idle,), name="progress", daemon=True
                ).start()

    def remove(self, bar: Bar) -> None:
        """Stop showing it; the last one ends the drawing and restores the cursor."""
        with self._lock:
            task, drawn = self._bars.pop(bar, None), self._drawn
            if not self._bars:
                self._idle.set()
                self._drawn = None
            with contextlib.suppress(OSError, ValueError):  # stderr is gone
                if drawn is not None and task is not None:
                    drawn.remove_task(task)
                if drawn is not None and not self._bars:
                    drawn.stop()

    def _watch(self, idle: threading.Event) -> None:
        while not idle.wait(_LOOK):
            with self._lock:
                if idle.is_set():
                    return
                with contextlib.suppress(OSError, ValueError):  # stderr is gone
                    self._draw() if on_terminal() else self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        for bar in self._shown(list(self._bars)):
            if now - bar.spoke >= _EVERY:
                bar.spoke = now
                self.say(f"  {bar.title}: {', '.join(filter(None, (bar.said(), _time(bar))))}")

    @staticmethod
    def _shown(bars: list[Bar]) -> list[Bar]:
        """The bars to show: parts, or the innermost whole."""
        return [bar for bar in bars if not bar.whole] or bars[-1:]

    def _draw(self) -> None:
        drawn = self._drawn
        shown = self._shown([bar for bar, task in self._bars.items() if task is not None])
        for bar, task in self._bars.items():
            if task is None and bar.seconds >= (_LONG_MOMENT if bar.whole else _MOMENT):
                drawn = drawn or _drawing()
                task = self._bars[bar] = drawn.add_task(bar.title, said="")
            if drawn is not None and task is not None:
                words = f"{bar.said()}  {_time(bar)}".strip()
                drawn.update(
                    task, total=bar.total, completed=bar.done, said=words, visible=bar in shown
                )
        if drawn is not None:
            self._drawn = drawn
            drawn.start() if not drawn.live.is_started else drawn.refresh()


def _time(bar: Bar) -> str:
    return f"{bar.seconds:.0f} s"


def _drawing() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    wide = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn("  {task.description}", markup=False, table_column=wide),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(file=sys.stderr, highlight=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
    )
