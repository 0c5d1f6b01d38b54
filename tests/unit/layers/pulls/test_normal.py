"""The normal form of a diff: what stays, what goes, and that it is one form."""

from __future__ import annotations

import pytest

from builder.applier.diff import parse_diff
from builder.common.diffs import normalise, read_sections
from builder.errors import UsageError

EDIT = b"""\
diff --git a/vllm/b.py b/vllm/b.py
index 1234567..89abcde 100644
--- a/vllm/b.py
+++ b/vllm/b.py
@@ -1,4 +1,4 @@ def of(some, function):
 one
 two
-three
+drei
 four
"""
NORMAL = b"""\
diff --git a/vllm/b.py b/vllm/b.py
--- a/vllm/b.py
+++ b/vllm/b.py
@@ -1,4 +1,4 @@
 one
 two
-three
+drei
 four
"""
MAIL = b"""\
From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001
From: A Developer <developer@example.org>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] Three is drei

--- a line of the message that looks like a header
---
 vllm/b.py | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

"""
TRAILER = b"-- \n2.39.5\n\n"


def other(data: bytes, name: bytes) -> bytes:
    return data.replace(b"vllm/b.py", name)


SAME = {
    "as-it-is": NORMAL,
    "index-and-heading": EDIT,
    "mail": MAIL + EDIT + TRAILER,
    "file-times": EDIT.replace(b"b.py\n+++", b"b.py\t2026-01-01 00:00:00\n+++"),
    "full-index": EDIT.replace(b"1234567..89abcde", b"1" * 40 + b".." + b"2" * 40),
    "all-in-crlf": EDIT.replace(b"\n", b"\r\n"),
    "no-end": EDIT.rstrip(b"\n"),
}


@pytest.mark.parametrize("data", SAME.values(), ids=SAME.keys())
def test_equal_changes_have_the_same_normal_form(data: bytes) -> None:
    assert normalise(data) == NORMAL


def test_different_changes_have_different_normal_forms() -> None:
    for changed in (EDIT.replace(b"drei", b"trois"), EDIT.replace(b"@@ -1,4", b"@@ -2,4")):
        assert normalise(changed) != NORMAL


def test_files_are_sorted() -> None:
    a, c = other(EDIT, b"vllm/a.py"), other(EDIT, b"vllm/c.py")
    assert normalise(c + EDIT + a) == normalise(a + EDIT + c)
    assert [s.path for s in read_sections(c + EDIT + a)] == ["vllm/a.py", "vllm/b.py", "vllm/c.py"]


def test_an_empty_diff_is_empty() -> None:
    assert normalise(b"") == b""


def test_an_empty_context_line_can_lack_its_space() -> None:
    full = EDIT.replace(b" two\n", b" \n")
    assert normalise(full.replace(b"\n \n", b"\n\n")) == normalise(full)


def test_a_header_inside_a_hunk_is_content() -> None:
    tricky = EDIT.replace(b"-three\n+drei\n", b"--- a/x\n+++ b/x\n")
    (section,) = read_sections(tricky)
    assert section.hunks[3:5] == (b"--- a/x\n", b"+++ b/x\n")
    assert parse_diff(section.render().decode())[0].hunks[0].old[2] == "-- a/x\n"


KINDS = {
    "new-empty": (b"new file mode 100644\nindex 0000000..e69de29\n", (None, "x")),
    "deleted-empty": (b"deleted file mode 100755\nindex e69de29..0000000\n", ("x", None)),
    "mode": (b"old mode 100644\nnew mode 100755\n", ("x", "x")),
}


@pytest.mark.parametrize(("header", "names"), KINDS.values(), ids=KINDS.keys())
def test_kinds_without_hunks(header: bytes, names: tuple[str | None, str | None]) -> None:
    data = b"diff --git a/x b/x\n" + header
    (section,) = read_sections(data)
    assert ((section.old, section.new), section.special) == (names, "")
    assert normalise(normalise(data)) == normalise(data)
    assert b"index" not in normalise(data)


def test_a_rename_keeps_both_names_and_loses_the_similarity() -> None:
    data = (
        b"diff --git a/old b/new/name\nsimilarity index 90%\nrename from old\nrename to new/name\n"
    )
    (section,) = read_sections(data)
    assert (section.old, section.new) == ("old", "new/name")
    assert b"similarity" not in normalise(data)
    assert normalise(normalise(data)) == normalise(data)


SPECIAL = {
    "binary": (b"index 1..2 100644\nBinary files a/x and b/x differ\n", "a binary file"),
    "binary-data": (
        b"index 1..2\nGIT binary patch\nliteral 3\nKcmZQzfB\n\nliteral 0\n",
        "a binary",
    ),
    "link": (
        b"new file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+y\n",
        "a symbolic link",
    ),
    "edited-link": (b"index 1..2 120000\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-y\n+z\n", "a symbolic"),
    "submodule": (b"index 1..2 160000\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-y\n+z\n", "a submodule"),
    "copy": (b"similarity index 100%\ncopy from y\ncopy to x\n", "a copy"),
    "mode": (b"old mode 100644\nnew mode 104755\n", "a file with mode 104755"),
    "new-with-a-mode": (
        b"new file mode 040000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+y\n",
        "a file with mode 040000",
    ),
    "odd-name": (b"rename from x\nrename to \xe4\n", "a file whose name is not UTF-8"),
    "latin-1": (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\xe4\n+\xf6\n", "not UTF-8 text"),
}


@pytest.mark.parametrize(("body", "why"), SPECIAL.values(), ids=SPECIAL.keys())
def test_changes_that_a_text_diff_cannot_express_are_recognised(body: bytes, why: str) -> None:
    data = b"diff --git a/x b/x\n" + body
    (section,) = read_sections(data)
    assert section.special.startswith(why)
    (again,) = read_sections(normalise(data))
    assert again.special.startswith(why)
    assert normalise(normalise(data)) == normalise(data)


WRONG = {
    "no-diff": (b"<html>502</html>\n", "not a git diff"),
    "short-hunk": (EDIT.replace(b" four\n", b""), "has the wrong length"),
    "long-hunk": (EDIT.replace(b"-1,4", b"-1,5"), "has the wrong length"),
    "unread-hunk": (EDIT + b"noise\n@@ -9 +9 @@\n-x\n+y\n", "cannot be read to its end"),
    "twice": (EDIT + EDIT, "changes vllm/b.py twice"),
    "upwards": (other(EDIT, b"../etc/passwd"), "not a path in a repository"),
    "absolute": (other(EDIT, b"/etc/passwd"), "not a path in a repository"),
    "nameless": (b"diff --git a/x b/yy\nindex 1..2\n", "cannot be read"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_malformed_diff_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        normalise(data)
