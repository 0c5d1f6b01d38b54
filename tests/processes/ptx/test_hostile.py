"""Hostile kernels and launches end at once, with one line and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from builder.common.paths import package_file
from builder.ptx.native import core
from tests.processes.ptx.hostile import LAUNCHES, MODULES, cases

ROOT = package_file().parent
#: Cases that end in a fault of the kernel; every other is refused.
FAULTS = (
    "a parameter b", "an offset at", "a register at", "before all", "one lane", "a shared address",
    "the last", "an address in", "an atomic", "a global atomic", "a local", "an mbarrier",
    "an arrival", "a copy", "a bulk", "a tensor", "a matrix", "a lane", "a variable",
    "terabytes of m", "a name", "a line", "entries", "a text", "calls", "a call",
)  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each case ended, by its name."""
    core()
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.ptx.hostile"],
        capture_output=True, text=True, check=True, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", cases())
def test_hostile_input_ends_with_one_line(name: str, ended: dict[str, dict[str, Any]]) -> None:
    one = ended[name]
    assert one["status"] == 0, "a signal ended the process"
    faults = name.startswith(FAULTS) and name not in LAUNCHES
    assert one["code"] == (5 if faults else 2), one
    lines = one["err"].splitlines()
    assert lines[0].startswith("error: ")
    assert "internal" not in lines[0]
    assert "not understood (" not in one["err"] + one["out"]  # nobody thought of it
    assert len([line for line in lines if not line.startswith("  try: ")]) == 1
    if faults:
        assert one["out"].splitlines()[-1].startswith("  fault: "), one


def test_nothing_of_the_host_is_in_the_arrays(ended: dict[str, dict[str, Any]]) -> None:
    assert MODULES  # the kernel that read before its parameters has stored nothing
    assert "a read at -4096 of 8 bytes" in ended["a parameter before the first"]["out"]
