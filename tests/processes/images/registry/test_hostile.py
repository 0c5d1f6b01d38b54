"""Hostile layers are read in bounded memory: measured in a process of its own."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from builder.images.rootfs import limits
from tests.unit.images.registry.test_hostile import END, header


def test_millions_of_entries_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    """Ten million names in 25 MB; what is kept meanwhile is on the disk, and goes away."""
    several = b"".join(header(f"d/{n}") for n in range(10_000))
    blob = gzip.compress(several, 1) * 1000
    said, read = bounded(tmp_path, blob, entries=20_000)
    assert "more than 20000 entries" in said
    assert read < len(blob) / 10


#: Reads the layer at argv[1] with 100 MB of memory, and says how it ended; 128 MB may be unpacked
#: without justification, an eighth of what real layers may.
_BOUNDED = """\
import resource, sys
from builder.images.rootfs import limits
limits.ENTRIES = int(sys.argv[2])
limits.FREE_BYTES = 128 << 20
resource.setrlimit(resource.RLIMIT_AS, (100 << 20, 100 << 20))
from builder.errors import SparkBuildError
from builder.images.rootfs.tar import LayerTar
from builder.images.rootfs.tar import Unpacked
stream = open(sys.argv[1], "rb")
try:
    tar = LayerTar(Unpacked(stream, "layer"), "layer")
    for member in tar:
        for chunk in tar.chunks():
            pass
    print("read")
except SparkBuildError as error:
    print(f"refused: {error}")
print(stream.tell())
"""


def bomb_of(pack: Any, megabytes: int) -> bytes:
    """A file of zeros, packed in parts that are all the same."""
    part = pack(bytes(16 << 20))
    return bytes(pack(header("zeros", size=megabytes << 20)) + part * (megabytes >> 4) + pack(END))


def bounded(tmp_path: Path, blob: bytes, entries: int = limits.ENTRIES) -> tuple[str, int]:
    """How reading a blob in 100 MB of memory ended, and how many of its bytes were read."""
    (tmp_path / "blob").write_bytes(blob)
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, str(tmp_path / "blob"), str(entries)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, read = done.stdout.splitlines()
    return said, int(read)


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_a_decompression_bomb_is_refused_early(tmp_path: Path, pack: Any) -> None:
    bomb = bomb_of(pack, 384)
    assert len(bomb) < 1 << 20
    assert "the layer is refused" in bounded(tmp_path, bomb)[0]


def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    assert bounded(tmp_path, bomb_of(gzip.compress, 112))[0] == "read"
