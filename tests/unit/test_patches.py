"""Tests patch objects that they import: a path in a string is not found when a module moves."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PATCH = re.compile(r"""setattr\(\s*["'](builder|tests)\.[\w.]+""")


def test_no_test_patches_a_path_in_a_string() -> None:
    found = {
        f"{path.relative_to(TESTS)}: {match[0]}"
        for path in TESTS.rglob("*.py")
        for match in PATCH.finditer(path.read_text("utf-8"))
    }
    assert not found, "import the module, or give the function a parameter"


def test_a_path_in_a_string_is_found() -> None:
    path = '"builder.util.room.free"'
    assert PATCH.search(f"monkeypatch.setattr(\n    {path}, 1)")
    assert not PATCH.search('monkeypatch.setattr(room, "free", 1)')
