"""A harness runs again when anything that it is made of or given changes, and only then."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .sandboxed import Release

if TYPE_CHECKING:
    from collections.abc import Callable

#: Counts its runs in a file, and repeats what it is given.
COUNTS = """
import json, pathlib, sys
counted, root = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
counted.write_text(counted.read_text() + "x")
(root / "answer.json").write_text(json.dumps(str(root / "model")))
print(json.dumps({"given": json.load(sys.stdin), "root": str(root)}))
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a harness in a folder; gives how often it really ran so far."""
    monkeypatch.setenv("SPARK_BUILD_TEST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "counts.py").write_text(COUNTS)
    counts = tmp_path / "counts"
    counts.touch()

    def run(release: Release, root: Path, given: object) -> int:
        words = (str(tmp_path / "counts.py"), str(counts), str(root))
        (said,) = release.run(*words, given=given, root=root)
        assert said == {"given": given, "root": str(root)}
        assert (root / "answer.json").read_text() == f'"{root}/model"'
        return len(counts.read_text())

    return run


def test_a_run_is_repeated_only_after_a_change(counted: Callable[..., int], tmp_path: Path) -> None:
    release = Release("0.33.0", Path(sys.executable), ["/a"], "")
    one, other, changed = (tmp_path / name for name in ("one", "other", "changed"))
    for folder in (one, other, changed):
        folder.mkdir()
        (folder / "config.json").write_text("{}" if folder != changed else "{ }")
    assert counted(release, one, [1]) == 1
    assert counted(release, other, [1]) == 1, "the folder's name is no reason"
    (one / "answer.json").unlink()
    assert counted(release, one, [2]) == 2
    assert counted(release, changed, [1]) == 3
    (one / "answer.json").unlink()
    assert counted(replace(release, paths=["/b"]), one, [1]) == 4


def test_a_run_that_fails_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_TEST_CACHE", str(tmp_path / "cache"))
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('no such module')")
    release = Release("0.33.0", Path(sys.executable), [], "")
    for _ in range(2):
        with pytest.raises(AssertionError, match="no such module"):
            release.run(str(failing))
