"""Where two images differ: keys, names, modes, and bytes."""

from __future__ import annotations

import pytest

from builder.pipeline.rebuild import by_variable, byte_range, compare_documents, compare_rows


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"abcdef", b"abXdef", "bytes 2-2 differ (6 bytes, rebuilt 6)"),
        (b"abcdef", b"XbcdeY", "bytes 0-5 differ (6 bytes, rebuilt 6)"),
        (b"abcdef", b"abcXYdef", "2 bytes are missing at 3 (6 bytes, rebuilt 8)"),
        (b"abcXYdef", b"abcdef", "bytes 3-4 are not in the rebuilt one (8 bytes, rebuilt 6)"),
        (b"abc", b"abcdef", "3 bytes, rebuilt 6: one is the beginning of the other"),
        (b"", b"x", "0 bytes, rebuilt 1: one is the beginning of the other"),
        (None, b"x", "other content, too large to compare"),
    ],
)
def test_byte_range(old: bytes | None, new: bytes | None, said: str) -> None:
    assert byte_range(old, new) == said


def test_documents() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "same": [{"k": 1}]}
    new = {"a": 1, "b": {"c": [1, 3], "e": "y"}, "same": [{"k": 1}]}
    found = {d.where: d.what for d in compare_documents(old, new, "config")}
    assert found == {
        "b.c[1]": "2, rebuilt 3",
        "b.d": '"x", rebuilt absent',
        "b.e": 'absent, rebuilt "y"',
    }
    assert compare_documents([1], [1, 2], "x", "list")[0].what == "[1], rebuilt [1, 2]"
    assert compare_documents(old, old, "config") == []
    assert len(compare_documents({"a": "x" * 9999}, {"a": ""}, "c")[0].what) < 300


def test_variables_by_name() -> None:
    assert by_variable({"Env": ["A=1", "B=x=y", "C"]})["Env"] == {"A": "1", "B": "x=y", "C": ""}
    assert by_variable({"User": "0"}) == {"User": "0"}
    assert by_variable({"Env": [1]}) == {"Env": [1]}


def test_rows() -> None:
    def row(mode: int = 0o644, content: str = "1") -> tuple[object, ...]:
        return ("file", mode, 0, 0, "", content)

    old = {"/a": row(), "/b": row(), "/c": row(), "/d": row(0o755, "2")}
    new = {"/a": row(), "/b": row(0o600), "/d": row(0o755, "3"), "/e": row()}
    found, changed = compare_rows(old, new, "layer")
    assert {d.where: d.what for d in found} == {
        "/b": "file 0644 0:0, rebuilt file 0600 0:0",
        "/c": "not in the rebuilt one",
        "/e": "not in the image",
    }
    assert changed == ["/d"]
