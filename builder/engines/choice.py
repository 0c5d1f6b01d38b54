"""Chooses the engine and gives the reason."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder import settings
from builder.engines import docker
from builder.engines.kinds import AUTO, ENGINES, named
from builder.engines.patched import check_depth
from builder.errors import EngineError

if TYPE_CHECKING:
    from builder.engines.model import Engine
    from builder.model.plan import BuildPlan
    from builder.rootfs.base import Base

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
    layout = output is not None and output.startswith("oci:")
    return _ALONE if name == AUTO and layout else name


def check_docker_host(wanted: str, base: str | None, builder: str) -> None:
    """Fail if ``DOCKER_HOST`` names an engine that does not respond: use no other instead.

    Raises:
        EngineError: that.
    """
    elsewhere = (base or "").startswith(("docker://", "oci:", "dir:"))
    if wanted == AUTO and settings.DOCKER_HOST.value and not builder and not elsewhere:
        try:
            docker.connect().close()
        except EngineError as error:
            raise EngineError(
                str(error), hint="start it, or use --engine oci, which needs no Docker"
            ) from None


def engine_for(
    plan: BuildPlan, base: Base, name: str, output: str | None, builder: str
) -> tuple[Engine, str]:
    """The engine for a plan, and the reason for the choice; ``""`` if the user named it.

    Raises:
        EngineError: it is missing, or cannot build this plan.
        UsageError: no layer can be added to the base.
    """
    wanted, why = wanted_engine(name, output), ""
    if name == AUTO and wanted != AUTO:
        why = "--output names an OCI layout"
    elif wanted == AUTO and base.opened is not None:
        wanted, why = _ALONE, f"{base.identity.ref} is read directly, without a Docker Engine"
    engine = get_engine(wanted, builder)
    if wanted == AUTO:
        why = ENGINES[_WITH_DOCKER].make(builder).missing() or "a Docker Engine answers"
    refusal = engine.refuses(plan)
    if refusal:
        raise EngineError(refusal, hint=_who_does(plan))
    if base.opened is not None:
        check_depth(base.opened)
    if why and plan.base.is_wheels:
        why += "; released wheels become an overlay for an image"
    return engine, why


def _who_does(plan: BuildPlan) -> str:
    if not plan.base.is_installed:
        return "--engine buildkit"
    names = plan.profiles or [decision.name for decision in plan.decisions]
    directory = plan.base.ref.removeprefix("dir:")
    return shlex.join(["spark-build", "apply", directory, "--layers", ",".join(names)])
