"""``diff``: fuzz 0, exact context, a unique position; only an offset is allowed."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import pytest

from builder.applier.diff import Hunk, apply_hunks, parse_diff
from builder.applier.states import AMBIGUOUS, APPLIED, DRIFT, NEEDED, POST, PRE
from builder.applier.values import ApplyError
from tests.unit.fakes import MemoryTree, judged, make_layer, vllm_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import Layer

BASE = "".join(f"line {n}\n" for n in range(1, 21))


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def make_diff(old: str, new: str, path: str = "vllm/core.py") -> str:
    """A unified diff as ``git diff`` prints it."""
    return "".join(
        difflib.unified_diff(lines_of(old), lines_of(new), f"a/{path}", f"b/{path}", n=3)
    )


def hunks_of(diff: str) -> list[tuple[Hunk, ...]]:
    return [change.hunks for change in parse_diff(diff)]


def edit(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


SHAPES = {
    "modify": {"line 10\n": "line ten\n"},
    "modify-first": {"line 1\n": "line one\n"},
    "modify-last": {"line 20\n": "line twenty\n"},
    "insert": {"line 10\n": "line 10\nnew\n"},
    "delete": {"line 10\n": ""},
    "delete-several": {"line 9\nline 10\nline 11\n": ""},
    "prepend": {"line 1\n": "new\nline 1\n"},
    "append": {"line 20\n": "line 20\nnew\n"},
    "delete-first": {"line 1\n": ""},
    "delete-last": {"line 20\n": ""},
    "two-hunks": {"line 2\n": "", "line 18\n": "line 18\nnew\n"},
    "blank-lines": {"line 10\n": "\nline 10\n\n"},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
class TestShapes:
    def test_applies_to_the_file_it_was_made_for(self, changes: dict[str, str]) -> None:
        new = edit(BASE, changes)
        (hunks,) = hunks_of(make_diff(BASE, new))
        assert apply_hunks(BASE, hunks) == (PRE, new, [])

    def test_is_found_when_already_applied(self, changes: dict[str, str]) -> None:
        new = edit(BASE, changes)
        (hunks,) = hunks_of(make_diff(BASE, new))
        assert apply_hunks(new, hunks) == (POST, new, [])

    def test_drifts_when_one_line_of_context_differs(self, changes: dict[str, str]) -> None:
        (hunks,) = hunks_of(make_diff(BASE, edit(BASE, changes)))
        context = next(line for line in hunks[0].old if line in hunks[0].new)
        found, reason, _ = apply_hunks(BASE.replace(context, "other\n"), hunks)
        assert found == DRIFT
        assert "hunk 1" in reason

    def test_follows_its_context_and_reports_the_offset(self, changes: dict[str, str]) -> None:
        new = edit(BASE, changes)
        (hunks,) = hunks_of(make_diff(BASE, new))
        found, text, notes = apply_hunks("# moved\n" * 5 + BASE, hunks)
        assert (found, text) == (PRE, "# moved\n" * 5 + new)
        assert notes == [f"hunk {n} applied at offset +5" for n in range(1, len(hunks) + 1)]

    def test_never_chooses_between_two_places(self, changes: dict[str, str]) -> None:
        (hunks,) = hunks_of(make_diff(BASE, edit(BASE, changes)))
        assert apply_hunks(BASE + BASE, hunks)[0] == AMBIGUOUS


def test_an_unpatched_and_a_patched_place_are_ambiguous() -> None:
    """Saying 'already applied' would leave the unpatched place as it is."""
    new = edit(BASE, {"line 10\n": "line ten\n"})
    (hunks,) = hunks_of(make_diff(BASE, new))
    assert apply_hunks(f"{BASE}---\n{new}", hunks)[0] == AMBIGUOUS


def test_half_of_the_hunks_applied_is_drift() -> None:
    new = edit(BASE, {"line 2\n": "two\n", "line 18\n": "eighteen\n"})
    (hunks,) = hunks_of(make_diff(BASE, new))
    found, reason, _ = apply_hunks(edit(BASE, {"line 2\n": "two\n"}), hunks)
    assert found == DRIFT
    assert "some hunks" in reason


def test_drift_shows_what_was_expected_and_the_nearest_line() -> None:
    (hunks,) = hunks_of(make_diff(BASE, edit(BASE, {"line 10\n": "line ten\n"})))
    _, reason, _ = apply_hunks(BASE.replace("line 8\n", "line 8x\n"), hunks)
    assert reason == "hunk 1: 'line 8' not found; nearest is line 8: line 8x"


def test_without_a_near_line_none_is_shown() -> None:
    (hunks,) = hunks_of(make_diff(BASE, edit(BASE, {"line 10\n": "line ten\n"})))
    assert "nearest" not in apply_hunks("something else altogether\n", hunks)[1]


def test_a_missing_final_newline_is_part_of_the_line() -> None:
    diff = (
        "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,4 +1,4 @@\n a\n b\n c\n"
        "-d\n\\ No newline at end of file\n+e\n\\ No newline at end of file\n"
    )
    (hunks,) = hunks_of(diff)
    assert apply_hunks("a\nb\nc\nd", hunks)[:2] == (PRE, "a\nb\nc\ne")
    assert apply_hunks("a\nb\nc\nd\n", hunks)[0] == DRIFT


@pytest.mark.parametrize("odd", ["\x0c", "\x1c", "\u2028", "\x85"])
def test_only_a_line_feed_ends_a_line(odd: str) -> None:
    """Form feeds are common in old sources; ``str.splitlines`` would split at them."""
    old = f"a\nb\nc = '{odd}'\nd\ne\nf\n"
    diff = (
        "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,6 +1,6 @@\n a\n b\n"
        f" c = '{odd}'\n-d\n+D\n e\n f\n"
    )
    (hunks,) = hunks_of(diff)
    assert apply_hunks(old, hunks)[:2] == (PRE, old.replace("\nd\n", "\nD\n"))


HEAD = "--- a/vllm/core.py\n+++ b/vllm/core.py\n"


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("", "changes no file"),
        ("just text\n", "changes no file"),
        (f"{HEAD}@@ -1,3 +1,3 @@\n a\n-b\n", "malformed hunk"),
        ("@@ -1 +1 @@\n-a\n+b\n", "malformed hunk"),
        (f"{HEAD}@@ -1,2 +1,2 @@\n a\n*b\n", "malformed hunk"),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "copy from x"),
        ("diff --git a/x b/x\nindex 1..2\nBinary files a/x and b/x differ\n", "Binary files"),
        ("diff --git a/x b/x\nnew file mode 120000\n", "new file mode 120000"),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 160000\n", "new mode 160000"),
        (f"{HEAD}@@ -1 +1 @@\n-a\n+b\n{HEAD}@@ -2 +2 @@\n-a\n+b\n", "two parts for vllm/core"),
    ],
)
def test_a_malformed_diff_is_refused(diff: str, message: str) -> None:
    with pytest.raises(ApplyError, match=message):
        parse_diff(diff)


def test_hunks_are_grouped_by_file_without_prefixes() -> None:
    diff = make_diff("a\n", "b\n", "vllm/a.py") + make_diff("c\n", "d\n", "vllm/b.py")
    assert [change.path for change in parse_diff(diff)] == ["vllm/a.py", "vllm/b.py"]


def diff_layer(*diffs: str) -> Layer:
    return make_layer("fix", {"op": "diff", "file": "fix.patch", "diff": "".join(diffs)})


def numbered(*names: str) -> dict[str, bytes]:
    return vllm_files(**dict.fromkeys(names, BASE.replace("line ", "line_")))


def changed(names: Sequence[str]) -> list[str]:
    old = BASE.replace("line ", "line_")
    return [make_diff(old, edit(old, {"line_10\n": "ten\n"}), f"vllm/{name}.py") for name in names]


def test_a_diff_of_two_files_changes_both() -> None:
    layer, tree = diff_layer(*changed("ab")), MemoryTree(numbered("a", "b"))
    outcome = judged(layer, tree)
    assert (outcome.state, sorted(outcome.changes)) == (NEEDED, ["vllm/a.py", "vllm/b.py"])
    assert judged(layer, tree.after(outcome)).state == APPLIED


def test_a_diff_with_one_of_two_files_patched_is_drift() -> None:
    tree = MemoryTree(numbered("a", "b"))
    half = tree.after(judged(diff_layer(*changed("a")), tree))
    outcome = judged(diff_layer(*changed("ab")), half)
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert "vllm/a.py" in outcome.reason


def test_an_offset_is_in_the_notes_of_the_outcome() -> None:
    files = numbered("a")
    files["vllm/a.py"] = b"# moved\n" + files["vllm/a.py"]
    assert judged(diff_layer(*changed("a")), files).notes == [
        "vllm/a.py: hunk 1 applied at offset +1"
    ]


def test_a_missing_file_is_drift() -> None:
    outcome = judged(diff_layer(*changed("a")), vllm_files())
    assert outcome.state == DRIFT
    assert "vllm/a.py does not exist" in outcome.reason
