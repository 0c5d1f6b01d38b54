"""Retention: keeps the newest images of each profile, and everything that other tags reference.

Labels identify our images, and a tag is ours if ``publish`` derives it from these
labels.  Any other tag on a manifest, directly or through an index, keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.errors import RemoteError, UsageError
from builder.publish.referrers import OURS, holds_signatures, lists_referrers, subject_of_tag
from builder.util.console import console, counted
from builder.util.documents import Digest, Document, Part, Text, always

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.publish.inventory import Inventory, StoredManifest
    from builder.publish.protocols import PublishTarget
    from builder.publish.tagged import TaggedManifests

What = Literal["image", "part", "proof", "signature", "list"]


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """The decision for one image, and the reason."""

    held: StoredManifest
    keep: bool
    reason: str


class Removal(Part, frozen=True, kw_only=True):
    """One manifest to delete, unless another tag references it."""

    digest: Digest
    what: What
    tags: Annotated[tuple[Text, ...], Meta(description="tags that are deleted with it")] = always(
        ()
    )
    of: Annotated[Digest, Meta(description="the image that it belongs to")] = ""

    def __str__(self) -> str:
        """The deleted tags, else the digest, and its kind."""
        what = f" ({self.what} of {self.of})" if self.of else ""
        return f"{', '.join(self.tags) or self.digest}{what}"


class Spared(Part, frozen=True, kw_only=True):
    """A skipped removal: a tag references the manifest, or it no longer exists."""

    digest: Digest
    reason: Text


@dataclass(kw_only=True)
class Pruned:
    """The results of removals, kept up to date in case the run ends early."""

    deleted: list[str] = field(default_factory=list)
    spared: list[Spared] = field(default_factory=list)


class VerdictRow(Part, frozen=True, kw_only=True):
    """The decision for one image, and the reason."""

    digest: Digest
    tags: tuple[Text, ...]
    keep: bool
    reason: Text


class Retention(Document, frozen=True, kw_only=True):
    """What retention keeps in a repository, and the results for the rest."""

    repository: Text
    keep: Annotated[int, Meta(ge=1, description="newest images to keep for each profile")]
    dry_run: bool
    images: tuple[VerdictRow, ...]
    removals: Annotated[
        tuple[Removal, ...],
        Meta(description="manifests to delete, in order; a dry run lists the same"),
    ]
    deleted: tuple[str, ...]
    spared: Annotated[tuple[Spared, ...], Meta(description="deletions that failed")]

    @classmethod
    def of(
        cls,
        repository: str,
        keep: int,
        verdicts: Sequence[RetentionDecision],
        wanted: Sequence[Removal],
        done: Pruned,
        *,
        dry_run: bool,
    ) -> Retention:
        """The document of a run up to now."""
        rows = (
            VerdictRow(digest=v.held.digest, tags=v.held.tags, keep=v.keep, reason=v.reason)
            for v in verdicts
        )
        return cls(
            repository=repository,
            keep=keep,
            dry_run=dry_run,
            images=tuple(rows),
            removals=tuple(wanted),
            deleted=tuple(done.deleted),
            spared=tuple(done.spared),
        )


def judge(
    inventory: Inventory, keep: int, names: Mapping[str, set[str]]
) -> list[RetentionDecision]:
    """A decision for every image, newest first; ``names`` maps digests to tags.

    Raises:
        UsageError: ``keep`` would leave nothing.
    """
    if keep < 1:
        raise UsageError("--keep must be 1 or more")
    verified: dict[str, int] = {}
    every: dict[str, int] = {}
    verdicts = []
    for held in inventory.held:
        if not held.own_tags or set(held.tags) - set(held.own_tags):
            other = [tag for tag in held.tags if tag not in held.own_tags]
            verdicts.append(
                RetentionDecision(held=held, keep=True, reason=f"named by {', '.join(other)}")
            )
            continue
        profile = held.profile
        every[profile] = every.get(profile, 0) + 1
        if held.verified:  # what is not verified never pushes it out
            verified[profile] = verified.get(profile, 0) + 1
        stays = (verified if held.verified else every)[profile] <= keep
        reason = f"{'among' if stays else 'older than'} the newest {keep} of {profile}"
        verdicts.append(RetentionDecision(held=held, keep=stays, reason=reason))
    return _keep_named(verdicts, names)


def _keep_named(
    verdicts: list[RetentionDecision], names: Mapping[str, set[str]]
) -> list[RetentionDecision]:
    """Also keep everything that kept tags reference, transitively."""
    while True:
        going = {tag for verdict in verdicts if not verdict.keep for tag in verdict.held.tags}
        after = []
        for verdict in verdicts:
            others = names.get(verdict.held.digest, set()) - going
            if not verdict.keep and others:
                reason = f"named by {', '.join(sorted(others))}"
                after.append(replace(verdict, keep=True, reason=reason))
            else:
                after.append(verdict)
        if after == verdicts:
            return after
        verdicts = after


def removals(
    repository: PublishTarget,
    inventory: Inventory,
    verdicts: Sequence[RetentionDecision],
    names: Mapping[str, set[str]],
) -> list[Removal]:
    """Everything to delete, in order: an index, its images, and the attachments of each after it.

    Raises:
        RemoteError: the registry does not respond.
    """
    going = sorted(
        (verdict.held for verdict in verdicts if not verdict.keep),
        key=lambda held: len(_parts(held)) == 0,
    )
    tags = {tag for held in going for tag in held.tags}
    last = {part: held.digest for held in going for part in _parts(held)}
    found: dict[str, Removal] = {}
    for held in going:
        root = Removal(digest=held.digest, what="image", tags=held.tags)
        parts = [
            Removal(digest=part, what="part", of=held.digest)
            for part in _parts(held)
            if last[part] == held.digest
            and part not in {other.digest for other in going}
            and not names.get(part, set()) - tags
        ]
        for image in (root, *parts):
            belongs = _belongings(repository, inventory, image.digest, names)
            found |= {one.digest: one for one in (image, *belongs) if one.digest not in found}
    for subject in dict.fromkeys(map(subject_of_tag, inventory.attachments)):
        if subject not in found and _is_left_over(repository, subject):
            belongs = _belongings(repository, inventory, subject, names)
            found |= {one.digest: one for one in belongs if one.digest not in found}
    return list(found.values())


def _parts(held: StoredManifest) -> list[str]:
    """The manifests in an index."""
    images = held.subject.images if held.subject is not None else ()
    return [image.digest for image in images if image.digest != held.digest]


def _belongings(
    repository: PublishTarget, inventory: Inventory, subject: str, names: Mapping[str, set[str]]
) -> Iterable[Removal]:
    """Attachments, signatures, and last their list, from which an interrupted run can continue."""
    tags = [tag for tag in inventory.attachments if subject_of_tag(tag) == subject]
    lists = tuple(tag for tag in tags if "." not in tag)
    for entry in repository.referrers(subject):
        if not names.get(entry.digest, set()) - set(lists):
            yield Removal(digest=entry.digest, what="proof", of=subject)
    for tag in (*(tag for tag in tags if tag not in lists), *lists):
        digest = repository.digest_of(tag)
        if digest is None or names.get(digest, set()) - {tag}:
            continue
        manifest = repository.manifest(digest)
        if tag in lists and lists_referrers(manifest):
            yield Removal(digest=digest, what="list", tags=(tag,), of=subject)
        elif tag not in lists and holds_signatures(manifest):
            yield Removal(digest=digest, what="signature", tags=(tag,), of=subject)


def _is_left_over(repository: PublishTarget, subject: str) -> bool:
    """Whether a deleted image was ours: its attachments from spark-build still exist.

    A signature alone proves nothing: ``COSIGN_REPOSITORY`` stores those of other repositories.
    """
    if repository.digest_of(subject) is not None:
        return False
    try:
        return any(e.artifact_type.startswith(OURS) for e in repository.referrers(subject))
    except RemoteError:  # a tag of that form which names something else
        return False


def prune(
    repository: PublishTarget, wanted: Sequence[Removal], names: TaggedManifests, pruned: Pruned
) -> None:
    """Delete manifests, after checking again that nothing references them; updates ``pruned``.

    Raises:
        RemoteError: the registry refuses deletes, or does not respond.
    """
    for number, removal in enumerate(wanted):
        reason = _reason_to_spare(repository, removal, names)
        if reason:
            console.say(f"  kept {removal}: {reason}")
            pruned.spared.append(Spared(digest=removal.digest, reason=reason))
            continue
        console.say(f"  deleting {removal}")
        if not repository.remove(removal.digest):
            raise _refused(repository, wanted[number:], pruned.deleted)
        left = _tags_left(repository, removal)
        if left:
            reason = f"the registry accepted the delete, but {', '.join(left)} still names it"
            pruned.spared.append(Spared(digest=removal.digest, reason=reason))
        else:
            pruned.deleted.append(removal.digest)


def _tags_left(repository: PublishTarget, removal: Removal) -> list[str]:
    """Its tags that still exist: some registries delete a digest and leave its tags."""
    for tag in removal.tags:
        if repository.digest_of(tag) == removal.digest:
            repository.remove(tag)
    return [tag for tag in removal.tags if repository.digest_of(tag) == removal.digest]


def _reason_to_spare(repository: PublishTarget, removal: Removal, names: TaggedManifests) -> str:
    own = {*removal.tags}
    if removal.what == "proof":
        own.add(removal.of.replace(":", "-"))
    others = names.look().get(removal.digest, set()) - own
    if others:
        return f"{', '.join(sorted(others))} names it now"
    if removal.what not in ("image", "part") and repository.digest_of(removal.of) is not None:
        return f"{removal.of} is still there"
    if repository.digest_of(removal.digest) is None:
        return "it is already deleted"
    return ""


def _refused(
    repository: PublishTarget, left: Sequence[Removal], deleted: Sequence[str]
) -> RemoteError:
    images = [tag for removal in left if removal.what == "image" for tag in removal.tags]
    rest = ", ".join(images or [str(removal) for removal in left])
    if deleted:
        before = counted(len(deleted), "manifest")
        done = f"refused to delete {left[0]}, after it deleted {before}"
    else:
        done = "refuses deletes, so nothing was deleted"
    return RemoteError(
        f"{repository.name}: this registry {done}; these would be deleted: {rest}",
        hint="delete them in the registry's own interface",
    )
