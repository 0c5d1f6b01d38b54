"""Removing entries of the cache while another process uses them."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.unit.common.cache.test_cache import WHEEL, cache, put  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]


@contextmanager
def another_run() -> Iterator[None]:
    """Another process that has the cache in use."""
    code = (
        "from builder.common.paths import cache_dir; cache_dir(); print('up', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield
        finally:
            process.stdin.write("\n")
            process.stdin.close()


def test_recent_entries_are_kept_during_another_run(spark_build: SparkBuild, cache: Path) -> None:
    put(f"blobs/{WHEEL}/layer", 50)
    with another_run():
        value = spark_build("cache", "clean", "--yes", "--json").json
        assert value["in_use"] == 1
        assert value["kept_bytes"] == 50
        result = spark_build("cache", "clean", "--yes")
        assert result.code == 3
        assert "1 were kept because other runs may be using them" in result.err
    assert spark_build("cache", "clean", "--yes").out == "freed 50 B; 0 B stay\n"


def test_entries_of_a_run_are_kept_though_the_clock_was_set(
    spark_build: SparkBuild, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run of several days uses what it used on its first one."""
    put(f"blobs/{WHEEL}/layer", 50)
    with another_run():
        later = time.time() + 10 * 365 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: later)
        result = spark_build("cache", "clean", "--yes")
        assert "1 were kept because other runs may be using them" in result.err
        assert "; 50 B stay" in result.out
    assert spark_build("cache", "clean", "--yes").out == "freed 50 B; 0 B stay\n"


def test_a_run_that_starts_meanwhile_waits(cache: Path) -> None:
    from builder.common.cache import _alone

    with _alone(cache) as alone:
        assert alone
        code = "from builder.common.paths import cache_dir; cache_dir(); print('up', flush=True)"
        begun = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            begun.wait(0.5)
    assert begun.communicate(timeout=600)[0] == b"up\n"
