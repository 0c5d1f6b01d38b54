"""A target's Python files as a directory: what two targets share is there, and compiled, once."""

from __future__ import annotations

import py_compile
import shutil
from typing import TYPE_CHECKING

import pytest

from builder.proof.isolation import SandboxUnavailable
from builder.proof.sandbox import lay_out
from tests.unit.fakes import MemoryTree

if TYPE_CHECKING:
    from pathlib import Path

SAME, CHANGED, DATA = "vllm/same.py", "vllm/changed.py", "vllm/data.json"
FILES = {SAME: b"A = 1\n", CHANGED: b"B = 1\n", DATA: b"{}"}


def laid_out(changed: bytes) -> Path:
    return lay_out(MemoryTree({**FILES, CHANGED: changed}))


def compiled(folder: Path, path: str) -> list[Path]:
    file = folder / path
    return list(file.parent.glob(f"__pycache__/{file.stem}.*.pyc"))


def test_equal_files_are_linked_with_what_python_compiled() -> None:
    first = laid_out(b"B = 1\n")
    for path in (SAME, CHANGED):
        py_compile.compile(str(first / path))
    second = laid_out(b"B = 2\n")
    assert second != first
    for path in (SAME, DATA):
        assert (second / path).samefile(first / path)
    (old,), (new,) = compiled(first, SAME), compiled(second, SAME)
    assert new.samefile(old)
    assert (second / CHANGED).read_bytes() == b"B = 2\n"
    assert compiled(second, CHANGED) == []


def test_a_tree_without_its_list_or_with_a_damaged_one_is_passed_over() -> None:
    first = laid_out(b"B = 1\n")
    (listed,) = first.glob("*.json")
    listed.write_text("[", "utf-8")
    second = laid_out(b"B = 2\n")
    assert not (second / SAME).samefile(first / SAME)
    shutil.rmtree(first / "vllm")  # what another process removes meanwhile
    listed.write_bytes(next(second.glob("*.json")).read_bytes())
    shutil.rmtree(second)
    assert (laid_out(b"B = 2\n") / SAME).read_bytes() == FILES[SAME]


class Lying(MemoryTree):
    """Says the sha256 of a known file, and has another."""

    def read(self, path: str) -> bytes | None:
        return b"import os\n" if path == SAME else super().read(path)


def test_a_file_is_read_and_checked_although_an_earlier_tree_has_it() -> None:
    laid_out(b"B = 1\n")
    with pytest.raises(SandboxUnavailable, match=f"{SAME} does not match its sha256"):
        lay_out(Lying({**FILES, CHANGED: b"B = 2\n"}))
