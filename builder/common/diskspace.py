"""Checks free disk space before anything is written."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import megabytes
from builder.common.hints import OUTPUT, TEMPORARY
from builder.common.paths import cache_dir
from builder.errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Hints by kind of place.
_OUTPUT = f"{OUTPUT}; --thin leaves the base's blobs out"
_TEMPORARY = f"free some space, or {TEMPORARY}"
_CACHE = "spark-build cache prune"
_ELSEWHERE = "SPARK_BUILD_CACHE can name a folder on another disk"


@dataclass(frozen=True)
class Need:
    """Bytes that will be written to a path, and their purpose."""

    place: Path
    bytes: int
    what: str
    hint: str

    @classmethod
    def output(cls, place: Path, size: int, what: str) -> Need:
        """Space at a path that the user chose."""
        return cls(place, size, what, _OUTPUT)

    @classmethod
    def temporary(cls, size: int, what: str) -> Need:
        """Space in the folder for temporary files."""
        return cls(Path(tempfile.gettempdir()), size, what, _TEMPORARY)

    @classmethod
    def cache(cls, size: int, what: str) -> Need:
        """In the cache."""
        return cls(cache_dir(), size, what, _CACHE)


def check_room(needs: Iterable[Need]) -> None:
    """Refuse to start if a disk lacks space; needs on the same disk add up.

    Raises:
        BuildFailed: names the path, the needed space and its purpose, and the free space.
    """
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_existing(need.place).stat().st_dev, []).append(need)
    for wanted in disks.values():
        total = sum(need.bytes for need in wanted)
        free = shutil.disk_usage(_existing(wanted[0].place)).free
        if total <= free:
            continue
        rows = [f"{need.place}: {megabytes(need.bytes)} for {need.what}" for need in wanted]
        largest = max(wanted, key=lambda need: need.bytes)
        rows += [_ELSEWHERE] if largest.hint == _CACHE else []
        raise BuildFailed(
            f"not enough room on the disk of {largest.place}: {megabytes(total)} are needed, "
            f"{megabytes(free)} are free:\n  " + "\n  ".join(rows),
            hint=largest.hint,
        )


def _existing(place: Path) -> Path:
    """The path, or its nearest existing parent."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place
