"""Follows a server's log: lines that are required, lines that are not allowed.

Standard library only.  The markers come from the catalogue of ``spark-build diagnose``: those that
apply to this image's release, with their fixes (``device.json``).
"""

from __future__ import annotations

import collections
import re
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: Lines stored for the evidence if something fails.
TAIL = 40
#: Lines stored from the first sign of a failure on: a traceback of the engine, and its causes.
FAILING = 160
_SIGNS = ("Traceback (most recent call last)", "Error: ", "Fatal Python error", "terminate called")
Json = dict[str, Any]


class Watch:
    """The state of a log; lines are fed one by one."""

    def __init__(self, markers: list[Json], expected: list[str]) -> None:
        self.markers = [
            (m, [re.compile(p) for p in m["patterns"]], [re.compile(p) for p in m["unless"]])
            for m in markers
        ]
        conditions = {p for m in markers for p in (*m["with"], *m["without"])}
        self.conditions = {source: re.compile(source) for source in conditions}
        self.present: set[str] = set()
        self.hits: dict[str, str] = {}
        self.found: dict[str, str] = {}
        self.expected = expected
        self.failing: list[str] = []
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)

    def feed(self, raw: str) -> None:
        """Read one line."""
        line = ANSI.sub("", raw).rstrip()
        if not line:
            return
        self.tail.append(line)
        if not self.failing and any(sign in line for sign in _SIGNS):
            self.failing = list(self.tail)[-4:]
        elif 0 < len(self.failing) < FAILING:
            self.failing.append(line)
        for text in self.expected:
            if text in line:
                self.found.setdefault(text, line)
        for source, regex in self.conditions.items():
            if source not in self.present and regex.search(line):
                self.present.add(source)
        for marker, patterns, unless in self.markers:
            if marker["id"] in self.hits or not any(p.search(line) for p in patterns):
                continue
            if not any(regex.search(line) for regex in unless):
                self.hits[marker["id"]] = line

    def shown(self, severity: str) -> list[tuple[Json, str]]:
        """Matched markers of a severity, with the line of each."""
        return [
            (marker, self.hits[marker["id"]])
            for marker, _, _ in self.markers
            if marker["id"] in self.hits
            and marker["severity"] == severity
            and self.present.issuperset(marker["with"])
            and self.present.isdisjoint(marker["without"])
        ]

    def why(self) -> str:
        """The log from its first failure on, or its end if there is none."""
        return "\n".join(self.failing) or self.last(20)

    def last(self, count: int = 12) -> str:
        """The end of the log."""
        return "\n".join(list(self.tail)[-count:])
