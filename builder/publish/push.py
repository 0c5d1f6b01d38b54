"""Writes to a repository in an order that leaves no tag behind when interrupted.

Blobs and manifests by digest, then attachments, then the immutable tag, then moving tags.
Each step first checks whether it is done, so a second run completes an interrupted one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from builder.errors import RemoteError, UsageError
from builder.publish.evidence import PASSED
from builder.publish.referrers import attach, is_fallback_tag
from builder.registry.client import Repository
from builder.registry.copy import copy_image, origin
from builder.registry.presence import missing_blobs
from builder.registry.reference import check_tag
from builder.registry.tagging import TagTaken
from builder.util.console import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.publish.protocols import PublishTarget
    from builder.publish.referrers import Attachment
    from builder.publish.subject import Subject
    from builder.registry.copy import Copied
    from builder.registry.model import Descriptor, ImageSource, RawManifest

PREVIOUS = "-previous"
#: The end of immutable tags: twelve digits of a plan's or base's digest.
IMMUTABLE = re.compile(r".*-[0-9a-f]{12}(-unverified)?")

Kind = Literal["image", "attach", "mirror", "tag", "previous", "move"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change of the repository: a description, and the function that makes it.

    ``size`` is the number of bytes to upload if the registry mounts blobs it has elsewhere.
    """

    kind: Kind
    what: str
    size: int
    run: Callable[[], Copied | None] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A base image to copy next to the image, under its own immutable tag."""

    subject: Subject
    source: ImageSource
    tag: str


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What to publish, and under which tags.

    ``proofs`` maps image digests to attachments; ``origins`` are repositories
    from which blobs may be mounted.
    """

    subject: Subject
    source: ImageSource
    tag: str
    moving: tuple[str, ...] = ()
    proofs: Mapping[str, Sequence[Attachment]] = field(default_factory=dict)
    origins: tuple[ImageSource, ...] = ()
    mirrors: tuple[Mirror, ...] = ()


def check_moving(tags: Sequence[str]) -> tuple[str, ...]:
    """Check moving tags.

    Raises:
        UsageError: one is not a valid tag, or has the form of an immutable tag.
    """
    for tag in map(check_tag, tags):
        if IMMUTABLE.fullmatch(tag) or is_fallback_tag(tag):
            raise UsageError(f"{tag}: immutable tags cannot be moved")
        if tag.endswith(PREVIOUS):
            raise UsageError(
                f"{tag}: spark-build sets this tag itself when {tag.removesuffix(PREVIOUS)} moves"
            )
        if len(tag + PREVIOUS) > 128:
            raise UsageError(f"{tag}: the name is too long for {PREVIOUS} after it")
    return tuple(dict.fromkeys(tags))


def steps_to_publish(publication: Publication, target: PublishTarget) -> list[Step]:
    """The remaining steps, in order; writes nothing.

    Raises:
        RemoteError: the immutable tag points to another image, or the registry does not respond.
    """
    subject = publication.subject
    present = target.digest_of(publication.tag)
    if present not in (None, subject.digest):
        raise two_images(target, publication.tag, subject.digest, "is already", present)
    steps: list[Step] = []
    missing = missing_blobs(target, subject.blobs())
    if present is None or missing:
        place, others = publication.source, publication.origins
        steps.append(_image_step(subject, missing, place, others, target))
    for mirror in publication.mirrors:
        steps += _mirror_steps(mirror, publication, target)
    steps += _proof_steps(publication, target)
    if present is None:
        steps.append(_tag_step("tag", target, subject.root, publication.tag, None))
    for tag in publication.moving:
        steps += _move_steps(target, subject.root, tag)
    return steps


def two_images(
    target: PublishTarget, tag: str, digest: str, how: str, seen: str | None
) -> RemoteError:
    """The error for an immutable tag that points to another image."""
    return RemoteError(
        f"{target.name}:{tag} {how} {seen}, and this is {digest}: the same plan gave two images, "
        f"so this one is not published; a rebuild shows which of them matches the plan",
        hint=f"spark-build rebuild {target.name}@{seen}",
    )


