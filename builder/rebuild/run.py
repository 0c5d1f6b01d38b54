"""Rebuild one image and compare it with the published one."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from msgspec import Meta

from builder import __version__
from builder.engines.model import BuildRequest
from builder.engines.oci import OciEngine
from builder.errors import UsageError
from builder.publish.subject import read_subject
from builder.rebuild.compare import ComparedImage, Difference, compare_images
from builder.rebuild.replan import plan_differences, replan
from builder.registry.layout import LayoutDirectory
from builder.util.diskspace import check_room
from builder.util.documents import Digest, Document, Part, Text, always

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.model.plan import BuildPlan
    from builder.plan.sources import IndexSources
    from builder.publish.subject import Baked, Image
    from builder.rebuild.replan import BaseLookup
    from builder.registry.model import ImageSource
    from builder.rootfs.base import Base

#: Prefix of history entries written by the embedded engine.
OUR_STEP = "spark-build layer "


class Original(Protocol):
    """The image to reproduce."""

    @property
    def digest(self) -> str:
        """Its digest."""

    @property
    def baked(self) -> Baked:
        """The baked metadata."""

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:
        """Differences from its rebuild; empty if it is the same image."""


@dataclass(frozen=True)
class StoredOriginal:
    """An image in a registry or a layout."""

    source: ImageSource
    image: Image
    baked: Baked

    @property
    def digest(self) -> str:
        """Digest of its manifest."""
        return self.image.digest

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:  # noqa: ARG002
        """Layer by layer and key by key."""
        return compare_images(ComparedImage(self.source, self.image), rebuilt)


class Rebuilt(Part, frozen=True, kw_only=True):
    """The result of a rebuild."""

    digest: Annotated[Digest, Meta(description="of the image that was published")]
    rebuilt: Annotated[Digest, Meta(description="of the rebuilt image")]
    same: bool
    plan_digest: Digest
    made_by: Annotated[str, Meta(description="the version of spark-build that published it")]
    rebuilt_by: Text = always(__version__)
    differences: tuple[Difference, ...]


class Rebuild(Document, frozen=True, kw_only=True):
    """An image that was rebuilt from its metadata."""

    image: Text
    same: bool
    images: Annotated[tuple[Rebuilt, ...], Meta(description="one a platform")]


def rebuild(
    original: Original,
    baked: Baked,
    identify: Callable[[BaseLookup], Base],
    sources: IndexSources,
    reference: str | None = None,
) -> Rebuilt:
    """Plan, build and compare.  ``reference`` is the base's current location.

    ``baked`` is the original's metadata, without code from it (`builder.rebuild.hooks`).

    Raises:
        SparkBuildError: the base or an input no longer exists, or the plan cannot be built here.
    """
    plan, base = replan(baked, identify, sources, reference)
    try:
        found = plan_differences(baked, plan)
        with build_again(plan, base) as again:
            found += original.differences(again, plan)
            digest = again.image.digest
    finally:
        base.close()
    return Rebuilt(
        digest=original.digest,
        rebuilt=digest,
        same=not found,
        plan_digest=plan.digest,
        made_by=baked.version,
        differences=tuple(found),
    )


@contextmanager
def build_again(plan: BuildPlan, base: Base) -> Iterator[ComparedImage]:
    """The image of a plan, in a temporary folder, without the base's blobs.

    Raises:
        UsageError: the embedded engine does not build this plan.
        BuildFailed: the disk is full.
    """
    engine = OciEngine()
    refusal = engine.refuses(plan)
    if refusal:
        raise UsageError(refusal)
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        output = Path(folder) / "layout"
        request = BuildRequest(plan=plan, tag="rebuild", output=output, base=base, thin=True)
        check_room(engine.needs(request))
        engine.build(request)
        source = LayoutDirectory(output)
        (rebuilt,) = read_subject(source, "").images
        yield ComparedImage(source, rebuilt)
