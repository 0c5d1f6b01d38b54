"""The document of ``publish --json``: what was published where, and its evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from builder.publish.push import Kind
from builder.util.documents import Count, Digest, Document, Part, Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.errors import SparkBuildError
    from builder.publish.proof import Proof
    from builder.publish.push import Step
    from builder.registry.options import Traffic


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
