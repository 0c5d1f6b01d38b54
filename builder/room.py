"""Room on disks: compared with what will be written before anything is."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.console import console, megabytes
from builder.errors import BuildFailed
from builder.hints import CACHE, OUTPUT, TEMPORARY
from builder.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from docker import DockerClient

#: What helps, by what lies in a place.
_OUTPUT = f"{OUTPUT}; --thin leaves the base's blobs out"
_TEMPORARY = f"free some space, or {TEMPORARY}"
_CACHE = f"spark-build cache prune, or cache clean; or {CACHE}"
_ENGINE = "docker system prune, or --engine oci, which needs no Docker Engine"
#: Bytes of an image's layers in an engine for one byte of them in a registry, at least: measured
#: 4.1 on a vLLM image (1202 MB packed), and an engine with the containerd store keeps both.
_UNPACKED = 2


@dataclass(frozen=True)
class Need:
    """Bytes that will be written to a place, and what they are for."""

    place: Path
    bytes: int
    what: str
    hint: str

    @classmethod
    def output(cls, place: Path, size: int, what: str) -> Need:
        """In a place that the user chose."""
        return cls(place, size, what, _OUTPUT)

    @classmethod
    def temporary(cls, size: int, what: str) -> Need:
        """In the folder for temporary files."""
        return cls(Path(tempfile.gettempdir()), size, what, _TEMPORARY)

    @classmethod
    def cache(cls, size: int, what: str) -> Need:
        """In the cache."""
        return cls(cache_dir(), size, what, _CACHE)


def engine_root(client: DockerClient) -> Path | None:
    """A Docker Engine's own folder, where the engine is on this machine."""
    address = settings.DOCKER_HOST.value or "unix://"
    if not address.startswith("unix://"):
        return None
    root = Path(str(client.info().get("DockerRootDir") or "/nonexistent"))
    return root if root.is_dir() else None


def engine_needs(client: DockerClient, size: int, what: str) -> list[Need]:
    """In a Docker Engine's own folder, where that is on this machine."""
    root = engine_root(client)
    return [Need(root, size, what, _ENGINE)] if root else []


def pull_needs(client: DockerClient, ref: str, platform: str | None) -> list[Need]:
    """For an image that an engine will pull; nothing where its registry does not tell the size."""
    from builder.errors import SparkBuildError
    from builder.registry.locations import Locations
    from builder.registry.options import Options
    from builder.rootfs.image import find_image

    hurried = replace(Options.from_environment(), attempts=1, connect_timeout=5, read_timeout=10)
    try:
        with Locations(hurried) as locations:
            place = locations.open(f"docker://{ref}")
            image = find_image(place.image, place.reference, platform)
            packed = sum(layer.size for layer in image.layers)
    except SparkBuildError as error:  # the engine may have another way there
        console.detail(f"the size of {ref} is not known: {error}")
        return []
    what = f"{ref}, {megabytes(packed)} packed"
    return engine_needs(client, _UNPACKED * packed, what)


def check_room(needs: Iterable[Need]) -> None:
    """Refuse to begin what a disk has no room for; needs on one disk add up.

    Raises:
        BuildFailed: names the place, what is needed there and for what, and what is free.
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
        raise BuildFailed(
            f"not enough room on the disk of {largest.place}: {megabytes(total)} are needed, "
            f"{megabytes(free)} are free:\n  " + "\n  ".join(rows),
            hint=largest.hint,
        )


def _existing(place: Path) -> Path:
    """The place, or the nearest folder above it that is there."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place
