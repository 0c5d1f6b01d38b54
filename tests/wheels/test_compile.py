"""A released kernel compiled for SM121 as it is, and with the change: a trap, and real code.

Needs nvcc 13; where it is not there the tests are not run, and say so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

UNIT = "csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"
pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so no kernel is compiled here"
)


def compiled(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "builder", "compile", "run", *words, "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def test_as_released_every_kernel_is_a_trap() -> None:
    code, answer = compiled("--vllm", "0.19.1", "--unit", UNIT)
    assert code == 5
    assert "every kernel is a trap" in answer["error"]["message"]


def test_with_the_family_change_it_is_real_code() -> None:
    code, answer = compiled("--vllm", "0.19.1", "--change", "sm120-family")
    assert code == 0
    (unit,) = answer["units"]
    assert unit["path"] == UNIT
    (cubin,) = unit["code"]
    assert cubin == {"target": "sm_121a", "tensor": {"QMMA.16832.F32.E4M3.E4M3": 1024}, "traps": 0}


@pytest.mark.parametrize(("release", "code"), [("0.22.1", 3), ("0.20.1", 0)])
def test_dry_run_says_what_would_be_compiled(release: str, code: int) -> None:
    """0.22.0 brought the change; before it, one unit is compiled again."""
    words = ("--vllm", release, "--change", "sm120-family", "--dry-run")
    found, answer = compiled(*words)
    assert found == code
    if code == 0:
        assert len(answer["rebuild"]) == 1
