"""The tags of a repository: the list of them, retention, and rollback of a moving tag.

Retention keeps the newest images of each profile, and everything that other tags reference.  Labels
identify our images, and a tag is ours if ``publish`` derives it from these labels.  Any other tag
on a manifest, directly or through an index, keeps it.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.common.console import console, counted
from builder.common.document import Count, Digest, Document, Part, Text, always
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.engines.baked import LABEL_PREFIX
from builder.images.registry.client import TagTaken
from builder.images.registry.copy import refuse_missing
from builder.publishing.evidence import Claim, attached_evidence
from builder.publishing.naming import PREVIOUS, check_moving, mirror_tag
from builder.publishing.repository import (
    OURS,
    holds_signatures,
    is_fallback_tag,
    lists_referrers,
    own_manifest,
    subject_of_tag,
)
from builder.publishing.results import PLANNED, PublishResult
from builder.publishing.subject import read_subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.images.registry.client import Repository
    from builder.publishing.repository import PublishTarget, TaggedManifests
    from builder.publishing.subject import Image, ImageSet

# ----------------------------------------------------------------------------------------- the list


#: Parallel small requests.
_JOBS = 8
#: Signatures of an image that are looked at, until one is its own.
_MOST_SIGNED = 8
#: Matches history entries written by spark-build's engines.
_OUR_LAYER = re.compile(
    r"spark-build layer |COPY (--link )?(\d\d|layer)-[\w.-]+/ / |RUN .*spark_apply\.pyz?.*finish"
)

TagKind = Literal["immutable", "moving", "previous", "base", "other"]


@dataclass(frozen=True, kw_only=True)
class StoredManifest:
    """One manifest of a repository, and the tags on it.

    ``verified`` is None if unknown; ``added`` is in bytes, None if the
    history does not tell which layers spark-build added.
    """

    digest: str
    tags: tuple[str, ...]
    subject: ImageSet | None
    published: str = ""
    verified: bool | None = None
    levels: tuple[str, ...] = ()
    signed: bool = False
    #: whether all that may be evidence of it was read
    whole: bool = True

    @property
    def images(self) -> tuple[Image, ...]:
        """Images built by spark-build."""
        return self.subject.ours if self.subject is not None else ()

    @property
    def label(self) -> dict[str, str]:
        """Labels of its first image built by spark-build."""
        return dict(self.images[0].labels) if self.images else {}

    @property
    def added(self) -> int | None:
        """Compressed size of the layers that spark-build added."""
        sizes = [added_bytes(image) for image in self.images]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    @property
    def overlay(self) -> bool:
        """Whether it is an overlay, which cannot run alone."""
        return self.subject is not None and self.subject.overlay

    @property
    def own_tags(self) -> tuple[str, ...]:
        """The tags that ``publish`` derives from its labels; empty for a foreign image."""
        if self.subject is None:
            return ()
        try:
            return tuple(self.subject.name.tag(verified=proven) for proven in (True, False))
        except UsageError:  # not ours, or images that disagree
            return ()

    @property
    def profile(self) -> str:
        """The profile in its own tags, or ``""``."""
        return self.subject.name.profile if self.subject is not None and self.own_tags else ""

    def kind(self, tag: str) -> TagKind:
        """The kind of a tag."""
        if tag == mirror_tag(self.digest):
            return "base"
        if not self.images:
            return "other"
        if tag.endswith(PREVIOUS):
            return "previous"
        return "immutable" if tag in self.own_tags else "moving"


class Tag(Part, frozen=True, kw_only=True):
    """A tag and its kind."""

    tag: Text
    kind: TagKind


class HeldRow(Part, frozen=True, kw_only=True):
    """A manifest of a repository, with its tags and evidence."""

    digest: Digest
    tags: tuple[Tag, ...]
    plan_digest: str | None
    plans: Annotated[dict[str, str | None], Meta(description="by platform")]
    version: str | None
    profiles: tuple[Text, ...]
    layers: tuple[Text, ...]
    base: str
    created: str | None
    published: str | None
    verified: bool | None
    levels: tuple[Text, ...]
    signed: bool
    overlay: Annotated[bool, Meta(description="only the changed files; cannot run alone")]
    added_bytes: Count | None

    @classmethod
    def of(cls, stored: StoredManifest) -> HeldRow:
        """The row for a manifest."""
        label, images = stored.label, stored.images
        return cls(
            digest=stored.digest,
            tags=tuple(Tag(tag=tag, kind=stored.kind(tag)) for tag in stored.tags),
            plan_digest=images[0].plan_digest if len(images) == 1 else None,
            plans={image.platform: image.plan_digest for image in images},
            version=label.get("org.opencontainers.image.version"),
            profiles=_words(label, f"{LABEL_PREFIX}.profiles"),
            layers=_words(label, f"{LABEL_PREFIX}.layers"),
            base=_pinned_base(images[0]) if images else "",
            created=images[0].created if images else None,
            published=stored.published or None,
            verified=stored.verified,
            levels=stored.levels,
            signed=stored.signed,
            overlay=stored.overlay,
            added_bytes=stored.added,
        )


class Listing(Document, frozen=True, kw_only=True):
    """The contents of a repository."""

    repository: Text
    images: tuple[HeldRow, ...]


def _pinned_base(image: Image) -> str:
    name, digest = image.base
    return f"{name}@{digest}" if digest and "@" not in name else name


def _words(label: dict[str, str], name: str) -> tuple[str, ...]:
    return tuple(word for word in label.get(name, "").split(",") if word)


def added_bytes(image: Image) -> int | None:
    """Compressed size of the layers that spark-build added, from the image's history."""
    notes = [step.created_by for step in image.settings.history if not step.empty_layer]
    if len(notes) != len(image.layers):
        return None
    ours = [d.size for d, note in zip(image.layers, notes, strict=True) if our_layer(note)]
    return sum(ours) if ours else None


