"""What a changed source tree means for its build, on a small tree with a CMakeLists.txt."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from builder.applier.states import PRE
from builder.compile.changes import PatchedSource, SourceBuild, affected_units
from builder.compile.sources import SourceTree
from tests.unit.compile.test_native import GUARDS, LISTS, UTILS
from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.compile.changes import AffectedUnits

    Changed = Callable[[dict[str, str | None]], AffectedUnits]

FILES = {
    "CMakeLists.txt": LISTS,
    "cmake/utils.cmake": UTILS,
    "csrc/a_sm120.cu": '#include "sub/guards.hpp"\n#include "a.cuh"\n',
    "csrc/a.cuh": "using K = enable_sm120_family<int>;\n",
    "csrc/b.cpp": '#include "sub/c.h"\n',
    "csrc/c.h": "// below\n",
    "csrc/sub/c.h": '#include "d.h"\n#include "e.h"\n',
    "csrc/sub/d.h": "// beside\n",
    "csrc/d.h": "// above\n",
    "csrc/e.h": "// above\n",
    "csrc/sub/guards.hpp": GUARDS,
    "csrc/nobody.cuh": "// nobody's\n",
}
A, B, MADE = "csrc/a_sm120.cu", "csrc/b.cpp", "csrc/made/made.cu"


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Hold the tree with changes against the tree as it is."""
    root = write_tree(tmp_path / "tiny", {path: text.encode() for path, text in FILES.items()})
    before = SourceBuild(SourceTree(root=root, version="1.0"), "12.1a", "13.0")

    def reached(changes: dict[str, str | None]) -> AffectedUnits:
        again = tmp_path / "again"
        shutil.copytree(root, again)
        for path, text in changes.items():
            if text is None:
                (again / path).unlink()
            else:
                write_tree(again, {path: text.encode()})
        return affected_units(
            before, SourceBuild(SourceTree(root=again, version="1.0"), "12.1a", "13.0"), changes
        )

    return reached


def units(found: AffectedUnits) -> set[str]:
    return {unit.path for unit in found.rebuilt}


def test_a_removed_header_can_expose_another(changed: Changed) -> None:
    """No other file changes: what is above is found from now on."""
    assert units(changed({"csrc/sub/d.h": None})) == {B}


def test_a_new_header_can_hide_another(changed: Changed) -> None:
    assert units(changed({"csrc/sub/e.h": "// beside\n"})) == {B}


def test_generated_files_count_as_changed(changed: Changed) -> None:
    found = changed({"CMakeLists.txt": LISTS.replace("a.cuh", "c.h")})
    assert (units(found), found.unreached) == ({MADE}, ())


def test_targets_of_a_unit_matter(changed: Changed) -> None:
    lists = LISTS.replace("SRCS csrc/a_sm120.cu ARCH", "SRCS csrc/made/made.cu ARCH")
    assert units(changed({"CMakeLists.txt": lists})) == {A, MADE}


def test_definitions_are_collected_from_all_units(changed: Changed) -> None:
    assert units(changed({"CMakeLists.txt": LISTS.replace("A=1", "A=2")})) == {A, B, MADE}


def test_files_without_effect_are_listed(changed: Changed) -> None:
    found = changed({"CMakeLists.txt": LISTS + "# the end\n", "csrc/nobody.cuh": "// mine\n"})
    assert units(found) == set()
    assert found.unreached == ("CMakeLists.txt", "csrc/nobody.cuh")
    assert found.refusal == ""


def test_a_removed_unit_stays_in_the_library(changed: Changed) -> None:
    lists = LISTS.replace("csrc/a_sm120.cu csrc/b.cpp", "csrc/b.cpp").replace(f"SRCS {A} ", "SRCS ")
    found = changed({"CMakeLists.txt": lists})
    assert "removes csrc/a_sm120.cu from the build" in found.refusal


def test_a_trap_is_reported_with_a_hint(changed: Changed) -> None:
    found = changed({"csrc/a.cuh": "using K = enable_sm120_only<int>;\n"})
    assert "where enable_sm120_only in csrc/a.cuh" in found.traps[0]
    assert "sm120-family" in found.traps[1]
    assert found.refusal == ""


def test_changes_are_applied_to_a_copy(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tiny", {path: text.encode() for path, text in FILES.items()})
    laid = PatchedSource(SourceTree(root=root, version="1.0"), tmp_path / "laid")
    diff = (
        "diff --git a/csrc/d.h b/csrc/f.h\nrename from csrc/d.h\nrename to csrc/f.h\n"
        "diff --git a/csrc/c.h b/csrc/c.h\n--- a/csrc/c.h\n+++ b/csrc/c.h\n"
        "@@ -1,1 +1,1 @@\n-// below\n+// changed\n"
    )
    assert [one.result.form for one in laid.diff(diff)] == [PRE, PRE]
    assert laid.texts == {
        "csrc/c.h": b"// changed\n",
        "csrc/d.h": None,
        "csrc/f.h": b"// above\n",
    }
    assert (root / "csrc/d.h").read_bytes() == b"// above\n", "the source itself stays as it was"
