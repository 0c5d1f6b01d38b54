"""Disk space that a local Docker Engine will need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.errors import SparkBuildError
from builder.registry.locations import Locations
from builder.registry.options import Options
from builder.rootfs.image import find_image
from builder.util.console import console, megabytes
from builder.util.diskspace import Need

if TYPE_CHECKING:
    from docker import DockerClient

_ENGINE = "docker system prune, or --engine oci, which needs no Docker Engine"
#: Bytes in an engine for each byte of an image's layers in a registry, at least: measured
#: 4.1 on a vLLM image (1202 MB compressed); an engine with the containerd store keeps both.
_UNPACKED = 2


def engine_root(client: DockerClient) -> Path | None:
    """A Docker Engine's data folder, if the engine is on this machine."""
    address = settings.DOCKER_HOST.value or "unix://"
    if not address.startswith("unix://"):
        return None
    root = Path(str(client.info().get("DockerRootDir") or "/nonexistent"))
    return root if root.is_dir() else None


def engine_needs(client: DockerClient, size: int, what: str) -> list[Need]:
    """Space needed in a Docker Engine's data folder, if it is on this machine."""
    root = engine_root(client)
    return [Need(root, size, what, _ENGINE)] if root else []


def pull_needs(client: DockerClient, ref: str, platform: str | None) -> list[Need]:
    """Space needed for a pull; nothing if the registry does not give the size."""
    hurried = replace(Options.from_environment(), attempts=1, connect_timeout=5, read_timeout=10)
    try:
        with Locations(hurried) as locations:
            place = locations.open(f"docker://{ref}")
            image = find_image(place.image, place.reference, platform)
            packed = sum(layer.size for layer in image.layers)
    except SparkBuildError as error:  # the engine may have another way there
        console.detail(f"the size of {ref} is unknown: {error}")
        return []
    what = f"{ref}, {megabytes(packed)} packed"
    return engine_needs(client, _UNPACKED * packed, what)
