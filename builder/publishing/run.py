"""Publish one image to one repository, in an order that leaves no tag behind when interrupted.

Blobs and manifests by digest, then attachments, then the immutable tag, then moving tags.  Each
step first checks whether it is done, so a second run completes an interrupted one.

The base image is copied next to the published image, because nightly bases disappear.  Its layers
are in the image anyway, so a mirror in the same repository costs a manifest and a configuration.
The base in the plan may be an index; the patched entry is kept, and the index's bytes are kept in
the note, so that the digest in the plan still leads to the image.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, TypeGuard

import msgspec
from msgspec import Meta

from builder.common.console import console, counted, megabytes
from builder.common.document import Count, Digest, Document, Part, Text
from builder.common.reference import Ref, base_kind
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.engines.baked import LABEL_PREFIX
from builder.images.registry.client import Repository, TagTaken
from builder.images.registry.copy import copy_image, missing_blobs, origin
from builder.images.registry.reference import is_digest, parse_reference
from builder.publishing.evidence import documents
from builder.publishing.naming import PREVIOUS, check_moving, mirror_tag
from builder.publishing.repository import (
    Attachment,
    attach,
    own_manifest,
    with_retries,
)
from builder.publishing.results import PLANNED, PUBLISHED, UP_TO_DATE, Kind, PublishResult, Step
from builder.publishing.sources import EngineImage, StoredImage
from builder.publishing.subject import read_subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.plan import PlannedBase
    from builder.images.registry.copy import Copied, Locations
    from builder.images.registry.model import Descriptor, ImageSource, RawManifest
    from builder.images.registry.reference import Traffic
    from builder.publishing.evidence import Proof
    from builder.publishing.repository import PublishTarget
    from builder.publishing.subject import Image, ImageSet

# ------------------------------------------------------------------------------ the order of writes


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A base image to copy next to the image, under its own immutable tag."""

    subject: ImageSet
    source: ImageSource
    tag: str


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What to publish, and under which tags.

    ``proofs`` maps image digests to attachments; ``origins`` are repositories
    from which blobs may be mounted.
    """

    subject: ImageSet
    source: ImageSource
    tag: str
    moving: tuple[str, ...] = ()
    proofs: Mapping[str, Sequence[Attachment]] = field(default_factory=dict)
    origins: tuple[ImageSource, ...] = ()
    mirrors: tuple[Mirror, ...] = ()


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
    subject: ImageSet,
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
            if origins and not _on_host(origin(source, blob), target) and not target.gives(blob)
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
    return any(_on_host(place, target) and place.has(blob.digest) for place in places)


def _on_host(place: ImageSource, target: PublishTarget) -> TypeGuard[Repository]:
    """Whether a place is a repository on the target's registry, from which a copy mounts."""
    host = target.name.partition("/")[0]
    return isinstance(place, Repository) and place.registry.host == host


def _proof_steps(publication: Publication, target: PublishTarget) -> list[Step]:
    """Attach the documents that an image does not have, by their own bytes."""
    return [
        _attach_step(target, image.manifest.descriptor, proof)
        for image in publication.subject.images
        for proof in publication.proofs.get(image.digest, ())
        if not proof.is_attached(target, image.manifest.descriptor)
    ]


def _attach_step(target: PublishTarget, subject: Descriptor, proof: Attachment) -> Step:
    return Step(
        kind="attach",
        what=f"{proof.artifact_type} to {subject.digest}, as {proof.manifest(subject).digest}",
        size=len(proof.data),
        run=lambda: attach(target, subject, proof),
    )


def _mirror_steps(mirror: Mirror, publication: Publication, target: PublishTarget) -> list[Step]:
    """The base's layers come with the image; the rest is small."""
    digest, tag = mirror.subject.digest, mirror.tag
    missing = missing_blobs(target, mirror.subject.blobs())
    present = target.digest_of(tag)
    if present not in (None, digest):
        raise _other_base(target, tag, digest, present)
    if present and not missing:
        return []

    def run() -> Copied:
        copied = copy_image(mirror.source, digest, target, digest)
        if present is None:
            try:
                target.set_tag(mirror.subject.root, tag, None)
            except TagTaken as taken:
                raise _other_base(target, tag, digest, taken.seen) from None
        return copied

    coming = {blob.digest for blob in publication.subject.blobs()}
    size = sum(blob.size for blob in missing if blob.digest not in coming)
    return [Step(kind="mirror", what=f"{tag} -> {digest}", size=size, run=run)]


