"""A headless Chromium that is driven through two pipes: no port, no client library, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

#: Names under which distributions and CI machines have it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
TIMEOUT = 60.0
#: The browser reads commands from descriptor 3 and answers on 4.
START = """\
import fcntl, os, sys
kept = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for descriptor, number in zip(kept, (3, 4)):
    os.dup2(descriptor, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The browser on PATH."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """The browser's process; a context manager that leaves nothing behind."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        self._profile = tempfile.mkdtemp(prefix="spark-build-chromium-")
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        words = [self.program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(their_in), str(their_out), *words],
            pass_fds=(their_in, their_out),
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)  # it ends when its commands do
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        for answer in self._messages(deadline):
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)
        raise AssertionError(f"{method}: no answer within {TIMEOUT:.0f} s\n{self._said()}")

    def wait_for(self, event: str, session: str) -> dict[str, Any]:
        """The next event of that name that has not been waited for."""
        deadline = time.monotonic() + TIMEOUT
        for known in self.events:
            if known.get("method") == event and known.get("sessionId") == session:
                return known
        for message in self._messages(deadline):
            self.events.append(message)
            if message.get("method") == event and message.get("sessionId") == session:
                return message
        raise AssertionError(f"no {event} within {TIMEOUT:.0f} s\n{self._said()}")

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(line)
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                return
            more = os.read(self._in, 1 << 20)
            if not more:
                return
            self._buffer += more

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-2000:]

    def open(self, page: Path, *, width: int, scheme: str = "light", media: str = "screen") -> Page:
        """Open a file in a tab of its own; ``media="print"`` shows it as it would be printed."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", session, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", session, media=media, features=features)
        self.send("Page.navigate", session, url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return Page(self, session, target, width)


@dataclass
class Page:
    """One tab."""

    browser: Chromium
    session: str
    target: str
    #: of its window, which a phone widens when something does not fit
    width: int

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.browser.send(
            "Runtime.evaluate",
            self.session,
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def happened(self, *methods: str) -> list[dict[str, Any]]:
        """Events of this tab so far."""
        own = (e for e in self.browser.events if e.get("sessionId") == self.session)
        return [event["params"] for event in own if event["method"] in methods]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        return [e["request"]["url"] for e in self.happened("Network.requestWillBeSent")]

    @property
    def complaints(self) -> list[Any]:
        """What stands in the console: messages, errors, violations of the page's own policy."""
        return self.happened(
            "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
        )

    def pdf(self) -> bytes:
        """The page as it is printed."""
        answer = self.browser.send("Page.printToPDF", self.session, printBackground=False)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """Close the tab."""
        self.browser.send("Target.closeTarget", targetId=self.target)
