"""Free space on disks that are mounted."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from builder.common.diskspace import check_room
from builder.errors import BuildFailed
from tests.unit.common.test_room import big, need  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size, which a test as root can have."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(words, check=True)
    try:
        yield folder
    finally:
        # lazily: this process holds the lock of a cache there until it has another
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_disks_are_counted_separately(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as small:
        check_room([need(small, 60_000), need(tmp_path, 60_000)])
        with pytest.raises(BuildFailed, match=r"65\.5 kB are free"):
            check_room([need(small, 66_000), need(tmp_path, 10)])


IMAGE = ("image", "-l", "fix", "-b", "pypi:vllm==0.20.1", "--engine", "oci", "--no-verify")


def test_an_image_that_does_not_fit_is_not_started(
    big: Callable[..., Called], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", "256k") as small:
        result = big(*IMAGE, "--output", f"oci:{small}/out", "--json")
        assert result.code == 7
        error = result.json["error"]
        assert f"not enough room on the disk of {small}/out" in error["message"]
        assert "262.1 kB are free" in error["message"]
        assert "--output oci:DIR" in error["hint"]
        assert not list(small.iterdir())
    assert big(*IMAGE, "--output", f"oci:{tmp_path}/out").code == 0


def test_a_cache_disk_without_room_for_the_sandbox(
    big: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", "20m") as small:
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(small))
        words = [word for word in IMAGE if word != "--no-verify"]
        result = big(*words, "--output", f"oci:{tmp_path}/out")
        assert result.code == 7
        assert f"not enough room on the disk of {small}" in result.err
        assert "spark-build cache prune" in result.err
        assert not (tmp_path / "out").exists()
