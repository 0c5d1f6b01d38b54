"""Shell completion, without network access or heavy imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TOPOLOGIES = ("solo", "tp2", "tp2-ray", "pp3", "tp4", "two-solos")
FORMATS = ("docker", "compose", "sparkrun", "eugr", "kubernetes", "shell", "vllm", "trtllm")
PLATFORMS = ("linux/arm64", "linux/amd64")


def one_of(*words: str) -> Callable[[str], list[str]]:
    """A completion of fixed words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last of several comma-separated words."""
    done, comma, last = incomplete.rpartition(",")
    taken = done.split(",")
    return [f"{done}{comma}{name}" for name in names if name.startswith(last) and name not in taken]


def layers(incomplete: str) -> list[str]:
    """Profiles and layers, comma-separated; reads folder names only."""
    from builder.layers.catalog import Catalog

    return _in_list(incomplete, Catalog.discover().names)


def layer(incomplete: str) -> list[str]:
    """One profile or layer."""
    return [name for name in layers("") if name.startswith(incomplete)]


def levels(incomplete: str) -> list[str]:
    """Levels of verification, comma-separated."""
    from builder.proof.checks import LEVELS

    return _in_list(incomplete, LEVELS)


def schemas(incomplete: str) -> list[str]:
    """Documents that have a schema."""
    from builder.cli.documents import names

    return [name for name in names() if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Models that come with spark-build; reads file names only."""
    from builder.serving.models import Models

    return [name for name in Models.discover().files if name.startswith(incomplete)]


def kinds(incomplete: str) -> list[str]:
    """Kinds of cache entries that can be removed."""
    from builder.common.cache import KINDS

    return [k.name for k in KINDS if k.prunable and k.name.startswith(incomplete)]


def builders(incomplete: str) -> list[str]:
    """The builders of buildx, if it is installed."""
    import subprocess

    words = ("docker", "buildx", "ls", "--format", "{{.Name}}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = dict.fromkeys(line.strip().rstrip("*") for line in done.stdout.splitlines())
    return [name for name in names if name and name.startswith(incomplete)]
