"""A pytest plugin for runs of many minutes: ``-p tests.lane`` reports in whole lines.

Each failure is named when it happens, and every so many tests a line says how far the run is.
Such a run has time for more cases of chance than a run of the unit tests.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from _pytest.terminal import TerminalReporter

    Status = tuple[str, object, object]

#: Tests between two lines.
EVERY = 50
#: Cases of chance of each kind (``tests/unit/chance.py``).
FUZZ = "25"


class Progress:
    """Counts tests, and writes lines instead of dots."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._started = time.monotonic()
        self._total = self._done = self._failed = 0
        self._lines: TerminalReporter | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Know how many there are."""
        self._total = len(session.items)
        self._lines = session.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Status, Status]:
        """Let pytest count as it does, without its letters."""
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a failure, and say now and then how far we are."""
        if report.failed:
            self._failed += 1
            self._say(f"FAILED {report.nodeid} ({report.when})")
        if report.when == "teardown":
            self._done += 1
            if self._done % self._every == 0 or self._done == self._total:
                minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
                said = f"{self._done} of {self._total} tests, {self._failed} failed"
                self._say(f"{said}, {minutes}:{seconds:02}")

    def _say(self, line: str) -> None:
        if self._lines is not None:
            self._lines.write_line(line)
            self._lines.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Join the run."""
    os.environ.setdefault("SPARK_BUILD_TEST_FUZZ", FUZZ)
    config.pluginmanager.register(Progress(), "lane")
