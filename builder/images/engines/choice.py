"""The engines with their capabilities, and the choice of one, with its reason.

Code asks for a capability and never compares engine names.  Imports no engine.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder import settings
from builder.common.reference import Ref
from builder.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.plan import BuildPlan
    from builder.images.engines.model import Engine
    from builder.images.subject import Subject

#: Means that the engine is chosen when the base is known.
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
    from builder.images.engines.buildkit import BuildkitEngine

    return BuildkitEngine(builder)


def _oci(_builder: str) -> Engine:
    from builder.images.engines.oci import OciEngine

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


def reads_in_engine(engine: str) -> bool | None:
    """Whether bases are read through a Docker Engine; None for ``auto``: if one responds."""
    kind = named(engine)
    return None if kind is None else kind.through_docker


# --------------------------------------------------------------------------------------- the choice


#: The engines that ``auto`` selects with and without a Docker Engine.
_WITH_DOCKER, _ALONE = "buildkit", "oci"


def get_engine(name: str, builder: str = "") -> Engine:
    """The engine with that name; ``auto`` is Docker if it responds, else the embedded engine.

    ``builder`` is where BuildKit runs, if not in the Docker Engine.

    Raises:
        EngineError: the named engine, or the one in ``DOCKER_HOST``, is missing.
    """
    engine = (named(name) or ENGINES[_WITH_DOCKER]).make(builder)
    reason = engine.missing()
    if reason is None:
        return engine
    if name == AUTO and not builder and not settings.DOCKER_HOST.value:
        return ENGINES[_ALONE].make(builder)
    raise EngineError(reason, hint="use --engine oci, or start Docker with BuildKit")


def wanted_engine(name: str, output: str | None) -> str:
    """The engine implied by the output: an OCI layout means the oci engine."""
    layout = output is not None and Ref(output).in_layout
    return _ALONE if name == AUTO and layout else name


def check_docker_host(wanted: str, base: Ref | None, builder: str) -> None:
    """Fail if ``DOCKER_HOST`` names an engine that does not respond: use no other instead.

    Raises:
        EngineError: no engine responds at ``DOCKER_HOST``.
    """
    from builder.images.engines import docker

    elsewhere = base is not None and base.has_scheme and not base.kind.is_wheels
    if wanted == AUTO and settings.DOCKER_HOST.value and not builder and not elsewhere:
        try:
            docker.connect().close()
        except EngineError as error:
            raise EngineError(
                str(error), hint="start it, or use --engine oci, which needs no Docker"
            ) from None


def engine_for(
    plan: BuildPlan, base: Subject, name: str, output: str | None, builder: str
) -> tuple[Engine, str]:
    """The engine for a plan, and the reason for the choice; ``""`` if the user named it.

    Raises:
        EngineError: it is missing, or cannot build this plan.
        UsageError: no layer can be added to the base.
    """
    from builder.images.engines.oci import check_depth

    wanted, why = wanted_engine(name, output), ""
    if name == AUTO and wanted != AUTO:
        why = "--output names an OCI layout"
    elif wanted == AUTO and base.in_layers is not None:
        wanted, why = _ALONE, f"{base.identity.ref} is read directly, without a Docker Engine"
    engine = get_engine(wanted, builder)
    if wanted == AUTO:
        why = ENGINES[_WITH_DOCKER].make(builder).missing() or "a Docker Engine answers"
    refusal = engine.refuses(plan)
    if refusal:
        raise EngineError(refusal, hint=_who_does(plan))
    if base.in_layers is not None:
        check_depth(base.in_layers)
    if why and plan.base.is_wheels:
        why += "; released wheels become an overlay for an image"
    return engine, why


def _who_does(plan: BuildPlan) -> str:
    if not plan.base.is_installed:
        return "--engine buildkit"
    names = plan.profiles or [decision.name for decision in plan.decisions]
    return shlex.join(
        ["spark-build", "apply", plan.base.site_packages, "--layers", ",".join(names)]
    )
