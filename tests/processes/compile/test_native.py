"""Which units a change affects, with CMake reading the build files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.compile import sources as units
from builder.compile.plans import outcome
from builder.errors import UsageError
from tests.unit.compile.test_native import source  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from builder.compile.sources import SourceTree


def test_the_build_files_decide(source: SourceTree) -> None:
    recipe = units.evaluate(source, "12.1a;9.0+PTX", "13.0")
    assert recipe.archs == ("121a", "90")
    assert {unit.extension for unit in recipe.units.values()} == {"_C"}
    kernel = recipe.units["csrc/a_sm120.cu"]
    assert kernel.gencodes == (("compute_121a", "sm_121a"), ("compute_90", "sm_90"))
    assert kernel.cuda_arch == (1210, 900)
    assert recipe.extensions["_C"].sabi == "3"
    assert recipe.extensions["_C"].definitions == ("A=1",)
    assert "csrc/made/made.cu" in recipe.generated
    assert not (source.root / "csrc" / "made").exists(), "the source itself stays as it was"


def test_the_same_sources_are_evaluated_once(source: SourceTree) -> None:
    archive = replace(source, sha256="e" * 64)
    first = units.evaluate(archive, "12.1a", "13.0")
    (source.root / "CMakeLists.txt").write_text("message(FATAL_ERROR again)")
    assert units.evaluate(archive, "12.1a", "13.0") is first
    for asked in (
        (archive, "12.0f", "13.0"),
        (archive, "12.1a", "12.8"),
        (source, "12.1a", "13.0"),
    ):
        with pytest.raises(UsageError, match="again"):
            units.evaluate(*asked)


@pytest.mark.parametrize(
    ("changed", "units"),
    [
        ("csrc/a.cuh", {"csrc/a_sm120.cu", "csrc/made/made.cu"}),
        ("csrc/c.h", {"csrc/b.cpp"}),
        ("csrc/sub/guards.hpp", {"csrc/a_sm120.cu"}),
    ],
)
def test_a_change_affects_the_units_that_include_it(
    source: SourceTree, changed: str, units: set[str]
) -> None:
    found = outcome(source, "12.1a", "13.0", [changed])
    assert {unit.path for unit in found.units} == units


def test_a_guard_that_admits_another_chip_is_found(source: SourceTree) -> None:
    assert outcome(source, "12.1a", "13.0").dead == {
        "csrc/a_sm120.cu": {"enable_sm120_only": "csrc/a.cuh"}
    }
    assert outcome(source, "12.0f", "13.0").dead == {}


def test_the_family_guard_admits_it(source: SourceTree) -> None:
    (source.root / "csrc" / "a.cuh").write_text("using K = enable_sm120_family<int>;\n")
    assert outcome(source, "12.1a", "13.0").dead == {}


def test_build_files_that_cannot_be_read_are_named(source: SourceTree) -> None:
    (source.root / "CMakeLists.txt").write_text("no_such_command(1)\n")
    with pytest.raises(UsageError, match="no_such_command"):
        units.evaluate(source, "12.1a", "13.0")


def test_a_missing_file_is_refused(source: SourceTree) -> None:
    with pytest.raises(UsageError, match=r"csrc/a_sm120\.cu"):
        outcome(source, "12.1a", "13.0", ["csrc/a_sm121.cu"])
