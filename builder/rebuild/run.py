"""Rebuild one image and hold it against the one that was published."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from builder import __version__
from builder.engines.model import BuildRequest
from builder.engines.oci import OciEngine
from builder.errors import UsageError
from builder.publish.subject import read_subject
from builder.rebuild.compare import Difference, Side, compare_images
from builder.rebuild.replan import plan_differences, replan
from builder.registry.layout import LayoutDirectory
from builder.util.diskspace import check_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.bases.model import Base
    from builder.model import BuildPlan
    from builder.plan.sources import IndexSources
    from builder.publish.baked import Baked
    from builder.publish.subject import Image
    from builder.rebuild.replan import Wanted
    from builder.registry.model import ImageSource

#: How the embedded engine notes its layers in an image's history.
OUR_STEP = "spark-build layer "


class Original(Protocol):
    """The image that is to be reproduced."""

    @property
    def digest(self) -> str:
        """What it is known by."""

    @property
    def baked(self) -> Baked:
        """What it carries about itself."""

    def differences(self, rebuilt: Side, plan: BuildPlan) -> list[Difference]:
        """Where it differs from its rebuild; none when it is the same image."""


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

    def differences(self, rebuilt: Side, plan: BuildPlan) -> list[Difference]:  # noqa: ARG002
        """Layer by layer and key by key."""
        return compare_images(Side(self.source, self.image), rebuilt)


def steps_of(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notes of an image's history."""
    return [str(step.get("created_by", "")) for step in history]


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What a rebuild came to.  ``digest`` is the one that the rebuilt image has."""

    published: str
    digest: str
    plan_digest: str
    made_by: str
    differences: Sequence[Difference]

    @property
    def same(self) -> bool:
        """Whether it is the same image, by digest."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """The result in the document of the command."""
        return {
            "digest": self.published,
            "rebuilt": self.digest,
            "same": self.same,
            "plan_digest": self.plan_digest,
            "made_by": self.made_by,
            "rebuilt_by": __version__,
            "differences": [difference.as_json() for difference in self.differences],
        }


def rebuild(
    original: Original,
    baked: Baked,
    identify: Callable[[Wanted], Base],
    sources: IndexSources,
    reference: str | None = None,
) -> Rebuilt:
    """Plan, build and compare.  ``reference`` is where the base is kept now.

    ``baked`` is what the original carries, with no code out of it (`builder.rebuild.hooks`).

    Raises:
        SparkBuildError: the base or an input is gone, or the plan cannot be built here.
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
        published=original.digest,
        digest=digest,
        plan_digest=plan.digest,
        made_by=baked.version,
        differences=found,
    )


@contextmanager
def build_again(plan: BuildPlan, base: Base) -> Iterator[Side]:
    """The image that a plan makes, in a folder that goes away again; the base's blobs stay away.

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
        yield Side(source, rebuilt)
