"""Rebuild one image and compare it with the published one.

A Docker Engine gives no access to an image's original layers, only to its files: such an image is
compared by digest, else file by file.
"""

from __future__ import annotations

import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from msgspec import Meta

from builder import __version__
from builder.common.diskspace import check_room
from builder.common.document import Digest, Document, Part, Text, always
from builder.errors import UsageError
from builder.images.engines.metadata import SHARE, read_layers
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.registry.layout import LayoutDirectory
from builder.images.rootfs.layers import LayerCache
from builder.images.rootfs.tar import FILE
from builder.images.rootfs.view import Rootfs
from builder.pipeline.rebuild.compare import (
    ComparedImage,
    Difference,
    by_variable,
    byte_range,
    compare_documents,
    compare_images,
)
from builder.pipeline.rebuild.replan import plan_differences, replan
from builder.publishing.subject import Baked, read_subject, version_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.common.model.plan import BuildPlan
    from builder.common.model.reference import Ref
    from builder.images.bases.image import InEngine
    from builder.images.registry.model import ImageSource
    from builder.images.rootfs.base import Base
    from builder.layers.plan.sources import IndexSources
    from builder.pipeline.rebuild.replan import BaseLookup
    from builder.publishing.sources import EngineImage
    from builder.publishing.subject import Image

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
    reference: Ref | None = None,
) -> Rebuilt:
    """Plan, build and compare.  ``reference`` is the base's current location.

    ``baked`` is the original's metadata, without code from it (`builder.pipeline.rebuild.replan`).

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


# ---------------------------------------------------------------------- an image in a Docker Engine


_SETTINGS = ("Env", "Labels", "Entrypoint", "Cmd", "User", "WorkingDir")


class EngineOriginal:
    """An image in a Docker Engine to reproduce."""

    def __init__(self, opened: EngineImage) -> None:
        self._opened, self._held = opened, opened.held
        self.digest = opened.held.id

    @cached_property
    def baked(self) -> Baked:
        """The baked metadata."""
        layers = self._held.read(f"{SHARE}/layers.json")
        metadata = self._held.read("/workspace/build-metadata.yaml")
        return Baked(
            version=version_in(metadata or b""),
            recorded=self._opened.recorded,
            layers=tuple(read_layers(layers, self.digest)),
            files={},
        )

    def differences(self, rebuilt: ComparedImage, plan: BuildPlan) -> list[Difference]:
        """No differences if the engine has the image under a digest of the rebuilt one.

        Raises:
            RemoteError: a rebuilt layer cannot be read.
        """
        if set(self._held.digests) & set(rebuilt.image.digests):
            return []
        found = self._settings(rebuilt)
        added = sum(step.created_by.startswith(OUR_STEP) for step in rebuilt.image.settings.history)
        view = Rootfs(rebuilt.image.layers[-added:], LayerCache(rebuilt.source))
        with closing(view):
            found += [*_files(self._held, view), *_gone(self._held, plan)]
        if not found:
            what = (
                "every file and setting is the same; only the tars were written by another builder"
            )
            found.append(Difference(blob=self.digest, where="layers", what=what))
        return found

    def _settings(self, rebuilt: ComparedImage) -> list[Difference]:
        new = rebuilt.image.settings.settings
        old = self._held.image.attrs.get("Config") or {}
        return compare_documents(_plain(old), _plain(new), f"config {self.digest}")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Relevant settings; engines write defaults as missing, as null or as a value."""
    named = by_variable(settings)
    return {key: named.get(key) for key in _SETTINGS if named.get(key) not in (None, "", "/")}


def _files(image: InEngine, view: Rootfs) -> Iterator[Difference]:
    for path, entry in sorted(view.below("/").items()):
        if entry.kind != FILE:
            continue
        held, new = image.read(f"/{path}"), view.read(f"/{path}")
        if held is None:
            yield Difference(blob="files", where=f"/{path}", what="not in the image")
        elif held != new:
            yield Difference(blob="files", where=f"/{path}", what=byte_range(held, new))


def _gone(image: InEngine, plan: BuildPlan) -> Iterator[Difference]:
    """Files of the base that the plan removes."""
    if not plan.base.is_image:
        return
    for path, content in plan.changes.items():
        place = f"{plan.base.site_packages}/{path}"
        if content is None and image.has(place):
            yield Difference(blob="files", where=place, what="not in the rebuilt one")
