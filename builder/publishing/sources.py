"""Where an image to publish is: an OCI layout, a registry, or a Docker Engine.

Overlays cannot run alone, so they are only published as overlays.
"""

from __future__ import annotations

import shlex
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.reference import Ref
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.bases.image import InEngine, embedded_in
from builder.images.engines.baked import PLAN_LABEL, is_overlay
from builder.images.engines.oci import find_dockerfile, overlay_onto
from builder.images.registry.client import Repository
from builder.images.registry.copy import layout_place
from builder.images.registry.layout import FallbackSource
from builder.publishing.evidence import Claim
from builder.publishing.subject import (
    Baked,
    ImageSet,
    Name,
    name_of,
    read_baked,
    read_subject,
    version_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.images.engines.oci import Overlay
    from builder.images.registry.copy import Locations
    from builder.images.registry.layout import LayoutDirectory
    from builder.images.registry.model import ImageSource


@dataclass(kw_only=True)
class StoredImage:
    """An image in a registry or an OCI layout."""

    ref: Ref
    source: ImageSource
    subject: ImageSet

    @property
    def name(self) -> Name:
        """The parts of its tag."""
        return self.subject.name

    @property
    def overlay(self) -> bool:
        """Whether it is an overlay, which cannot run alone."""
        return self.subject.overlay

    @property
    def recipe(self) -> Overlay:
        """How to build an image from the overlay."""
        image = self.subject.ours[0]
        pinned = "@" in self.ref.place
        ref = self.ref if pinned else Ref(f"{self.source.name}@{image.digest}")
        return overlay_onto(self.baked[image.digest].plan, image.labels, ref)

    @cached_property
    def baked(self) -> Mapping[str, Baked]:
        """The baked metadata of each image built by spark-build, by digest."""
        return {image.digest: read_baked(self.source, image) for image in self.subject.ours}

    @property
    def claims(self) -> list[Claim]:
        """The images to prove."""
        return [
            Claim.of(image.digest, image.digests, self.baked[image.digest].plan)
            for image in self.subject.ours
        ]


@dataclass(frozen=True, kw_only=True)
class EngineImage:
    """An image in a Docker Engine, which pushes it itself and knows the origin of its layers."""

    ref: Ref
    image: InEngine
    baked: Baked

    @property
    def name(self) -> Name:
        """The parts of its tag."""
        labels = self.image.labels
        return name_of([labels] if PLAN_LABEL in labels else [], self.ref.text)

    @property
    def overlay(self) -> bool:
        """Whether it is an overlay, which cannot run alone."""
        return is_overlay(self.image.labels)

    @property
    def recipe(self) -> Overlay:
        """How to build an image from the overlay."""
        return overlay_onto(self.baked.plan, self.image.labels, self.ref)

    @property
    def claims(self) -> list[Claim]:
        """The images to prove."""
        return [Claim.of(self.image.id, self.image.digests, self.baked.plan)]

    def push(self, repository: str, tag: str) -> None:
        """Push it under a tag; the engine uploads missing blobs, then the manifest.

        Raises:
            RemoteError: the registry or the engine refuses.
        """
        from builder.images.engines import docker

        name = f"{repository}:{tag}"
        self.image.image.tag(repository, tag)
        try:
            docker.push(self.image.client, name)
        finally:
            self.image.client.images.remove(name, noprune=True)


Opened = StoredImage | EngineImage


@contextmanager
def open_source(ref: Ref, places: Locations) -> Iterator[Opened]:
    """Open ``oci:DIR``, ``HOST/NAME@sha256:...`` or a name in a Docker Engine.

    A name without digest is looked up in the Docker Engine first, then in its registry;
    ``docker://`` before it means the registry.

    Raises:
        UsageError: it is malformed, or spark-build did not make it.
        RemoteError: there is no such image.
    """
    if ref.in_layout or ref.in_registry or ref.digest:
        yield _stored(ref, places)
        return
    image = InEngine.present(ref.text)
    if image is None:
        yield _of_registry(ref, places)
        return
    with closing(image):
        yield EngineImage(ref=ref, image=image, baked=_baked_in(image, ref.text))


def _of_registry(ref: Ref, places: Locations) -> StoredImage:
    from builder.images.engines import docker

    try:
        return _stored(ref, places)
    except RemoteError as error:
        if docker.answers():
            raise
        raise docker.without_engine(ref.text, error) from None


def _stored(ref: Ref, places: Locations) -> StoredImage:
    location = places.open(ref)
    subject = read_subject(location.image, location.reference)
    if isinstance(location.image, Repository):
        if not ref.digest:
            console.say(f"  {ref} is {subject.digest} in its registry")
        return StoredImage(ref=ref, source=location.image, subject=subject)
    source = _with_base(location.image, subject, places)
    return StoredImage(ref=ref, source=source, subject=subject)


def _with_base(layout: LayoutDirectory, subject: ImageSet, places: Locations) -> ImageSource:
    """A thin layout (``image --thin``) together with the location of the base's blobs.

    Raises:
        UsageError: blobs are missing, and their repository is unknown.
    """
    absent = [
        image for image in subject.images if not all(layout.has(d.digest) for d in image.layers)
    ]
    if not absent:
        return layout
    bases = {image.base[0].partition("@")[0] for image in absent}
    if len(bases) != 1 or not all(image.base[0] for image in absent):
        raise UsageError(f"{layout.name} lacks layers, and does not record their source")
    base = Ref(bases.pop())
    if not base.has_name:
        raise UsageError(
            f"{layout.name} lacks the layers of its base {base} on some disk",
            hint="build it without --thin",
        )
    return FallbackSource(layout, places.open(base).image)


def _baked_in(image: InEngine, name: str) -> Baked:
    embedded = embedded_in(image, name)
    if embedded.plan is None:
        raise UsageError(
            f"{name} was not made by spark-build: it has no plan",
            hint="spark-build image --layers b12x-full",
        )
    written = image.read("/workspace/build-metadata.yaml")
    return Baked(
        version=version_in(written or b""),
        recorded=embedded.plan,
        layers=tuple(embedded.layers),
        files={},
    )


# --------------------------------------------------------------------------------- foreign images


def refuse_foreign(stored: StoredImage, to: Sequence[str]) -> None:
    """Refuse an index with images that nothing proves; ``to`` is the destination.

    All of an index is published under one tag, and each runtime chooses for itself.

    Raises:
        SparkBuildError: it lists such images (exit 5); names them.
    """
    foreign = stored.subject.foreign
    if not foreign:
        return
    listed = "\n  ".join(f"{x.platform or 'no platform'}: {x.digest}" for x in foreign[:8])
    only = stored.subject.ours[0].digest
    name = stored.source.name
    if stored.ref.in_layout:
        name = f"oci:{layout_place(stored.ref)[0]}"
    raise SparkBuildError(
        f"{stored.ref} is an index that also lists what spark-build did not make, which runtimes "
        f"may choose and nothing proves:\n  {listed}",
        Exit.VERIFY_FAILED,
        hint=shlex.join(["spark-build", "publish", f"{name}@{only}", *to]),
    )


# ----------------------------------------------------------------------------------------- overlays


def check_overlay(opened: Opened, *, allowed: bool, to: Sequence[str]) -> None:
    """Refuse an overlay unless ``--overlay`` was given; ``to`` is the destination.

    Raises:
        UsageError: it is an overlay without the option, or the option without an overlay.
    """
    if opened.overlay and allowed:
        console.say(f"  {opened.ref} is an overlay: it runs on {opened.recipe.base}, not alone")
    elif allowed:
        raise UsageError(f"{opened.ref} is an image, but --overlay is for overlays")
    elif opened.overlay:
        lines, build = how_to_run(opened)
        published = shlex.join(["spark-build", "publish", opened.recipe.image, *to])
        asked = shlex.join(["spark-build", "publish", opened.ref.text, *to, "--overlay"])
        raise UsageError(
            f"{opened.ref} is an overlay with only the changed files, without Python and vLLM. "
            f"It is not published as an image.\n{lines}\n"
            f"  Publish that: {published}\n  Or publish the overlay itself: {asked}",
            hint=build,
        )


def how_to_run(opened: Opened) -> tuple[str, str]:
    """How to build an image from an overlay: the Dockerfile, if no file has it, and the command."""
    recipe = opened.recipe
    dockerfile = None
    if opened.ref.in_layout:
        dockerfile = find_dockerfile(layout_place(opened.ref)[0], opened.claims[0].digest)
    build = recipe.command(dockerfile)
    lines = [f"The image consists of {recipe.base} and the overlay: {build}"]
    if dockerfile is None:
        lines += ["with this Dockerfile:", *(f"  {x}" for x in recipe.dockerfile.splitlines())]
    return "\n".join(f"  {line}" for line in lines), build
