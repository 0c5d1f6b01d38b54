"""The interface of an engine: its requests and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from builder.common.reference import base_kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.common.diskspace import Need
    from builder.common.plan import BuildPlan
    from builder.common.reference import Ref
    from builder.images.subject import Subject


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build and where it should go.

    ``output`` is a folder for an OCI layout; without it, and unless it is pushed, the image is
    loaded into a Docker Engine.
    """

    plan: BuildPlan
    tag: str
    output: Path | None = None
    push: bool = False
    #: the base of the plan, still open
    base: Subject | None = None
    #: leave the base's own blobs out of a layout
    thin: bool = False
    #: caches that BuildKit imports from and exports to
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """A built image: its reference, its digest, and the size of added layers in bytes."""

    ref: Ref
    digest: str
    added_bytes: int
    engine: str
    #: the target for ``verify``, if it is not ``ref``
    target: Ref | None = None
    #: its name, if ``ref`` is a layout
    name: str = ""
    #: (platform, patch layer) -> whether the layer came from the cache
    cached: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    @property
    def subject(self) -> Ref:
        """The target for ``verify``."""
        return self.target or self.ref

    @property
    def pinned(self) -> str:
        """``repo:tag@sha256:...``, or the layout's path with its digest."""
        return f"{self.ref}@{self.digest}"


def refuses_base(plan: BuildPlan) -> str | None:
    """Why no engine can build on a plan's base, or None."""
    if base_kind(plan.base.kind).is_built:
        return None
    return f"a {plan.base.kind} base is not an image; use spark-build apply"


class Engine(Protocol):
    """Builds plans."""

    name: str

    def missing(self) -> str | None:
        """Why this engine cannot work here, or None."""

    def refuses(self, plan: BuildPlan) -> str | None:
        """Why this engine cannot build this plan, or None."""

    def render(self, plan: BuildPlan) -> str:
        """A preview of the build, as text."""

    def needs(self, request: BuildRequest) -> list[Need]:
        """The disk space that a build needs on this machine."""

    def build(self, request: BuildRequest) -> BuiltImage:
        """Build the image; a failure leaves nothing behind."""
