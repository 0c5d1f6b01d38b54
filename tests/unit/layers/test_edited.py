"""An edit of a file as an op, the releases around it, and the text of layer.toml."""

from __future__ import annotations

import tomllib

import pytest
from packaging.specifiers import SpecifierSet

from builder.errors import UsageError
from builder.layers.conversion import DraftOp
from builder.layers.edited import (
    EditedFile,
    after_newest,
    bound,
    op_text,
    ops_of_edit,
    range_of,
    run_around,
    sections,
    without,
)

TEXT = "".join(f"line {n}\n" for n in range(40))


def one_op(before: str | None, after: str | None, *donors: tuple[str, str]) -> DraftOp:
    edit = EditedFile(path="vllm/x.py", before=before, after=after)
    (op,) = ops_of_edit([edit], "v", lambda _: donors, "vllm").ops
    return op


def test_the_anchor_grows_until_it_occurs_once() -> None:
    before = "a\nb\nc\n" * 2 + "x\nb\nc\n"
    op = one_op(before, before.replace("x\nb\nc", "x\nb\nd"))
    assert (op.keys["op"], op.keys["old"]) == ("replace", "x\nb\nc\n")


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (TEXT.replace("line 3\n", "three\n"), "replace"),
        (TEXT.replace("line 3\n", "three\n").replace("line 6\n", "six\n"), "replace"),
        (TEXT.replace("line 3\n", "three\n").replace("line 30\n", "thirty\n"), "diff"),
        (TEXT + "no line feed", "replace"),
        (None, "diff"),
    ],
)
def test_the_smallest_op(after: str | None, kind: str) -> None:
    assert one_op(TEXT, after).keys["op"] == kind


def test_an_insertion_that_repeats_its_surroundings_is_refused() -> None:
    """Each anchor is also in the new text: applied and unapplied could not be told apart."""
    edit = EditedFile(path="x.txt", before="a\n" * 200, after="a\n" * 201)
    with pytest.raises(UsageError, match="no diff makes this edit"):
        ops_of_edit([edit], "v", lambda _: (), "vllm")


BEFORE = "def a():\n    return 1\n\n\ndef b():\n    return 2\n"
AFTER = BEFORE.replace("2", "3")


def test_grafts_come_from_the_first_release_that_has_the_text() -> None:
    op = one_op(BEFORE, AFTER, ("0.1", BEFORE), ("0.2", "X = 1\n" + AFTER), ("0.3", AFTER))
    assert op.keys == {
        "op": "graft",
        "file": "vllm/x.py",
        "from": "vllm==0.2",
        "names": ["b"],
        "replace": True,
    }
    new = one_op(
        BEFORE, f"{BEFORE}\n\ndef c():\n    return 4\n", ("0.2", "def c():\n    return 4\n")
    )
    assert (new.keys["names"], new.keys["after"]) == (["c"], "b")
    assert one_op(None, AFTER, ("0.2", AFTER)).keys["whole"] is True
    assert one_op(BEFORE, AFTER, ("0.1", BEFORE)).keys["op"] == "replace"


def test_ranges() -> None:
    versions = ["0.1.0", "0.2.0", "0.2.0.post1", "0.3.0"]
    assert run_around(versions, dict.fromkeys(versions[1:], True), "0.2.0") == versions[1:]
    assert range_of(versions[1:3], versions) == ("0.2.0rc0", "0.3.0rc0")
    assert range_of(versions[3:], versions) == ("0.3.0rc0", "0.4.0rc0")
    assert (bound("0.2.0.post1"), after_newest("1.9.3")) == ("0.2.0.post1.dev0", "1.10.0rc0")


@pytest.mark.parametrize(
    ("specifier", "rest"),
    [
        (">=1.0rc0,<2.0rc0", [">=1.0rc0,<2.0rc0"]),
        (">=2.0rc0,<3.0rc0", []),
        (">=1.0rc0,<2.5rc0", [">=1.0rc0,<2.0rc0"]),
        (">=2.5rc0", [">=3.0rc0"]),
        ("<4.0rc0", ["<2.0rc0", ">=3.0rc0,<4.0rc0"]),
        (">=3.0rc0,<4.0rc0", [">=3.0rc0,<4.0rc0"]),
        ("==1.5", ["==1.5"]),
        ("==2.5", []),
        ("==2.*", []),
        ("==2.9.*", []),
        ("==3.*", ["==3.*"]),
        ("~=1.5", ["~=1.5"]),
        ("~=2.5", []),
        ("<=2.5", ["<=2.5,<2.0rc0"]),
        ("<=4.0", ["<=4.0,<2.0rc0", ">=3.0rc0,<=4.0"]),
        (">3.0", [">3.0"]),
        (">=1.0rc0,!=1.5,<2.5rc0", [">=1.0rc0,!=1.5,<2.0rc0"]),
        (">=2.5rc0,!=2.5.*", [">=3.0rc0,!=2.5.*"]),
        (">=2.5rc0,!=3.5", [">=3.0rc0,!=3.5"]),
    ],
)
def test_a_range_without_a_part(specifier: str, rest: list[str]) -> None:
    assert without(specifier, "2.0rc0", "3.0rc0") == rest


@pytest.mark.parametrize(
    ("run", "bounds"),
    [
        ("1.0.0 1.1.0rc1 1.1.0rc2 1.1.0", ("1.0.0rc0", "1.2.0rc0")),
        ("1.1.0", ("1.1.0", "1.2.0rc0")),
        ("1.1.0rc1", ("1.1.0rc0", "1.1.0rc2")),
        ("1.1.0rc2", ("1.1.0rc2", "1.1.0rc3")),
        ("1.2.0.post1", ("1.2.0.post1.dev0", "1.3.0rc0")),
        ("1.2.0", ("1.2.0rc0", "1.2.0.post1.dev0")),
    ],
)
def test_a_range_has_no_candidate_beside_its_run(run: str, bounds: tuple[str, str]) -> None:
    versions = ["1.0.0", "1.1.0rc1", "1.1.0rc2", "1.1.0", "1.2.0", "1.2.0.post1"]
    assert range_of(run.split(), versions) == bounds
    inside = SpecifierSet(f">={bounds[0]},<{bounds[1]}")
    assert [v for v in versions if inside.contains(v, prereleases=True)] == run.split()


def test_the_tables_of_a_file_keep_their_comments_and_texts() -> None:
    text = "a = 1\n# about b\n[b]\nx = '''\n[[c]]\n'''\n\n[[c]]\ny = \"\"\"\n[d]\"\"\"\n"
    parts = sections(text)
    assert [part.header for part in parts] == ["", "b", "c"]
    assert parts[1].text.startswith("# about b\n")
    assert "".join(part.text for part in parts) == text
    with pytest.raises(UsageError, match="no line when"):
        parts[1].setting("when", "")


@pytest.mark.parametrize(
    "old", ["a\nb\n", "x'''\ny\n", "tab\t\u20ac\n\\n\n", "\x0c\nform feed\n", "a\n'"]
)
def test_texts_survive_toml(old: str) -> None:
    op = DraftOp(keys={"op": "replace", "file": "x", "old": old, "new": "n\n", "replace": True})
    assert tomllib.loads(op_text(op))["variant"]["op"] == [op.keys]