def _other_base(target: PublishTarget, tag: str, digest: str, seen: str | None) -> RemoteError:
    """The error for a base's tag that names another image, which is never overwritten."""
    return RemoteError(
        f"{target.name}:{tag} is {seen or 'gone'}, not the base {digest} that its name is for; it "
        f"is not overwritten",
        hint="delete that tag, or leave --mirror-base out",
    )


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
        seen = target.stored_digest(tag)
        if seen != digest:
            raise _lost(target, "tag" if tag == publication.tag else "move", tag, digest, seen)


# ------------------------------------------------------------------------ the base beside the image


BASE_TYPE = "application/vnd.spark-build.base.v1+json"
#: Annotation of the note: the digest of the mirrored manifest.
MIRROR = f"{LABEL_PREFIX}.base-mirror"
#: Notes of an image that are read; there is one for each base that it was given.
_MOST_NOTES = 8


def mirrors_of(
    stored: StoredImage, places: Locations
) -> tuple[tuple[Mirror, ...], Mapping[str, list[Attachment]]]:
    """The images' bases to copy, and the note that is attached to each image.

    Raises:
        UsageError: an image has no base image, or does not stand on the one that its plan names.
        RemoteError: a base is no longer available.
    """
    mirrors: dict[str, Mirror] = {}
    notes: dict[str, list[Attachment]] = {}
    for image in stored.subject.ours:
        base = stored.baked[image.digest].plan.base
        if not base_kind(base.kind).is_image:
            raise UsageError(
                f"{image.digest} is an overlay of {base.ref}: there is no base image to mirror",
                hint="leave --mirror-base out",
            )
        location = places.open(Ref(base.ref).at(base.digest))
        whole = read_subject(location.image, base.digest)
        chosen = base_of(whole, image)
        tag = mirror_tag(chosen.digest)
        one = read_subject(location.image, chosen.digest)
        mirrors[tag] = Mirror(subject=one, source=location.image, tag=tag)
        notes[image.digest] = [_note(base, whole, chosen, tag)]
    return tuple(mirrors.values()), notes


def _name(ref: str) -> str:
    return Ref(ref).place.partition("@")[0]


def base_of(whole: ImageSet, image: Image) -> Image:
    """The image of a base that another one stands on; an engine may have packed layers anew.

    Raises:
        UsageError: there is none: a plan may name any image, also one that is not for everybody.
    """
    ids = image.settings.diff_ids or ()
    for candidate in whole.images:
        first = candidate.settings.diff_ids or ()
        if first and first == ids[: len(first)]:
            return candidate
    raise UsageError(
        f"the layers of {whole.digest}, which the plan names as base, are not the first ones of "
        f"{image.digest}, so it is not copied",
        hint="leave --mirror-base out",
    )


def _note(base: PlannedBase, whole: ImageSet, chosen: Image, tag: str) -> Attachment:
    document = {
        "schema": 1,
        "name": base.ref,
        "digest": base.digest,
        "manifest": chosen.digest,
        "tag": tag,
    }
    if whole.digest != chosen.digest:
        document["index"] = whole.root.data.decode()
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return Attachment(artifact_type=BASE_TYPE, data=data, annotations={MIRROR: chosen.digest})


def mirrored_base(repository: PublishTarget, image: Image) -> str | None:
    """The noted copy of the image's base, as a base reference, or None.

    The note need not be trusted: a rebuild on a wrong base has another digest.
    """
    notes = [e for e in repository.referrers(image.digest) if e.artifact_type == BASE_TYPE]
    for entry in notes[:_MOST_NOTES]:
        with suppress(RemoteError):
            note = own_manifest(repository, entry.digest, image.digest)
            digest = str((note.json().get("annotations") or {}).get(MIRROR))
            if is_digest(digest) and repository.digest_of(digest) is not None:
                return f"docker://{repository.name}@{digest}"
    return None


# ------------------------------------------------------------------- the document of publish --json


class FailedTarget(Part, frozen=True, kw_only=True):
    """Why publishing to one target failed."""

    repository: Text
    code: Annotated[int, Meta(ge=1, description="the exit status")]
    message: Text
    hint: str

    @classmethod
    def of(cls, repository: str, error: SparkBuildError) -> FailedTarget:
        """The row for an error."""
        return cls(repository=repository, code=error.code, message=str(error), hint=error.hint)


class ProofRow(Part, frozen=True, kw_only=True):
    """The evidence of one image."""

    digest: Digest
    verified: bool
    levels: tuple[Text, ...]
    origin: Annotated[Text, Meta(description="the source of the evidence")] = msgspec.field(
        name="from"
    )

    @classmethod
    def of(cls, digest: str, proof: Proof) -> ProofRow:
        """The row for a proof."""
        levels = tuple(proof.evidence.levels())
        origin = proof.evidence.origin
        return cls(digest=digest, verified=proof.verified, levels=levels, origin=origin)