def our_layer(step: str) -> bool:
    """Whether an entry of an image's history was written by spark-build."""
    return _OUR_LAYER.search(step) is not None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The contents of a repository.  ``attachments`` are tags of evidence and signatures."""

    repository: str
    stored: tuple[StoredManifest, ...]
    attachments: tuple[str, ...] = field(default=())


def take_inventory(repository: PublishTarget) -> Inventory:
    """Read every tag, newest publication first.

    Raises:
        RemoteError: the registry does not respond.
    """
    names = repository.tags()
    attachments = sorted(tag for tag in names if is_fallback_tag(tag))
    plain = sorted(tag for tag in names if not is_fallback_tag(tag))
    signed = {tag.partition(".")[0] for tag in attachments if tag.endswith(".sig")}
    by_digest: dict[str, list[str]] = {}
    with ThreadPoolExecutor(_JOBS) as pool:
        for tag, digest in zip(plain, pool.map(repository.digest_of, plain), strict=True):
            if digest is not None:  # deleted since it was listed
                by_digest.setdefault(digest, []).append(tag)
        stored = list(
            pool.map(lambda item: _held(repository, *item, signed=signed), by_digest.items())
        )
    stored.sort(key=lambda h: (h.published or (h.images[0].created if h.images else ""), h.digest))
    return Inventory(
        repository=repository.name, stored=tuple(reversed(stored)), attachments=tuple(attachments)
    )


def _held(
    repository: PublishTarget, digest: str, tags: Sequence[str], *, signed: Iterable[str]
) -> StoredManifest:
    try:
        subject = read_subject(repository, digest)
    except RemoteError:  # a chart, a wheel carrier: whatever else lives in this repository
        return StoredManifest(digest=digest, tags=tuple(tags), subject=None)
    marks = [evidence_marks(repository, image) for image in subject.ours]
    levels = [mark.levels for mark in marks if mark.verified]
    return StoredManifest(
        digest=digest,
        tags=tuple(tags),
        subject=subject,
        published=max((mark.published for mark in marks), default=""),
        verified=False if marks and subject.foreign else _all(mark.verified for mark in marks),
        levels=levels[0] if levels else (),
        signed=digest.replace(":", "-") in set(signed) or any(mark.signed for mark in marks),
        whole=all(mark.whole for mark in marks),
    )


def _all(values: Iterable[bool | None]) -> bool | None:
    known = list(values)
    if not known or None in known:
        return None if False not in known else False
    return all(known)


@dataclass(frozen=True, kw_only=True)
class ReferrerSummary:
    """What is attached to an image, and what its evidence says."""

    published: str
    verified: bool | None
    levels: tuple[str, ...]
    signed: bool
    #: whether all that may be evidence was read
    whole: bool


def evidence_marks(repository: PublishTarget, image: Image) -> ReferrerSummary:
    """Whether an image was verified, and when it was first published.

    The evidence itself is read; what a list says of it is written by anybody.
    """
    claim = Claim.of_labels(image)
    unread: list[str] = []
    pieces = [e for e in attached_evidence(repository, image.digest, unread) if e.is_of(claim)]
    passed = [evidence for evidence in pieces if evidence.proves(claim)]
    signatures = [e for e in repository.referrers(image.digest) if "cosign" in e.artifact_type]
    return ReferrerSummary(
        published=min((evidence.published for evidence in passed or pieces), default=""),
        verified=bool(passed) if pieces else None,
        levels=tuple(passed[0].levels()) if passed else (),
        signed=any(_is_own(repository, e.digest, image.digest) for e in signatures[:_MOST_SIGNED]),
        whole=not unread,
    )


def _is_own(repository: PublishTarget, digest: str, subject: str) -> bool:
    try:
        own_manifest(repository, digest, subject)
    except RemoteError:
        return False
    return True


# ---------------------------------------------------------------------------------------- retention


What = Literal["image", "part", "proof", "signature", "list"]


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """The decision for one image, and the reason."""

    stored: StoredManifest
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
    spared: Annotated[
        tuple[Spared, ...],
        Meta(description="deletions that failed, and what only a list calls an attachment"),
    ]

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
            VerdictRow(digest=v.stored.digest, tags=v.stored.tags, keep=v.keep, reason=v.reason)
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
    for stored in inventory.stored:
        if not stored.own_tags or set(stored.tags) - set(stored.own_tags):
            other = [tag for tag in stored.tags if tag not in stored.own_tags]
            verdicts.append(
                RetentionDecision(stored=stored, keep=True, reason=f"named by {', '.join(other)}")
            )
            continue
        if not (stored.verified or stored.whole):
            reason = "not all of its evidence can be read"
            verdicts.append(RetentionDecision(stored=stored, keep=True, reason=reason))
            continue
        profile = stored.profile
        every[profile] = every.get(profile, 0) + 1
        if stored.verified:  # what is not verified never pushes it out
            verified[profile] = verified.get(profile, 0) + 1
        stays = (verified if stored.verified else every)[profile] <= keep
        reason = f"{'among' if stays else 'older than'} the newest {keep} of {profile}"
        verdicts.append(RetentionDecision(stored=stored, keep=stays, reason=reason))
    return _keep_named(verdicts, names)


def _keep_named(
    verdicts: list[RetentionDecision], names: Mapping[str, set[str]]
) -> list[RetentionDecision]:
    """Also keep everything that kept tags reference, transitively."""
    while True:
        going = {tag for verdict in verdicts if not verdict.keep for tag in verdict.stored.tags}
        after = []
        for verdict in verdicts:
            others = names.get(verdict.stored.digest, set()) - going
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
    spared: list[Spared] | None = None,
) -> list[Removal]:
    """Everything to delete, in order: an index, its images, and the attachments of each after it.

    ``spared`` gets what a list names as attached to a deleted image, and is not.

    Raises:
        RemoteError: the registry does not respond.
    """
    going = sorted(
        (verdict.stored for verdict in verdicts if not verdict.keep),
        key=lambda stored: len(_parts(stored)) == 0,
    )
    tags = {tag for stored in going for tag in stored.tags}
    last = {part: stored.digest for stored in going for part in _parts(stored)}
    left = [] if spared is None else spared
    belonging = partial(_belongings, repository, inventory, names=names, spared=left)
    removals: dict[str, Removal] = {}
    for stored in going:
        root = Removal(digest=stored.digest, what="image", tags=stored.tags)
        parts = [
            Removal(digest=part, what="part", of=stored.digest)
            for part in _parts(stored)
            if last[part] == stored.digest
            and part not in {other.digest for other in going}
            and not names.get(part, set()) - tags
        ]
        for image in (root, *parts):
            belongs = belonging(image.digest)
            removals |= {one.digest: one for one in (image, *belongs) if one.digest not in removals}
    for subject in dict.fromkeys(map(subject_of_tag, inventory.attachments)):
        if subject not in removals and _is_left_over(repository, subject):
            belongs = belonging(subject)
            removals |= {one.digest: one for one in belongs if one.digest not in removals}
    return list(removals.values())


def _parts(stored: StoredManifest) -> list[str]:
    """The manifests in an index."""
    images = stored.subject.images if stored.subject is not None else ()
    return [image.digest for image in images if image.digest != stored.digest]


def _belongings(
    repository: PublishTarget,
    inventory: Inventory,
    subject: str,
    *,
    names: Mapping[str, set[str]],
    spared: list[Spared],
) -> Iterable[Removal]:
    """Attachments, signatures, and last their list, from which an interrupted run can continue.

    An attachment has the image as its own subject; a list alone makes nothing one.
    """
    tags = [tag for tag in inventory.attachments if subject_of_tag(tag) == subject]
    lists = tuple(tag for tag in tags if "." not in tag)
    for entry in repository.referrers(subject):
        if names.get(entry.digest, set()) - set(lists):
            continue
        try:
            own_manifest(repository, entry.digest, subject)
        except RemoteError as error:
            if repository.digest_of(entry.digest) is not None:
                reason = f"a list names it as attached to {subject}, but {error}"
                console.say(f"  kept {entry.digest}: {reason}")
                spared.append(Spared(digest=entry.digest, reason=reason))
            continue
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
        listed = [e for e in repository.referrers(subject) if e.artifact_type.startswith(OURS)]
        return any(_is_own(repository, entry.digest, subject) for entry in listed)
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


# ----------------------------------------------------------------------------------------- rollback


def roll_back(
    repository: Repository, tag: str, *, dry_run: bool, overlay: bool = False
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
        repository.settle()
        if (seen := repository.stored_digest(tag)) != before:
            raise RemoteError(
                f"{repository.name}:{tag} is {seen or 'gone'} right after it was set back to "
                f"{before}: another client moved it at the same time",
                hint=f"spark-build tags {repository.name}",
            )
    return PublishResult.of(
        repository.name,
        tag,
        before,
        PLANNED if dry_run else "rolled back",
        verified=_verified(repository, before),
        moved={tag: current},
    )


def _verified(repository: Repository, digest: str) -> bool:
    """Whether every image has passing evidence; reported, but not required."""
    subject = read_subject(repository, digest)
    marks = (evidence_marks(repository, image).verified for image in subject.ours)
    return not subject.foreign and all(marks)
