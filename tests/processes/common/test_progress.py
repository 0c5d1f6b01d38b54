"""Progress of long work: a bar on a terminal, lines elsewhere, nothing where nothing is wanted."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, suppress
from typing import TYPE_CHECKING, Any, cast

import pytest

from builder.common import console as bars
from builder.common.console import Console
from builder.errors import RemoteError
from builder.images.engines import docker
from builder.images.engines.docker import find_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

#: Everything that moves a cursor, colours or clears.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars at once, lines all the time."""
    for name, seconds in (("_MOMENT", 0.0), ("_LOOK", 0.01), ("_EVERY", 0.03)):
        monkeypatch.setattr(bars, name, seconds)


@contextmanager
def terminal() -> Iterator[list[str]]:
    """stderr is a terminal of 80 columns; gives what was written to it once the block ends."""
    ours, theirs = pty.openpty()
    found: list[bytes] = []
    written: list[str] = []

    def read() -> None:
        with suppress(OSError):  # the other side is closed
            while data := os.read(ours, 65536):
                found.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(theirs, "w", encoding="utf-8") as stream, redirect_stderr(stream):
            yield written
    finally:
        reader.join()
        os.close(ours)
        written.append(b"".join(found).decode())


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def work(console: Console, *, said: bool = True) -> None:
    with console.progress("torch 2.11.0", 88_000_000, leaves_line=said) as bar:
        for _ in range(8):
            bar.advance(11_000_000)
            time.sleep(0.02)
        if bars._LOOK < 0.1 and not console.quiet:  # on a busy machine it is looked at later
            wait_for(lambda: shown(console, bar))
        console.say("something else")


def shown(console: Console, bar: bars.Bar) -> bool:
    drawn = console._bars._drawn
    return bar.spoke > bar.began or (drawn is not None and any(t.visible for t in drawn.tasks))


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.usefixtures("hurried")
def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    work(Console())
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "  torch 2.11.0 (88.0 MB)"
    assert lines[-1] == "something else"
    between = lines[1:-1]
    assert between
    assert all(re.fullmatch(r"  torch 2.11.0: [\d.]+ of 88.0 MB, \d+ s", li) for li in between)
    assert not CONTROL.search(err)


def test_lines_are_seconds_apart(capsys: pytest.CaptureFixture[str]) -> None:
    work(Console())
    assert capsys.readouterr().err.splitlines() == ["  torch 2.11.0 (88.0 MB)", "something else"]


@pytest.mark.usefixtures("hurried")
def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.quiet = True
    work(console)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("hurried")
def test_quiet_on_a_terminal() -> None:
    console = Console()
    console.quiet = True
    with terminal() as written:
        work(console)
    assert written == [""]


@pytest.mark.usefixtures("hurried")
def test_on_a_terminal_there_is_a_bar() -> None:
    with terminal() as written:
        work(Console())
    (text,) = written
    assert re.search(r"torch 2.11.0 .* of 88.0 MB  \d+ s", text)
    assert re.search(r"\r  torch 2.11.0 \(88.0 MB\)\x1b\[2m  \d+\.\d s", text)
    assert "something else\r\n" in text, "talk is not cut by the bar"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is back"


@pytest.mark.usefixtures("hurried")
def test_a_bar_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal() as written:
        work(Console())
    assert "of 88.0 MB" in written[0]
    assert not re.search(r"\x1b\[[\d;]*[1-9]\d*m", written[0])


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TERM", name)
    with terminal() as written:
        work(Console())
    assert "88.0 MB" in written[0]
    assert "\x1b[?25l" not in written[0]


def interrupted(console: Console, beside: threading.Thread) -> None:
    with console.progress("layers", 68, "files") as bar:
        bar.advance(17)
        time.sleep(0.1)
        beside.start()  # while the first is drawn
        time.sleep(0.1)
        raise KeyboardInterrupt


@pytest.mark.usefixtures("hurried")
def test_several_at_once_and_one_that_fails() -> None:
    console = Console()
    thread = threading.Thread(target=work, args=(console,))
    with terminal() as written:
        with pytest.raises(KeyboardInterrupt):
            interrupted(console, thread)
        thread.join()
    (text,) = written
    assert "17 of 68 files" in text
    assert "layers (68 files)" not in text, "what failed is not told as done"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")


SHORT = """
import sys
from builder.common.console import console
with console.progress("short", 10) as bar:
    bar.advance(10)
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
"""


def test_short_work_does_not_import_rich() -> None:
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", SHORT], stderr=theirs, check=True)
    finally:
        os.close(theirs)
        os.close(ours)


@pytest.mark.usefixtures("hurried")
def test_a_long_step_without_parts_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "_LONG_MOMENT", 0.0)
    console = Console()
    with console.step("build with oci"):
        time.sleep(0.1)
        with console.progress("checking", leaves_line=False, whole=True):
            time.sleep(0.1)
            with console.progress("wheel", 10, leaves_line=False):
                time.sleep(0.1)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "• build with oci"
    titles = [line.partition(":")[0].strip() for line in lines]
    assert list(dict.fromkeys(titles)) == ["build with oci", "checking", "wheel"]


class Pulling:
    """A Docker Engine that is asked for an image that it does not have."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.api = self.images = self
        self.asked: list[str] = []
        self._events = events
        self._here = False

    def get(self, ref: str) -> str:
        from docker.errors import ImageNotFound

        if not self._here:
            raise ImageNotFound(ref)
        return f"image of {ref}"

    def pull(self, repository: str, tag: str, **_options: object) -> Iterator[dict[str, Any]]:
        self.asked.append(f"{repository} {tag}")
        yield from self._events
        self._here = True


def part(layer: str, current: int) -> dict[str, Any]:
    detail = {"current": current, "total": 50_000_000}
    return {"status": "Downloading", "id": layer, "progressDetail": detail}


def test_a_pull_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[tuple[int, int | None]] = []
    advance = bars.Bar.advance

    def seen(bar: bars.Bar, count: int = 1) -> None:
        advance(bar, count)
        counted.append((bar.done, bar.total))

    monkeypatch.setattr(bars.Bar, "advance", seen)
    monkeypatch.setattr(docker, "pull_needs", lambda *_: [])
    engine = Pulling({"status": "Pulling"}, part("a", 1), part("b", 2_000_000), part("a", 5))
    assert find_image(cast("Any", engine), "host/vllm:v1", None) == "image of host/vllm:v1"
    assert engine.asked == ["host/vllm v1"]
    assert counted == [(1, 50_000_000), (2_000_001, 100_000_000), (2_000_005, 100_000_000)]
    assert "  pulling host/vllm:v1\n" in capsys.readouterr().err


def test_a_pull_that_the_registry_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "pull_needs", lambda *_: [])
    engine = Pulling({"error": "toomanyrequests"})
    with pytest.raises(RemoteError, match="toomanyrequests"):
        find_image(cast("Any", engine), "host/vllm:v1", None)
