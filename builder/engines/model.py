"""The interface of an engine: its requests and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from builder.model.base import base_kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.bases.model import Base
    from builder.model.plan import BuildPlan
    from builder.util.diskspace import Need


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build and where it should go.

    ``output`` is a directory for an OCI layout; without it, and unless it is pushed, the image goes
    into a Docker Engine.
    """

    plan: BuildPlan
    tag: str
    output: Path | None = None
    push: bool = False
    #: the base that was planned for, still open
    base: Base | None = None
    #: leave the base's own blobs out of a layout
    thin: bool = False
    #: where BuildKit looks for finished steps, and where it leaves them
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that exists: what to call it, its digest, and the bytes that were added."""

    ref: str
    digest: str
    added_bytes: int
    engine: str
    #: what ``verify`` is asked for, where that is not ``ref``
    target: str = ""
    #: what it is called where ``ref`` is a layout
    name: str = ""
    #: (platform, patch layer) -> whether the layer was taken as an earlier build had left it
    cached: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    @property
    def pinned(self) -> str:
        """``repo:tag@sha256:...``, or the layout's path with its digest."""
        return f"{self.ref}@{self.digest}"


def refuses_base(plan: BuildPlan) -> str | None:
    """Why no engine builds on a plan's base; None where one may."""
    if base_kind(plan.base.kind).is_built:
        return None
    return f"a {plan.base.kind} base is not an image; use spark-build apply"


class Engine(Protocol):
    """Builds plans; five methods, so that a fake is easy to write."""

    name: str

    def missing(self) -> str | None:
        """Why this engine cannot work here, or None."""

    def refuses(self, plan: BuildPlan) -> str | None:
        """Why this engine cannot build this plan, or None."""

    def render(self, plan: BuildPlan) -> str:
        """What would be built, as text for people."""

    def needs(self, request: BuildRequest) -> list[Need]:
        """What a build will write on this machine, and where."""

    def build(self, request: BuildRequest) -> BuiltImage:
        """Build, or leave nothing behind."""