class TrafficRow(Part, frozen=True, kw_only=True):
    """Bytes sent and received."""

    sent: Count
    received: Count

    @classmethod
    def of(cls, traffic: Traffic) -> TrafficRow:
        """The row for traffic counts."""
        return cls(sent=traffic.sent, received=traffic.received)


class Published(Document, frozen=True, kw_only=True):
    """The result for all targets.  With --rollback it has no image."""

    dry_run: bool
    plan_digest: str | None = None
    overlay: Annotated[
        bool | None,
        Meta(description="whether it is an overlay (changed files only, cannot run alone)"),
    ] = None
    verified: bool | None = None
    evidence: tuple[ProofRow, ...] | None = None
    results: tuple[PublishResult, ...]
    failed: tuple[FailedTarget, ...]
    traffic: TrafficRow


# ---------------------------------------------------------------------- one image to one repository


@dataclass(frozen=True, kw_only=True)
class PublishRequest:
    """The options of ``publish``, besides source and target."""

    moving: tuple[str, ...] = ()
    mirror_base: bool = False
    dry_run: bool = False


def publish(
    opened: StoredImage | EngineImage,
    repository: Repository,
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
        subject = _pushed_image(opened, repository, tag)
        stored = StoredImage(
            ref=Ref(f"{repository.name}:{tag}"), source=repository, subject=subject
        )
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
    stored: StoredImage, repository: Repository, places: Locations
) -> tuple[Repository, ...]:
    """Repositories of the bases on the same registry, from which layers are mounted."""
    bases: dict[str, Repository] = {}
    for image in stored.subject.ours:
        name = image.labels.get("org.opencontainers.image.base.name", "")
        if name:
            base = parse_reference(name)
            if base.host == repository.registry.host and base.repository != repository.path:
                registry = places.registry(base.host)
                bases[base.name] = registry.repository(base.repository)
    return tuple(bases.values())


def _carry_out(
    publication: Publication,
    repository: Repository,
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
    previous = [s.what.removeprefix(prefix) for s in steps if s.what.startswith(prefix)]
    return previous[0] if previous else None


def _engine_dry_run(
    opened: EngineImage, repository: Repository, tag: str, *, verified: bool
) -> PublishResult:
    console.say(f"  push     {opened.ref} by its Docker Engine as {repository.name}:{tag}")
    return PublishResult.of(repository.name, tag, opened.image.id, PLANNED, verified=verified)


def _push_from_engine(opened: EngineImage, repository: Repository, tag: str) -> bool:
    """Let the engine push unless the image exists; returns whether it pushed.

    Raises:
        RemoteError: the tag points to another image.
    """
    if repository.digest_of(tag) is not None:
        there = read_subject(repository, tag)
        if _names(there).isdisjoint(opened.image.digests):
            ours = opened.image.id
            raise two_images(repository, tag, ours, "is already", there.digest)
        if not missing_blobs(repository, there.blobs()):
            return False
    opened.push(repository.name, tag)
    there = read_subject(repository, tag)
    if _names(there).isdisjoint(opened.image.digests):  # an engine's push can have no condition
        raise two_images(repository, tag, opened.image.id, "was made", there.digest)
    return True


def _pushed_image(opened: EngineImage, repository: Repository, tag: str) -> ImageSet:
    """What an engine has pushed, which must be the one image that was verified.

    An engine that keeps images in containerd pushes all platforms that it has of one.

    Raises:
        SparkBuildError: there are others, so the tag is taken away again (exit 5).
    """
    subject = read_subject(repository, tag)
    images = [image for image in subject.images if not image.attests]
    if len(images) == 1:
        return subject
    gone = False
    with suppress(RemoteError):  # some registries delete digests only, and another tag may have it
        gone = repository.remove(tag) and repository.digest_of(tag) is None
    raise SparkBuildError(
        f"the Docker Engine pushed {opened.ref} with {len(images)} images, of which one was "
        f"verified ({', '.join(image.platform for image in images[:4])}); "
        f"{tag} is {'deleted again' if gone else f'still in {repository.name}: delete it there'}",
        Exit.VERIFY_FAILED,
        hint="spark-build image --output oci:DIR, and publish that",
    )


def _names(subject: ImageSet) -> set[str]:
    """Every digest that an engine may use for an image."""
    return {subject.digest, *(d for image in subject.images for d in image.digests)}