def _image_step(
    subject: Subject,
    missing: Sequence[Descriptor],
    source: ImageSource,
    origins: Sequence[ImageSource],
    target: PublishTarget,
) -> Step:
    """Everything except the tag: pushes the manifests by digest."""
    sent = [
        blob for blob in missing if not _is_beside(blob, (origin(source, blob), *origins), target)
    ]

    def run() -> Copied:
        mounted = sum(
            any(target.mount(blob, place) for place in origins)
            for blob in missing
            if origins and not target.gives(blob)
        )
        copied = copy_image(source, subject.digest, target, subject.digest)
        return replace(copied, mounted=copied.mounted + mounted)

    count = f"{counted(len(sent), 'blob')} to send, {len(missing) - len(sent)} to mount"
    return Step(
        kind="image",
        what=f"{subject.digest} ({count if missing else 'all blobs are there'})",
        size=sum(blob.size for blob in sent),
        run=run,
    )


def _is_beside(blob: Descriptor, places: Sequence[ImageSource], target: PublishTarget) -> bool:
    """Whether a blob can be mounted from another repository on the target's registry."""
    host = target.name.partition("/")[0]
    return any(
        isinstance(place, Repository) and place.registry.host == host and place.has(blob.digest)
        for place in places
    )


def _proof_steps(publication: Publication, target: PublishTarget) -> list[Step]:
    """Attach missing documents: one of each kind is enough for an image, but an image
    that was published unverified may be verified later."""
    steps: list[Step] = []
    for image in publication.subject.images:
        wanted = publication.proofs.get(image.digest, ())
        listed = target.referrers(image.digest) if wanted else ()
        known = {(entry.artifact_type, entry.annotations.get(PASSED)) for entry in listed}
        steps += [
            _attach_step(target, image.manifest.descriptor, proof)
            for proof in wanted
            if (proof.artifact_type, proof.annotations.get(PASSED)) not in known
        ]
    return steps


def _attach_step(target: PublishTarget, subject: Descriptor, proof: Attachment) -> Step:
    return Step(
        kind="attach",
        what=f"{proof.artifact_type} to {subject.digest}",
        size=len(proof.data),
        run=lambda: attach(target, subject, proof),
    )


def _mirror_steps(mirror: Mirror, publication: Publication, target: PublishTarget) -> list[Step]:
    """The base's layers come with the image; the rest is small."""
    missing = missing_blobs(target, mirror.subject.blobs())
    if target.digest_of(mirror.tag) == mirror.subject.digest and not missing:
        return []
    coming = {blob.digest for blob in publication.subject.blobs()}
    left = [blob for blob in missing if blob.digest not in coming]
    return [
        Step(
            kind="mirror",
            what=f"{mirror.tag} -> {mirror.subject.digest}",
            size=sum(blob.size for blob in left),
            run=lambda: copy_image(mirror.source, mirror.subject.digest, target, mirror.tag),
        )
    ]


def _tag_step(
    kind: Kind, target: PublishTarget, root: RawManifest, tag: str, was: str | None
) -> Step:
    def run() -> None:
        try:
            target.set_tag(root, tag, was)
        except TagTaken as taken:
            raise _lost(target, kind, tag, root.digest, taken.seen) from None

    return Step(kind=kind, what=f"{tag} -> {root.digest}", size=len(root.data), run=run)


def _lost(
    target: PublishTarget, kind: Kind, tag: str, digest: str, seen: str | None
) -> RemoteError:
    """The error for a tag that another client wrote at the same time."""
    if kind == "tag" and seen is not None:
        return two_images(target, tag, digest, "was made", seen)
    return RemoteError(
        f"{target.name}:{tag} is {seen or 'gone'} instead of {digest}: another client changed it "
        f"at the same time",
        hint="run the same command again",
    )


def _move_steps(target: PublishTarget, root: RawManifest, tag: str) -> list[Step]:
    """The old image gets its own tag first, so that both names are valid between the two steps."""
    current = target.digest_of(tag)
    if current == root.digest:
        return []
    steps = [_tag_step("move", target, root, tag, current)]
    before = target.digest_of(tag + PREVIOUS)
    if current is not None and before != current:
        old = target.manifest(current)
        steps.insert(0, _tag_step("previous", target, old, tag + PREVIOUS, before))
    return steps


def confirm(publication: Publication, target: PublishTarget, *, tagged: bool) -> None:
    """Read the tags again, because another publisher may have written them at the same time.

    Raises:
        RemoteError: a tag does not point to the published image.
    """
    for step in _proof_steps(publication, target):
        step.run()
    if tagged:
        target.settle()
    digest = publication.subject.digest
    for tag in (publication.tag, *publication.moving):
        seen = target.digest_of(tag)
        if seen != digest:
            raise _lost(target, "tag" if tag == publication.tag else "move", tag, digest, seen)
