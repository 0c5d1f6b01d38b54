"""The core with sanitizers of addresses and of undefined behaviour runs kernels and a fuzz."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import package_file
from tests.processes.ptx.sanitized import environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Done = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="NOT RUN: no gcc, so nothing is compiled here"
)
ROOT = package_file().parent
PROGRAMS, SEED = 400, 20261129


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """Run a module of Python with the sanitizers; all share the core."""
    cache = str(tmp_path_factory.mktemp("cache"))
    more = {"OPENBLAS_NUM_THREADS": "1", "SPARK_BUILD_CACHE": cache}

    def called(*words: str) -> Done:
        return subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=ROOT,
            env={**environment(), **more}, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return called


def test_the_kernels_of_the_suite(run: Callable[..., Done], tmp_path: Path) -> None:
    words = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/base")
    done = run("tests.processes.ptx.sanitized", *words, "tests/unit/ptx/test_ptx_native.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_changed_kernels_launches_and_tables(run: Callable[..., Done], tmp_path: Path) -> None:
    number = tmp_path / "number"
    done = run("tests.processes.ptx.fuzz", str(PROGRAMS), str(SEED), str(number))
    assert done.returncode == 0, f"program {number.read_text()}: {done.stderr[-4000:]}"
    came = json.loads(done.stdout.splitlines()[-1])
    assert sum(came.values()) == PROGRAMS
    assert min(came["ran"], came["fault"], came["refused"]) > PROGRAMS / 50, came


def test_an_access_outside_is_seen(run: Callable[..., Done]) -> None:
    """The sanitizer watches numpy's memory: otherwise the tests above could not fail."""
    done = run("tests.processes.ptx.outside")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
