"""``sys.path`` as computed from an image's files, against a real interpreter on the same files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.processes.proof.startingtrees import Real, can_enter, cases, compare

if TYPE_CHECKING:
    from pathlib import Path

#: Cases, in groups so that several processors can share them.
_GROUPS, _CASES = 5, 20


@pytest.mark.parametrize("seed", range(_GROUPS))
def test_the_search_path_is_that_of_a_real_interpreter(tmp_path: Path, seed: int) -> None:
    if not sys.platform.startswith("linux") or not can_enter(tmp_path):
        pytest.skip("needs root or user namespaces on Linux")
    real = Real.of(sys.executable).copied(tmp_path / "real")
    results: list[str] = []
    for number, case in enumerate(cases(real, seed, _CASES)):
        result, ours, theirs = compare(real, case, tmp_path / str(number))
        assert result != "differs", (case, ours, theirs)
        results.append(result)
    assert results.count("same") >= _CASES // 3
