"""What a change of a repository's tags did, as a document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.common.document import Count, Digest, Part, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.images.registry.copy import Copied


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


class StepRow(Part, frozen=True, kw_only=True):
    """One change of a repository."""

    kind: Kind
    what: str
    size: Annotated[Count, Meta(description="bytes to send if no blob can be mounted")]

    @classmethod
    def of(cls, step: Step) -> StepRow:
        """The row for a step."""
        return cls(kind=step.kind, what=step.what, size=step.size)


class MovedTag(Part, frozen=True, kw_only=True):
    """A moving tag and its previous digest."""

    tag: Text
    to: Digest
    previous: str | None


class PublishResult(Part, frozen=True, kw_only=True):
    """The result for one target."""

    repository: Text
    tag: Text
    digest: Digest
    image: Annotated[Text, Meta(description="REPOSITORY:TAG@DIGEST")]
    status: Text
    verified: bool
    steps: tuple[StepRow, ...]
    moved: tuple[MovedTag, ...]
    mirrors: tuple[Text, ...]
    mounted_blobs: Count
    sent_blobs: Count
    sent_bytes: Count

    @classmethod
    def of(
        cls,
        repository: str,
        tag: str,
        digest: str,
        status: str,
        *,
        verified: bool,
        steps: Sequence[Step] = (),
        moved: Mapping[str, str | None] | None = None,
        mirrors: Sequence[str] = (),
        mounted: int = 0,
        streamed: int = 0,
        streamed_bytes: int = 0,
    ) -> PublishResult:
        """The result for a repository; ``moved`` has the previous digests of moving tags."""
        tags = (moved or {}).items()
        return cls(
            repository=repository,
            tag=tag,
            digest=digest,
            image=f"{repository}:{tag}@{digest}",
            status=status,
            verified=verified,
            steps=tuple(map(StepRow.of, steps)),
            moved=tuple(MovedTag(tag=name, to=digest, previous=was) for name, was in tags),
            mirrors=tuple(mirrors),
            mounted_blobs=mounted,
            sent_blobs=streamed,
            sent_bytes=streamed_bytes,
        )


UP_TO_DATE, PUBLISHED, PLANNED = "up to date", "published", "dry run"
