"""Diffs that do more than edit: new, deleted, renamed files, modes, and stacks of them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from builder.applier.diff import parse_diff
from builder.applier.edits import judge_diff
from builder.applier.judging import judge_in_order
from builder.applier.states import (
    AMBIGUOUS,
    APPLIED,
    DRIFT,
    NEEDED,
    NEEDS_REBUILD,
    UPSTREAM,
    Outcome,
)
from builder.applier.trees import DirTree
from tests.unit.fakes import (
    TARGET,
    FakeSources,
    Files,
    MemoryTree,
    apply_to,
    judged,
    make_layer,
    revert_from,
    snapshot,
    vllm_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from builder.applier.layers import Layer

TEXT = "".join(f"name_{n} = {n}\n" for n in range(1, 21))
NEW = "diff --git a/vllm/new.py b/vllm/new.py\nnew file mode 100644\n"
FILLED = f"{NEW}--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1,2 @@\n+a = 1\n+b = 2\n"
GONE = (
    "diff --git a/vllm/gone.py b/vllm/gone.py\ndeleted file mode 100644\n"
    "--- a/vllm/gone.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a = 1\n-b = 2\n"
)
MOVED = "diff --git a/vllm/a.py b/vllm/b.py\nrename from vllm/a.py\nrename to vllm/b.py\n"
MODE = "diff --git a/vllm/a.py b/vllm/a.py\nold mode 100644\nnew mode 100755\n"


def edit(line: str, new: str, path: str = "vllm/a.py", text: str = TEXT) -> str:
    """The diff of one changed line."""
    assert text.count(line) == 1
    after = text.replace(line, new)
    one, other = (side.splitlines(keepends=True) for side in (text, after))
    return "".join(difflib.unified_diff(one, other, f"a/{path}", f"b/{path}"))


def moved_and_edited() -> str:
    body = edit("name_10 = 10\n", "name_10 = 'ten'\n").replace("+++ b/vllm/a.py", "+++ b/vllm/b.py")
    return MOVED + body


def layer_of(*diffs: str, name: str = "fix", **changes: Any) -> Layer:
    ops = [{"op": "diff", "file": f"{n}.patch", "diff": diff} for n, diff in enumerate(diffs)]
    return make_layer(name, *ops, **changes)


def tree(**files: str) -> Files:
    return vllm_files(**files)


SHAPES = {
    "new": (FILLED, tree(), {"vllm/new.py": b"a = 1\nb = 2\n"}),
    "new-empty": (NEW, tree(), {"vllm/new.py": b""}),
    "deleted": (GONE, tree(gone="a = 1\nb = 2\n"), {"vllm/gone.py": None}),
    "renamed": (MOVED, tree(a=TEXT), {"vllm/a.py": None, "vllm/b.py": TEXT.encode()}),
    "renamed-and-edited": (
        moved_and_edited(),
        tree(a=TEXT),
        {"vllm/a.py": None, "vllm/b.py": TEXT.replace("= 10", "= 'ten'").encode()},
    ),
    "several": (
        GONE + FILLED + edit("name_3 = 3\n", ""),
        tree(a=TEXT, gone="a = 1\nb = 2\n"),
        {
            "vllm/a.py": TEXT.replace("name_3 = 3\n", "").encode(),
            "vllm/gone.py": None,
            "vllm/new.py": b"a = 1\nb = 2\n",
        },
    ),
}


@pytest.mark.parametrize(("diff", "files", "expected"), SHAPES.values(), ids=SHAPES.keys())
class TestShapes:
    def test_is_applied(self, diff: str, files: Files, expected: dict[str, bytes | None]) -> None:
        outcome = judged(layer_of(diff), files)
        assert outcome.state == NEEDED
        changed = {p: None if c is None else c.read() for p, c in outcome.changes.items()}
        assert changed == expected

    def test_is_found_once_applied(
        self, diff: str, files: Files, expected: dict[str, bytes | None]
    ) -> None:
        after = MemoryTree(files).after(judged(layer_of(diff), files))
        assert judged(layer_of(diff), after).state == APPLIED

    def test_can_be_reverted_in_memory(
        self, diff: str, files: Files, expected: dict[str, bytes | None]
    ) -> None:
        after = MemoryTree(files).after(judged(layer_of(diff), files))
        back = judge_diff([change.reversed() for change in parse_diff(diff)], after)
        taken = Outcome("fix", NEEDED, "", changes=back.changes)
        assert after.after(taken).files == files


DRIFTS = {
    "new-is-there-otherwise": (
        FILLED,
        tree(new="a = 2\n"),
        "already exists with different content",
    ),
    "deleted-is-another": (
        GONE,
        tree(gone="a = 1\n"),
        "differs from the file that the diff deletes",
    ),
    "renamed-both-there": (MOVED, tree(a=TEXT, b=TEXT), "both exist"),
    "renamed-neither-there": (MOVED, tree(), "neither exists"),
    "renamed-without-the-edit": (moved_and_edited(), tree(b=TEXT), "without the edits"),
    "edited-without-the-rename": (
        moved_and_edited(),
        tree(a=TEXT.replace("= 10", "= 'ten'")),
        "already has the edits",
    ),
    "mode-of-nothing": (MODE, tree(), "vllm/a.py does not exist"),
    "half": (GONE + FILLED, tree(), "vllm/gone.py already patched, vllm/new.py not"),
}


@pytest.mark.parametrize(("diff", "files", "reason"), DRIFTS.values(), ids=DRIFTS.keys())
def test_neither_the_old_nor_the_new_text_is_drift(diff: str, files: Files, reason: str) -> None:
    outcome = judged(layer_of(diff), files)
    assert (outcome.state, outcome.changes) == (DRIFT, {})
    assert reason in outcome.reason


def test_carriage_returns_are_part_of_the_lines(tmp_path: Path) -> None:
    text = TEXT.replace("\n", "\r\n")
    diff = edit("name_7 = 7\r\n", "name_7 = 'seven'\r\n", text=text)
    files = tree()
    files["vllm/a.py"] = text.encode()
    outcome = judged(layer_of(diff), files)
    assert outcome.state == NEEDED
    content = outcome.changes["vllm/a.py"]
    assert content is not None
    assert content.read() == text.replace("= 7", "= 'seven'").encode()
    assert judged(layer_of(diff), tree(a=TEXT)).state == DRIFT


class TestModes:
    def test_a_mode_is_changed_and_put_back(self, site: Path) -> None:
        (site / "vllm/a.py").write_text(TEXT)
        (site / "vllm/a.py").chmod(0o644)
        before = snapshot(site)
        assert apply_to(site, layer_of(MODE)) == [NEEDED]
        assert DirTree(site).mode("vllm/a.py") == 0o755
        assert apply_to(site, layer_of(MODE)) == [APPLIED]
        assert revert_from(site) == ["fix"]
        assert snapshot(site) == before

    def test_a_mode_that_is_already_set_is_applied(self, site: Path) -> None:
        (site / "vllm/a.py").write_text(TEXT)
        (site / "vllm/a.py").chmod(0o755)
        assert judged(layer_of(MODE), DirTree(site)).state == APPLIED

    def test_a_new_file_and_an_edit_can_set_a_mode(self) -> None:
        executable = FILLED.replace("100644", "100755")
        edited = MODE + edit("name_3 = 3\n", "name_3 = 0\n")
        outcome = judged(layer_of(executable, edited), tree(a=TEXT))
        assert [outcome.changes[f"vllm/{n}.py"].mode for n in ("new", "a")] == [0o755, 0o755]  # type: ignore[union-attr]

    def test_a_rename_keeps_the_mode(self, site: Path) -> None:
        (site / "vllm/a.py").write_text(TEXT)
        (site / "vllm/a.py").chmod(0o755)
        before = snapshot(site)
        assert apply_to(site, layer_of(MOVED)) == [NEEDED]
        assert DirTree(site).mode("vllm/b.py") == 0o755
        revert_from(site)
        assert snapshot(site) == before


# ---------------------------------------------------------------------------------- hostile cases

FIRST = edit("name_10 = 10\n", "name_10 = 'ten'\n")
SECOND = edit("name_10 = 'ten'\n", "name_10 = 'X'\n", text=TEXT.replace("= 10", "= 'ten'"))
BOTH = TEXT.replace("name_10 = 10", "name_10 = 'X'")


def series(*diffs: str) -> list[Layer]:
    return [layer_of(d, name=f"part-{n}", series="one") for n, d in enumerate(diffs, 1)]


def states(layers: list[Layer], files: Files) -> list[str]:
    steps = judge_in_order(layers, MemoryTree(files), FakeSources(), TARGET, {})
    return [step.outcome.state for step in steps]


class TestStack:
    """Where ``git apply --reverse --check`` says of each patch alone that it is not there."""

    def test_is_applied_in_order(self) -> None:
        assert states(series(FIRST, SECOND), tree(a=TEXT)) == [NEEDED, NEEDED]

    def test_is_found_below_later_changes(self) -> None:
        assert states(series(FIRST, SECOND), tree(a=BOTH)) == [APPLIED, APPLIED]

    def test_of_one_layer_is_found_too(self) -> None:
        assert judged(layer_of(FIRST, SECOND), tree(a=BOTH)).state == APPLIED

    def test_with_only_its_first_part_applied(self) -> None:
        lower = TEXT.replace("name_10 = 10", "name_10 = 'ten'")
        assert states(series(FIRST, SECOND), tree(a=lower)) == [APPLIED, NEEDED]

    def test_of_three_with_the_middle_one_missing_is_drift(self) -> None:
        third = edit("name_12 = 12\n", "name_12 = 'Y'\n", text=BOTH)
        files = tree(a=TEXT.replace("= 10", "= 'other'").replace("= 12", "= 'Y'"))
        assert states(series(FIRST, SECOND, third), files)[0] == DRIFT

    def test_of_unrelated_layers_is_not_searched(self) -> None:
        layers = [layer_of(FIRST, name="one"), layer_of(SECOND, name="two")]
        assert states(layers, tree(a=BOTH)) == [DRIFT, APPLIED]

    def test_that_is_only_similar_is_drift(self) -> None:
        files = tree(a=TEXT.replace("name_10 = 10", "name_10 = 'Z'"))
        assert states(series(FIRST, SECOND), files) == [DRIFT, DRIFT]


class TestMerged:
    """A change that was merged, and then edited: neither of its texts is there."""

    ENTRY: ClassVar = {
        "when": {"vllm": ">=0.22.0"},
        "since": "vllm 0.22.0",
        "reason": "merged as 1234",
    }
    LATER = TEXT.replace("name_10 = 10", "name_10 = 'ten, and more'")

    @pytest.mark.parametrize(
        ("version", "text", "expected"),
        [
            ("0.22.1", LATER, UPSTREAM),
            ("0.23.0.dev4+gabc", LATER, UPSTREAM),
            ("0.21.0", LATER, DRIFT),
            ("0.22.0rc1", LATER, DRIFT),
            ("0.22.1", TEXT, NEEDED),  # taken back
            ("0.22.1", TEXT.replace("name_10 = 10", "name_10 = 'ten'"), APPLIED),
            ("0.22.1", TEXT + TEXT, AMBIGUOUS),
        ],
    )
    def test_the_text_decides_then_the_release(
        self, version: str, text: str, expected: str
    ) -> None:
        files = vllm_files(version, a=text)
        outcome = judged(layer_of(FIRST, merged=self.ENTRY), files)
        assert outcome.state == expected
        assert (outcome.since == "vllm 0.22.0") is (expected == UPSTREAM)

    def test_half_of_a_layer_unpatched_is_not_a_release_of_it(self) -> None:
        layer = layer_of(edit("name_3 = 3\n", ""), SECOND, merged=self.ENTRY)
        assert judged(layer, vllm_files("0.22.1", a=TEXT)).state == DRIFT

    def test_one_unpatched_hunk_next_to_an_edited_one_is_not_a_release_of_it(self) -> None:
        """A build of somebody else's may have the version and not the change."""
        two = edit("name_3 = 3\n", "") + edit("name_18 = 18\n", "", "vllm/b.py")
        edited = TEXT.replace("name_18 = 18", "name_18 = 'other'")
        files = vllm_files("0.22.1", a=TEXT, b=edited)
        assert judged(layer_of(two, merged=self.ENTRY), files).state == DRIFT
        both = vllm_files("0.22.1", a=TEXT.replace("name_3 = 3", "name_3 = 'other'"), b=edited)
        assert judged(layer_of(two, merged=self.ENTRY), both).state == UPSTREAM


