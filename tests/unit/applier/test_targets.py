"""Paths that a layer names or writes: one rule for every op, before anything is built."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.diff import judge_hunks, parse_diff
from builder.applier.edits import judge_diff
from builder.applier.layers import FORMS
from builder.applier.states import DRIFT, NEEDED, PRE
from builder.applier.trees import Content, OverlayTree
from builder.applier.values import ApplyError, path_problem
from tests.unit.fakes import (
    MemoryTree,
    copy_op,
    judged,
    layer_text,
    make_layer,
    make_wheel,
    vllm_files,
    write_tree,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.caller import Call

BAD = (
    "", ".", "..", "/etc/passwd", "vllm/", "vllm//a.py", "./vllm/a.py", "vllm/./a.py", "../a.py",
    "vllm/../../a.py", "vllm\\a.py", "vllm/a\0.py", "vllm/a\n.py", "vllm/\x1b[2J", "vllm/\ud800",
    "vllm/" + "a" * 256, "a/" * 2000 + "b", "vllm/\x9b",
)  # fmt: skip
GOOD = (
    "vllm/a.py",
    "a",
    "vllm/..a",
    "vllm/.hidden",
    "vllm/a b.py",
    "vllm/é.py",
    "vllm/a.dist-info/x",
)


KINDS = ("replace", "diff", "graft", "copy", "env", "hook")


def test_paths() -> None:
    assert [path for path in GOOD if path_problem(path)] == []
    assert [path for path in BAD if not path_problem(path)] == []


def op_at(kind: str, path: str) -> dict[str, Any]:
    """An op of a kind that names a path."""
    new = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    ops: dict[str, dict[str, Any]] = {
        "replace": {"file": path, "old": "cutlass", "new": "b12x"},
        "diff": {"file": "x.diff", "diff": f"{new}@@ -0,0 +1 @@\n+x = 1\n"},
        "graft": {"file": path, "from": "vllm==0.22.0", "names": ["run"], "member": "vllm/core.py"},
        "copy": copy_op(path, b"x = 1\n"),
        "env": {"name": "A", "value": "1", "reader": path},
        "hook": {"file": path, "source": "def edit(x): return x", "function": "edit"},
    }
    return {"op": kind, **ops[kind]}


def test_every_op_that_names_a_path_is_tried() -> None:
    named = {kind for kind, form in FORMS.items() if form.paths} | {"diff"}
    assert named == set(KINDS)


#: A diff has a line feed only in quotes, which the applier does not read.
CASES = [(kind, path) for kind in KINDS for path in BAD if (kind, "\n" in path) != ("diff", True)]


@pytest.mark.parametrize(("kind", "path"), CASES, ids=lambda word: repr(word)[:20])
def test_a_bad_path_is_refused_for_every_op(kind: str, path: str) -> None:
    """A layer in an image or a mod is read by the same rule as one from a folder."""
    with pytest.raises(ApplyError) as caught:
        judged(make_layer("fix", op_at(kind, path)), vllm_files())
    assert caught.value.code == 2
    assert len(str(caught.value)) < 300


def test_the_paths_of_a_wheel_are_checked_too() -> None:
    wheel = make_wheel("extra", "1.0", {"extra/a\\b.py": "x = 1\n"})
    op = {"op": "wheel", "distribution": "extra", "version": "1.0"}
    layer = make_layer("fix", op, wheels=[wheel])
    with pytest.raises(ApplyError, match="has a backslash"):
        judged(layer, vllm_files(), wheel)


COLLISIONS = {
    "over-a-folder": (["vllm"], "vllm is a folder"),
    "over-a-folder-below": (["vllm/model_executor"], "vllm/model_executor is a folder"),
    "below-a-file": (["vllm/core.py/x"], "vllm/core.py is a file, and so vllm/core.py/x"),
    "far-below": (["vllm/core.py/x/y/z.py"], "vllm/core.py is a file"),
    "both-new": (["vllm/new", "vllm/new/x.py"], "vllm/new is a file"),
    "both-new-turned": (["vllm/new/x.py", "vllm/new"], "vllm/new is a folder"),
}


@pytest.mark.parametrize(("paths", "reason"), COLLISIONS.values(), ids=COLLISIONS.keys())
@pytest.mark.parametrize("kind", ["copy", "diff"])
def test_a_file_and_a_folder_of_one_name(kind: str, paths: list[str], reason: str) -> None:
    """It passed every check, and destroyed the package."""
    tree = MemoryTree(vllm_files(**{"model_executor/x": ""}))
    outcome = judged(make_layer("fix", *(op_at(kind, path) for path in paths)), tree)
    assert outcome.state == DRIFT
    assert reason in outcome.reason
    assert not outcome.changes


def test_a_plan_refuses_it(call: Call, tmp_path: Path) -> None:
    """Before anything is written: exit 4 for a collision, 2 for a path that is none."""
    site = write_tree(tmp_path / "site", vllm_files())
    layer = tmp_path / "patches" / "fix"
    (layer / "new.py").write_text("x = 1\n")
    for to, code, message in (
        ("vllm", 4, "vllm is a folder"),
        ("vllm/core.py/x.py", 4, "vllm/core.py is a file"),
        ("vllm//x.py", 2, "has an empty name"),
        ("", 2, "has an empty name"),
    ):
        op = f'op = "copy"\nfrom = "new.py"\nto = "{to}"\n'
        (layer / "layer.toml").write_text(layer_text(op))
        done = call("apply", site, "-l", "fix")
        assert (done.code, message in done.err) == (code, True), done.err
    assert (site / "vllm" / "core.py").is_file()


def test_within_one_diff() -> None:
    tree = MemoryTree(vllm_files())
    op = op_at("diff", "vllm/new")
    op["diff"] += op_at("diff", "vllm/new/x.py")["diff"]
    assert "vllm/new is a f" in judged(make_layer("fix", op), tree).reason


def test_a_file_may_become_a_folder() -> None:
    """One that is removed is not in the way."""
    tree = MemoryTree({**vllm_files(), "vllm/old": b"x = 1\n"})
    gone = "diff --git a/vllm/old b/vllm/old\ndeleted file mode 100644\n--- a/vllm/old\n"
    gone += "+++ /dev/null\n@@ -1 +0,0 @@\n-x = 1\n"
    op = {"op": "diff", "file": "x", "diff": gone + op_at("diff", "vllm/old/x.py")["diff"]}
    outcome = judged(make_layer("fix", op), tree)
    assert (outcome.state, set(outcome.changes)) == (NEEDED, {"vllm/old", "vllm/old/x.py"})


def test_children_of_an_overlay() -> None:
    """Counted on the way, and the same as looking at every change."""
    dice = random.Random(20_261_123)
    names = ["a", "a/b", "a/b/c", "a/b/d", "e/f", "e", "g"]
    for _ in range(300):
        start = dict.fromkeys(dice.sample(names, 3), b"")
        tree = OverlayTree(MemoryTree(start))
        for _ in range(dice.randrange(8)):
            tree.update({dice.choice(names): dice.choice([None, Content.of(b"x")])})
        for folder in ("", "a", "a/b", "e"):
            prefix = f"{folder}/" if folder else ""
            expected = set(tree.base.children(folder))
            below = {path for path in tree.changes if path.startswith(prefix)}
            for name in {path[len(prefix) :].split("/")[0] for path in below}:
                mine = [p for p in below if f"{p}/".startswith(f"{prefix}{name}/")]
                if any(tree.changes[path] is not None for path in mine):
                    expected.add(name)
                elif prefix + name in tree.changes:
                    expected.discard(name)
            assert tree.children(folder) == sorted(expected)


# -------------------------------------------------------------------------------------------- work


class CountedTree(MemoryTree):
    """Counts how often it is asked."""

    asked = 0

    def read(self, path: str) -> bytes | None:
        self.asked += 1
        return super().read(path)

    def children(self, directory: str) -> list[str]:
        self.asked += 1
        return super().children(directory)


@pytest.mark.parametrize("form", ["vllm/f{}.py", "vllm/d{}/e/f.py"])
def test_the_work_for_a_diff_grows_with_its_size(form: str) -> None:
    """16,000 files took 70 s."""
    asked = []
    for count in (50, 400):
        tree = CountedTree(vllm_files())
        text = "".join(op_at("diff", form.format(n))["diff"] for n in range(count))
        layer = make_layer("fix", {"op": "diff", "file": "x.diff", "diff": text})
        assert judged(layer, tree).state == NEEDED
        asked.append(tree.asked / count)
    assert asked[1] < 2 * asked[0]


def test_many_hunks_are_found_at_once_where_they_are_expected() -> None:
    """10,000 in a file of 50,000 lines took 24 s: the whole file was searched for each."""
    lines = [f"line {number}\n" for number in range(4000)]
    hunks = "".join(
        f"@@ -{at + 1},3 +{at + 1},3 @@\n {lines[at]}-{lines[at + 1]}+new {at}\n {lines[at + 2]}"
        for at in range(0, 4000, 4)
    )
    (change,) = parse_diff(f"--- a/x\n+++ b/x\n{hunks}")
    shifted = "first\n" * 7 + "".join(lines)
    for text, offset in (("".join(lines), 0), (shifted, 7)):
        verdicts, new = judge_hunks(text, change.hunks)
        assert {(v.form, v.offset) for v in verdicts} == {(PRE, offset)}
        assert new.count("new ") == 1000


def test_a_search_that_would_not_end_is_refused() -> None:
    text = "a\n" * 20_000
    hunks = "@@ -1,2 +1,3 @@\n a\n+b\n a\n" * 2000
    change = parse_diff(f"--- a/x\n+++ b/x\n{hunks}")
    with pytest.raises(ApplyError, match="too many hunks for a file of this length"):
        judge_diff(change, MemoryTree({"x": text.encode()}))
