"""A log that may be wrapped has two readings, joined and not: one, as long as both agree."""

from __future__ import annotations

from builder.diagnose.failures import Failures
from builder.diagnose.logs import Line
from builder.diagnose.matching import Scan

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/x/vllm/a.py", line 1, in f',
    "    g()",
    "ValueError: the first one",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "/x/vllm/b.py", line 2, in h',
    "    f()",
    "RuntimeError: the second one",
)
LINES = [Line(number, text) for number, text in enumerate(("a warning", *TRACEBACK), 1)]
WRAPPED = [
    Line(20, "ImportError: no", again=True),
    Line(20, "ImportError: no module", pieces=2),
    Line(22, "TimeoutError: too late"),
]


def read(*lines: Line) -> Failures:
    failures = Failures()
    for line in lines:
        failures.feed(line)
    return failures


def test_lines_that_agree_are_read_once_and_both_readings_have_them() -> None:
    scan = Scan()
    for line in (*LINES, *WRAPPED):
        scan.take(line, wrapped=True)
    joined, alone = read(*LINES, *WRAPPED[1:]), read(*LINES, WRAPPED[0], WRAPPED[2])
    assert scan.failures.failures() == joined.failures()
    assert scan.unjoined.failures() == alone.failures()
    assert scan.failures.failures() != scan.unjoined.failures()


def test_a_log_that_is_not_wrapped_has_one_reading() -> None:
    scan = Scan()
    for line in LINES:
        scan.take(line, wrapped=False)
    scan.part()
    assert scan.failures.failures()
    assert scan.unjoined.failures() == []


def test_a_copy_shares_nothing_that_is_read_later() -> None:
    first = read(*LINES)
    before = first.failures()
    twin = first.copy()
    assert twin.failures() == before
    for line in WRAPPED[1:]:
        twin.feed(line)
    assert first.failures() == before
    assert twin.failures() != before


def test_a_chain_of_any_length_is_copied() -> None:
    lines = [Line(n, text) for n, text in enumerate(TRACEBACK * 400, 1)]
    first = read(*lines)
    assert first.copy().failures() == first.failures()
