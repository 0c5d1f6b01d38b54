"""Habits of tests that are wrong however the test is written: patched strings, durations."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: A path in a string is not found when a module moves.
PATCH = re.compile(r"""setattr\(\s*["'](builder|tests)\.[\w.]+""")
#: How long something took depends on what else the machine does: count what was done instead.
DURATION = re.compile(r"assert\b[^\n]*\b(monotonic|perf_counter|process_time|time)\(\) - \w+ <")


def uses(habit: re.Pattern[str]) -> set[str]:
    return {
        f"{path.relative_to(TESTS)}: {match[0]}"
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for match in habit.finditer(path.read_text("utf-8"))
    }


def test_no_test_patches_a_path_in_a_string() -> None:
    assert not uses(PATCH), "import the module, or give the function a parameter"


def test_no_test_asserts_a_duration() -> None:
    assert not uses(DURATION), "assert what was done or left undone, not how long it took"


def test_the_habits_are_recognised() -> None:
    path = '"builder.common.room.free"'
    assert PATCH.search(f"monkeypatch.setattr(\n    {path}, 1)")
    assert not PATCH.search('monkeypatch.setattr(room, "free", 1)')
    assert DURATION.search("    assert time.monotonic() - began < 30")
    assert not DURATION.search("    assert time.monotonic() < deadline  # a hang ends here")
