"""Publish one image to one repository, and report the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.errors import Exit, SparkBuildError
from builder.publish.documents import documents
from builder.publish.mirror import mirrors_of
from builder.publish.push import (
    PREVIOUS,
    Publication,
    check_moving,
    confirm,
    steps_to_publish,
    two_images,
)
from builder.publish.results import PublishResult
from builder.publish.retry import with_retries
from builder.publish.sources import EngineImage, StoredImage
from builder.publish.subject import read_subject
from builder.registry.presence import missing_blobs
from builder.registry.reference import parse_reference
from builder.util.console import console, megabytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.publish.proof import Proof
    from builder.publish.push import Step
    from builder.publish.repository import PublishRepository
    from builder.publish.subject import Subject
    from builder.registry.client import Repository
    from builder.registry.locations import Locations

UP_TO_DATE, PUBLISHED, PLANNED = "up to date", "published", "dry run"


@dataclass(frozen=True, kw_only=True)
class PublishRequest:
    """The options of ``publish``, besides source and target."""

    moving: tuple[str, ...] = ()
    mirror_base: bool = False
    dry_run: bool = False


def publish(
    opened: StoredImage | EngineImage,
    repository: PublishRepository,
    proofs: Mapping[str, Proof],
    request: PublishRequest,
    places: Locations,
) -> PublishResult:
    """Publish to one repository.

    Raises:
        RemoteError: the registry does not respond, or the immutable tag points to another image.
        SparkBuildError: a moving tag was requested for an unverified image (exit 5).
    """
    verified = all(proof.verified for proof in proofs.values())
    moving = check_moving(request.moving)
    if moving and not verified:
        raise SparkBuildError(
            f"{', '.join(moving)}: a moving tag cannot point to an unverified image, even with "
            f"--force",
            Exit.VERIFY_FAILED,
            hint="omit --move-tag, or verify the image first",
        )
    tag = opened.name.tag(verified=verified)
    if isinstance(opened, EngineImage):
        if request.dry_run and repository.digest_of(tag) is None:
            return _engine_dry_run(opened, repository, tag, verified=verified)
        pushed = _push_from_engine(opened, repository, tag)
        (proof,) = proofs.values()
        subject = read_subject(repository, tag)
        stored = StoredImage(text=f"{repository.name}:{tag}", source=repository, subject=subject)
        proofs = {claim.digest: proof for claim in stored.claims}
    else:
        stored, pushed = opened, False
    publication = _publication(stored, tag, moving, proofs, request, places)
    origins = _bases_beside(stored, repository, places)
    publication = replace(publication, origins=origins)
    return _carry_out(publication, repository, request, verified=verified, pushed=pushed)


def _publication(
    stored: StoredImage,
    tag: str,
    moving: tuple[str, ...],
    proofs: Mapping[str, Proof],
    request: PublishRequest,
    places: Locations,
) -> Publication:
    claims = {claim.digest: claim for claim in stored.claims}
    mirrors, notes = mirrors_of(stored, places) if request.mirror_base else ((), {})
    return Publication(
        subject=stored.subject,
        source=stored.source,
        tag=tag,
        moving=moving,
        proofs={
            image.digest: [
                *documents(
                    image, stored.baked[image.digest], claims[image.digest], proofs[image.digest]
                ),
                *notes.get(image.digest, ()),
            ]
            for image in stored.subject.ours
        },
        mirrors=mirrors,
    )


def _bases_beside(
    stored: StoredImage, repository: PublishRepository, places: Locations
) -> tuple[Repository, ...]:
    """Repositories of the bases on the same registry, from which layers are mounted."""
    found: dict[str, Repository] = {}
    for image in stored.subject.ours:
        name = image.labels.get("org.opencontainers.image.base.name", "")
        if name:
            base = parse_reference(name)
            if base.host == repository.registry.host and base.repository != repository.path:
                registry = places.registry(base.host)
                found[base.name] = registry.repository(base.repository)
    return tuple(found.values())


def _carry_out(
    publication: Publication,
    repository: PublishRepository,
    request: PublishRequest,
    *,
    verified: bool,
    pushed: bool,
) -> PublishResult:
    steps = steps_to_publish(publication, repository)
    copies = []
    for step in steps:
        console.say(f"  {step.kind:<9}{step.what}  {megabytes(step.size) if step.size else ''}")
        if request.dry_run:
            continue
        copied = with_retries(step.run)
        if copied is not None:
            copies.append(copied)
    if not request.dry_run:
        tagged = pushed or any(step.kind == "tag" for step in steps)
        confirm(publication, repository, tagged=tagged)
    return PublishResult.of(
        repository.name,
        publication.tag,
        publication.subject.digest,
        PLANNED if request.dry_run else PUBLISHED if steps or pushed else UP_TO_DATE,
        verified=verified,
        steps=steps,
        moved={tag: _previous(steps, tag) for tag in publication.moving},
        mirrors=[f"{repository.name}:{mirror.tag}" for mirror in publication.mirrors],
        mounted=sum(copied.mounted for copied in copies),
        streamed=sum(copied.streamed for copied in copies),
        streamed_bytes=sum(copied.streamed_bytes for copied in copies),
    )


def _previous(steps: Sequence[Step], tag: str) -> str | None:
    """The previous digest of a moved tag."""
    prefix = f"{tag}{PREVIOUS} -> "
    found = [s.what.removeprefix(prefix) for s in steps if s.what.startswith(prefix)]
    return found[0] if found else None


def _engine_dry_run(
    opened: EngineImage, repository: PublishRepository, tag: str, *, verified: bool
) -> PublishResult:
    console.say(f"  push     {opened.text} by its Docker Engine as {repository.name}:{tag}")
    return PublishResult.of(repository.name, tag, str(opened.image.id), PLANNED, verified=verified)


def _push_from_engine(opened: EngineImage, repository: PublishRepository, tag: str) -> bool:
    """Let the engine push unless the image exists; returns whether it pushed.

    Raises:
        RemoteError: the tag points to another image.
    """
    if repository.digest_of(tag) is not None:
        there = read_subject(repository, tag)
        if _names(there).isdisjoint(opened.digests):
            ours = str(opened.image.id)
            raise two_images(repository, tag, ours, "is already", there.digest)
        if not missing_blobs(repository, there.blobs()):
            return False
    opened.push(repository.name, tag)
    there = read_subject(repository, tag)
    if _names(there).isdisjoint(opened.digests):  # an engine's push can have no condition
        raise two_images(repository, tag, str(opened.image.id), "was made", there.digest)
    return True


def _names(subject: Subject) -> set[str]:
    """Every digest that an engine may use for an image."""
    return {subject.digest, *(d for image in subject.images for d in image.digests)}
