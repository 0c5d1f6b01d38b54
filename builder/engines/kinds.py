"""What each engine can do: asked by whoever would compare its name.  No engine is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.engines.model import Engine

#: The engine that is chosen when the base is known (``choice.py``).
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine, and what can be asked of it."""

    name: str
    #: makes it; the text is where BuildKit runs, if that is not inside the Docker Engine
    make: Callable[[str], Engine]
    #: it reads the base through a Docker Engine, and its image goes there unless told otherwise
    through_docker: bool = False
    #: it writes layers and manifests itself: into layouts, without the base's blobs, all in one
    #: layer, or for every platform of an index
    writes_manifests: bool = False
    #: ``--builder``, ``--cache-from`` and ``--cache-to`` mean something to it
    has_builders: bool = False


def _buildkit(builder: str) -> Engine:
    from builder.engines.buildkit import BuildkitEngine

    return BuildkitEngine(builder)


def _oci(_builder: str) -> Engine:
    from builder.engines.oci import OciEngine

    return OciEngine()


#: Every engine, by the name that ``--engine`` has for it.
ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(name="buildkit", make=_buildkit, through_docker=True, has_builders=True),
        EngineKind(name="oci", make=_oci, writes_manifests=True),
    )
}


def named(engine: str) -> EngineKind | None:
    """The engine that was asked for; None where the choice is open."""
    return None if engine == AUTO else ENGINES[engine]


def may_use_docker(engine: str) -> bool:
    """Whether a base may be looked for in a Docker Engine."""
    kind = named(engine)
    return kind is None or kind.through_docker
