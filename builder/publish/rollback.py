"""Rollback: sets a moving tag back to its previous image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.publish.inventory import evidence_marks
from builder.publish.push import PREVIOUS, check_moving
from builder.publish.results import PublishResult
from builder.publish.run import PLANNED
from builder.publish.subject import read_subject
from builder.registry.presence import refuse_missing
from builder.registry.tagging import TagTaken
from builder.util.console import console

if TYPE_CHECKING:
    from builder.publish.repository import PublishRepository


def roll_back(
    repository: PublishRepository, tag: str, *, dry_run: bool, overlay: bool = False
) -> PublishResult:
    """Set a moving tag back to its previous image.

    Raises:
        UsageError: it is not a moving tag, or the image is an overlay and ``overlay`` is not set.
        SparkBuildError: no previous image is known (exit 3).
    """
    (tag,) = check_moving([tag])
    current, before = (repository.digest_of(name) for name in (tag, tag + PREVIOUS))
    if before is None or before == current:
        reason = "it is already there" if before else f"there is no {tag}{PREVIOUS}"
        raise SparkBuildError(
            f"{repository.name}:{tag} has no other previous image: {reason}; "
            f"to point {tag} to an image of your choice, publish that digest with --move-tag {tag}",
            Exit.NOTHING_TO_DO,
            hint=f"spark-build tags {repository.name}",
        )
    if not overlay and read_subject(repository, before).overlay:
        raise UsageError(
            f"{repository.name}:{tag} named {before} before, which is an overlay and cannot run "
            f"alone",
            hint=f"spark-build publish --rollback {tag} --to {repository.name} --overlay",
        )
    if current is None:
        console.say(f"  {repository.name}:{tag} is gone and will be created again")
    hint = f"spark-build publish IMAGE --to {repository.name}"
    refuse_missing(repository, read_subject(repository, before).blobs(), hint)
    if not dry_run:
        try:
            repository.set_tag(repository.manifest(before), tag, current)
        except TagTaken as taken:
            raise RemoteError(
                f"{taken}: another client moved it at the same time; check the tags, and roll back "
                f"again if needed",
                hint=f"spark-build tags {repository.name}",
            ) from None
    return PublishResult.of(
        repository.name,
        tag,
        before,
        PLANNED if dry_run else "rolled back",
        verified=_verified(repository, before),
        moved={tag: current},
    )


def _verified(repository: PublishRepository, digest: str) -> bool:
    """Whether every image has passing evidence; reported, but not required."""
    images = read_subject(repository, digest).ours
    return all(evidence_marks(repository, image.digest).verified for image in images)
