"""Capabilities of each engine, so that no code compares engine names.  Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.engines.model import Engine

#: Means that the engine is chosen when the base is known (``choice.py``).
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine and its capabilities."""

    name: str
    #: creates it; the argument is where BuildKit runs, if not in the Docker Engine
    make: Callable[[str], Engine]
    #: it reads the base through a Docker Engine, and loads its image there by default
    through_docker: bool = False
    #: it writes layers and manifests itself: into layouts, without the base's blobs, all in one
    #: layer, or for every platform of an index
    writes_manifests: bool = False
    #: it supports ``--builder``, ``--cache-from`` and ``--cache-to``
    has_builders: bool = False


def _buildkit(builder: str) -> Engine:
    from builder.engines.buildkit import BuildkitEngine

    return BuildkitEngine(builder)


def _oci(_builder: str) -> Engine:
    from builder.engines.oci import OciEngine

    return OciEngine()


#: Every engine, by its name in ``--engine``.
ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(name="buildkit", make=_buildkit, through_docker=True, has_builders=True),
        EngineKind(name="oci", make=_oci, writes_manifests=True),
    )
}


def named(engine: str) -> EngineKind | None:
    """The engine that the user named; None for ``auto``."""
    return None if engine == AUTO else ENGINES[engine]


def may_use_docker(engine: str) -> bool:
    """Whether a base may come from a Docker Engine."""
    kind = named(engine)
    return kind is None or kind.through_docker
