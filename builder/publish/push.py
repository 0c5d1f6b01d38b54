"""Writes to a repository in an order that leaves no tag behind when interrupted.

Blobs and manifests by digest, then what proves them, then the immutable tag, then tags that move.
Every step looks first whether it is done: a second run finishes what a first one began.
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
#: What ends the tags that never move: twelve digits of a plan's, or of a base's, digest.
IMMUTABLE = re.compile(r".*-[0-9a-f]{12}(-unverified)?")

Kind = Literal["image", "attach", "mirror", "tag", "previous", "move"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change of the repository: what it is, for people, and how it is done.

    ``size`` is the bytes that travel, should the registry mount what it has elsewhere.
    """

    kind: Kind
    what: str
    size: int
    run: Callable[[], Copied | None] = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A base image to keep beside what stands on it, under its own immutable tag."""

    subject: Subject
    source: ImageSource
    tag: str


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What goes into a repository, and under which names.

    ``proofs`` maps the digest of an image to what is attached to it; ``origins`` are repositories
    that blobs may also be mounted from.
    """

    subject: Subject
    source: ImageSource
    tag: str
    moving: tuple[str, ...] = ()
    proofs: Mapping[str, Sequence[Attachment]] = field(default_factory=dict)
    origins: tuple[ImageSource, ...] = ()
    mirrors: tuple[Mirror, ...] = ()


def check_moving(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags that may move.

    Raises:
        UsageError: one is no tag, or is of a kind that never moves.
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
    """What is left to do, in order; nothing is written.

    Raises:
        RemoteError: the immutable tag is taken by something else, or the registry does not answer.
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
    """An immutable tag names another image than the one that is published."""
    return RemoteError(
        f"{target.name}:{tag} {how} {seen}, and this is {digest}: the same plan gave two images, "
        f"so this one is not published",
        hint=f"spark-build rebuild {target.name}@{seen} shows which of them matches the plan",
    )


def _image_step(
    subject: Subject,
    missing: Sequence[Descriptor],
    source: ImageSource,
    origins: Sequence[ImageSource],
    target: PublishTarget,
) -> Step:
    """Everything but the tag: the manifests stand under their digests afterwards."""
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
    """Whether another repository of the target's registry has a blob, so that it can be mounted."""
    host = target.name.partition("/")[0]
    return any(
        isinstance(place, Repository) and place.registry.host == host and place.has(blob.digest)
        for place in places
    )


def _proof_steps(publication: Publication, target: PublishTarget) -> list[Step]:
    """Attach what is not there yet: one document of a kind is enough for one image, but what was
    published unverified may be verified later."""
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
    """The base's layers come with the image; what is left of it is small."""
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
    """Somebody else wrote a tag while we did."""
    if kind == "tag" and seen is not None:
        return two_images(target, tag, digest, "was made", seen)
    return RemoteError(
        f"{target.name}:{tag} is {seen or 'gone'} instead of {digest}: another client changed it "
        f"at the same time",
        hint="run the same command again",
    )


def _move_steps(target: PublishTarget, root: RawManifest, tag: str) -> list[Step]:
    """The old image gets its own tag first: between the two steps both names are good."""
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
    """Read the names again: another publisher may have written at the same moment.

    Raises:
        RemoteError: a tag does not name what was published.
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
