"""Messages, notes and progress on stderr; results and the standard streams themselves."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TextIO

from builder.common.background import check_cancelled
from builder.common.hints import again, as_started
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer
    from rich.progress import Progress, TaskID

    from builder.common.document import Document


# ------------------------------------------------------------------------------------ foreign text
#
# Characters that move the cursor, clear, recolour or reorder are escaped: ``\x1b``, ``\u202e``.

#: Colours and weights of ECMA-48 (SGR), without hidden text; used by us and by ``--help``.
_STYLE = r"\x1b\[(?:(?:[0-4]|2[2-4]|3[0-79]|9[0-7])(?:;|(?=m)))*m"
#: C0 without tab and line feed, DEL, C1, line and paragraph separators, bidirectional controls, and
#: undecodable bytes of names.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_STYLED = f"({_STYLE})|{_CONTROL}"
#: Data may be a source file or a patch: form feeds and carriage returns at line ends are kept.
_DATA = rf"(\x0c|\r(?=\n))|{_CONTROL}"
_STYLED_DATA = rf"({_STYLE}|\x0c|\r(?=\n))|{_CONTROL}"
#: GitHub's runner ignores blanks before a command of today's form; one of the older form,
#: ``##[error]``, may be anywhere in a line.
_COMMAND = re.compile(r"^([^\S\n]*)(?=::)", re.MULTILINE)
_OLD_COMMAND = "##["
#: Variables that make typer colour its help without a terminal.
_FORCED = ("CLICOLOR_FORCE", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")


def plain(text: str, *, styled: bool = False) -> str:
    """Text without control sequences; ``styled`` keeps colours and weights."""
    return re.sub(_STYLED if styled else _CONTROL, _shown, text)


def plain_data(text: str, stream: TextIO) -> str:
    """The same for data on stdout, which may be a file's content."""
    if text.isascii() and text.isprintable():
        return text
    styled = any(map(os.environ.get, _FORCED)) or stream.isatty()
    return re.sub(_STYLED_DATA if styled else _DATA, _shown, text)


def below(message: str) -> str:
    """Indent all lines after the first, so that foreign text never starts a line.

    It is also not taken for a workflow command of GitHub Actions, which ignores leading blanks.
    """
    first, *rest = message.split("\n")
    lines = [line if line.startswith("  ") or not line else f"  {line}" for line in rest]
    return no_commands("\n".join([first, *lines]))


def no_commands(text: str) -> str:
    """Text in which no line is a workflow command of GitHub Actions.

    ``| `` is before each, and the older form has a blank in it.  None of spark-build's own lines
    is one.
    """
    return _COMMAND.sub(r"\1| ", text).replace(_OLD_COMMAND, "## [")


def one_line(text: str) -> str:
    """Foreign text for a place where one line is expected."""
    return " ".join(text.split())


def tell(text: str = "") -> None:
    """Print lines for people on stdout; no foreign text in them is a command of any kind."""
    print(no_commands(plain(text, styled=True)))


def _shown(match: re.Match[str]) -> str:
    if match.lastindex:
        return match[1]
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


# ---------------------------------------------------------------------------------------- progress
#
# One thread reads all counters.  ``rich`` is imported when the first bar
# is shown, which is only on a terminal and only for longer work.

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
        self.title, self.unit = no_commands(one_line(plain(title))), unit
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

    def text(self) -> str:
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
                self.say(f"  {bar.title}: {', '.join(filter(None, (bar.text(), _time(bar))))}")

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
                words = f"{bar.text()}  {_time(bar)}".strip()
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


# ------------------------------------------------------------------------------------- the console

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
        leaves_line: bool = True,
        whole: bool = False,
    ) -> Iterator[Bar]:
        """Show the progress of long work: ``bar.advance(n)``, of ``total`` bytes or files.

        On a terminal a bar, after half a second; elsewhere an occasional line, never a
        control character.  ``leaves_line``: one line remains with the title, the size, and on a
        terminal the duration.  ``whole``: its parts are shown instead.  Any thread may show
        progress.
        """
        bar = Bar(title, total, unit, whole=whole)
        drawn = on_terminal()
        if leaves_line and not drawn:
            self.say(f"  {bar.heading()}")
        with self._watched(bar):
            yield bar
        if leaves_line and drawn:
            self.say(f"  {bar.heading()}{self.style(f'  {bar.seconds:.1f} s', 'dim')}")


console = Console()


def counted(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """The first names of a list, and how many more there are: ``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def print_json(value: Document | dict[str, Any]) -> None:
    """Set the command's JSON document, which is printed on stdout when the command ends."""
    if not isinstance(value, dict):
        from builder.common.document import plain

        value = plain(value)
    console.document = value


# ----------------------------------------------------------------------------- the standard streams


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
    """Stdout with control sequences escaped; in a workflow no line of it is a command.

    A file is no log, so what goes to one is as it is.
    """

    #: in a workflow: the beginning of a line, which may become a command
    _begun = ""

    def write(self, text: str, /) -> int:
        shown = plain_data(text, self)
        if os.environ.get("GITHUB_ACTIONS") and not self._is_file:
            whole, newline, self._begun = (self._begun + shown).rpartition("\n")
            shown = no_commands(whole + newline)
        super().write(shown)
        return len(text)

    @cached_property
    def _is_file(self) -> bool:
        return stat.S_ISREG(os.fstat(self.fileno()).st_mode)

    def flush(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            super().write(no_commands(begun))
        super().flush()


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


# -------------------------------------------------------------------- the question that --yes skips


def has_terminal() -> bool:
    """Whether a question can be asked and answered."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stderr.isatty())


def confirm(action: str, note: str, otherwise: str, allowing: Sequence[str] = ("--yes",)) -> None:
    """Continue only if the user confirms on the terminal; ``allowing`` are words that do, too.

    Raises:
        UsageError: there is no terminal.
        SparkBuildError: the user declined; ``otherwise`` describes the result.
    """
    if not has_terminal():
        raise UsageError(
            f"this would {action}, and there is no terminal to confirm it",
            hint=again(*allowing),
        )
    console.warn(f"this will {action}{note}")
    print("continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise SparkBuildError(otherwise, Exit.NOTHING_TO_DO, hint=again(*allowing))