COMPILE = {"op": "compile", "file": "a#1", "reason": "csrc/a.cu reach vllm compiled"}


class TestCompiled:
    def layer(self, *diffs: str, **changes: Any) -> Layer:
        (variant,) = layer_of(*diffs, **changes).rendered["variants"]
        return layer_of(*diffs, variant={"ops": [*variant["ops"], COMPILE]}, **changes)

    def test_with_unapplied_text_needs_a_rebuild(self) -> None:
        outcome = judged(self.layer(FIRST), tree(a=TEXT))
        assert (outcome.state, outcome.changes) == (NEEDS_REBUILD, {})
        assert "csrc/a.cu" in outcome.reason

    def test_with_applied_text_counts_as_applied(self) -> None:
        files = tree(a=TEXT.replace("= 10", "= 'ten'"))
        outcome = judged(self.layer(FIRST), files)
        assert outcome.state == APPLIED
        assert "assumed to be applied" in outcome.notes[0]

    @pytest.mark.parametrize(
        ("version", "state"), [("0.22.0", UPSTREAM), ("0.21.0", NEEDS_REBUILD)]
    )
    def test_alone_is_decided_by_the_release(self, version: str, state: str) -> None:
        layer = self.layer(merged=TestMerged.ENTRY)
        assert judged(layer, vllm_files(version)).state == state

    def test_with_its_text_still_unpatched_is_not_upstream(self) -> None:
        layer = self.layer(FIRST, merged=TestMerged.ENTRY)
        assert judged(layer, vllm_files("0.22.0", a=TEXT)).state == NEEDS_REBUILD
