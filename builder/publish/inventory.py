"""Lists a repository: each tag with its plan, base, layers, date, evidence and size."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.engines.metadata import LABEL_PREFIX
from builder.errors import RemoteError, UsageError
from builder.publish.documents import CREATED
from builder.publish.evidence import MEDIA_TYPE, PASSED, PASSED_LEVELS
from builder.publish.mirror import mirror_tag
from builder.publish.push import PREVIOUS
from builder.publish.referrers import is_fallback_tag
from builder.publish.subject import read_subject
from builder.util.documents import Count, Digest, Document, Part, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.publish.protocols import PublishTarget
    from builder.publish.subject import Image, Subject
    from builder.registry.model import Descriptor

#: Parallel small requests.
_JOBS = 8
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
    subject: Subject | None
    published: str = ""
    verified: bool | None = None
    levels: tuple[str, ...] = ()
    signed: bool = False
    referrers: tuple[Descriptor, ...] = ()

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
    def of(cls, held: StoredManifest) -> HeldRow:
        """The row for a manifest."""
        label, images = held.label, held.images
        return cls(
            digest=held.digest,
            tags=tuple(Tag(tag=tag, kind=held.kind(tag)) for tag in held.tags),
            plan_digest=images[0].plan_digest if len(images) == 1 else None,
            plans={image.platform: image.plan_digest for image in images},
            version=label.get("org.opencontainers.image.version"),
            profiles=_words(label, f"{LABEL_PREFIX}.profiles"),
            layers=_words(label, f"{LABEL_PREFIX}.layers"),
            base=_pinned_base(images[0]) if images else "",
            created=images[0].created if images else None,
            published=held.published or None,
            verified=held.verified,
            levels=held.levels,
            signed=held.signed,
            overlay=held.overlay,
            added_bytes=held.added,
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
    held: tuple[StoredManifest, ...]
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
        held = list(
            pool.map(lambda item: _held(repository, *item, signed=signed), by_digest.items())
        )
    held.sort(key=lambda h: (h.published or (h.images[0].created if h.images else ""), h.digest))
    return Inventory(
        repository=repository.name, held=tuple(reversed(held)), attachments=tuple(attachments)
    )


def _held(
    repository: PublishTarget, digest: str, tags: Sequence[str], *, signed: Iterable[str]
) -> StoredManifest:
    try:
        subject = read_subject(repository, digest)
    except RemoteError:  # a chart, a wheel carrier: whatever else lives in this repository
        return StoredManifest(digest=digest, tags=tuple(tags), subject=None)
    marks = [evidence_marks(repository, image.digest) for image in subject.ours]
    levels = [mark.levels for mark in marks if mark.verified]
    return StoredManifest(
        digest=digest,
        tags=tuple(tags),
        subject=subject,
        published=max((mark.published for mark in marks), default=""),
        verified=_all(mark.verified for mark in marks),
        levels=levels[0] if levels else (),
        signed=digest.replace(":", "-") in set(signed)
        or any("cosign" in r.artifact_type for m in marks for r in m.referrers),
        referrers=tuple(r for mark in marks for r in mark.referrers),
    )


def _all(values: Iterable[bool | None]) -> bool | None:
    known = list(values)
    if not known or None in known:
        return None if False not in known else False
    return all(known)


@dataclass(frozen=True, kw_only=True)
class ReferrerSummary:
    """A summary of an image's referrers, from the list alone."""

    published: str
    verified: bool | None
    levels: tuple[str, ...]
    referrers: tuple[Descriptor, ...]


def evidence_marks(repository: PublishTarget, digest: str) -> ReferrerSummary:
    """Whether an image was verified, and when it was first published."""
    listed = tuple(repository.referrers(digest))
    pieces = [entry for entry in listed if entry.artifact_type == MEDIA_TYPE]
    passed = [entry for entry in pieces if entry.annotations.get(PASSED) == "true"]
    levels = passed[0].annotations.get(PASSED_LEVELS, "") if passed else ""
    return ReferrerSummary(
        published=min((e.annotations.get(CREATED, "") for e in passed or pieces), default=""),
        verified=bool(passed) if pieces else None,
        levels=tuple(word for word in levels.split(",") if word),
        referrers=listed,
    )
