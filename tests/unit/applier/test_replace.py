"""``replace``: exact text, exact count, and never a guess."""

from __future__ import annotations

import pytest

from builder.applier.edits import replace_text
from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE

OLD, NEW = "if arch == 120:\n", "if arch in (120, 121):\n"
INSERTED = OLD + "    check(arch)\n"


@pytest.mark.parametrize(
    ("text", "old", "new", "count", "found"),
    [
        pytest.param(f"a\n{OLD}b\n", OLD, NEW, 1, PRE, id="unpatched"),
        pytest.param(f"a\n{NEW}b\n", OLD, NEW, 1, POST, id="patched"),
        pytest.param("a\nb\n", OLD, NEW, 1, DRIFT, id="neither"),
        pytest.param(OLD * 2, OLD, NEW, 1, AMBIGUOUS, id="anchor-twice"),
        pytest.param(NEW * 2, OLD, NEW, 1, AMBIGUOUS, id="patched-twice"),
        pytest.param(OLD * 2, OLD, NEW, 2, PRE, id="all-of-count"),
        pytest.param(NEW * 2, OLD, NEW, 2, POST, id="all-of-count-patched"),
        pytest.param(OLD, OLD, NEW, 2, DRIFT, id="fewer-than-count"),
        pytest.param(OLD + NEW, OLD, NEW, 2, DRIFT, id="half-of-count-patched"),
        pytest.param(OLD, OLD, INSERTED, 1, PRE, id="insertion-unpatched"),
        pytest.param(INSERTED, OLD, INSERTED, 1, POST, id="insertion-patched"),
        pytest.param(INSERTED, INSERTED, OLD, 1, PRE, id="deletion-unpatched"),
        pytest.param(OLD, INSERTED, OLD, 1, POST, id="deletion-patched"),
        pytest.param(OLD * 2, INSERTED, OLD, 1, AMBIGUOUS, id="deletion-patched-twice"),
        pytest.param("", OLD, NEW, 1, DRIFT, id="empty-file"),
    ],
)
def test_judgement(text: str, old: str, new: str, count: int, found: str) -> None:
    assert replace_text(text, old, new, count)[0] == found


@pytest.mark.parametrize(
    ("text", "old", "new", "count"),
    [
        (f"a\n{OLD}b\n", OLD, NEW, 1),
        (OLD * 3, OLD, NEW, 3),
        (OLD, OLD, INSERTED, 1),
        (f"x\n{INSERTED}", INSERTED, OLD, 1),
    ],
)
def test_a_replaced_text_is_recognised(text: str, old: str, new: str, count: int) -> None:
    found, patched = replace_text(text, old, new, count)
    assert found == PRE
    assert replace_text(patched, old, new, count) == (POST, patched)


def test_only_the_named_text_changes() -> None:
    assert replace_text(f"a\n{OLD}b", OLD, NEW, 1) == (PRE, f"a\n{NEW}b")


def test_an_insertion_next_to_a_patched_place_is_not_repeated() -> None:
    """Replacing both would insert into the patched place again."""
    found, _ = replace_text(f"{INSERTED}x\n{OLD}", OLD, INSERTED, 1)
    assert found in (AMBIGUOUS, DRIFT)


def test_drift_shows_the_nearest_line_and_its_number() -> None:
    _, reason = replace_text("import os\nif arch == 119:\n", OLD, NEW, 1)
    assert "if arch == 120:" in reason
    assert "line 2: if arch == 119:" in reason


def test_partly_patched_states_the_counts() -> None:
    assert (
        "1 of 2 places are unpatched and 1 are patched" in replace_text(OLD + NEW, OLD, NEW, 2)[1]
    )
