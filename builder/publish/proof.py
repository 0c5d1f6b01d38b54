"""The evidence of an image: given on the command line, attached to it, or from a new run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import RemoteError, UsageError
from builder.publish.evidence import (
    MEDIA_TYPE,
    Evidence,
    best_evidence,
    failed_evidence,
    parse_evidence,
    refuse_unproven,
)
from builder.publish.subject import read_blob
from builder.registry.manifests import blobs
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from builder.publish.evidence import Claim
    from builder.publish.protocols import PublishTarget

#: Limit of evidence's size; a few dozen checks take about 30 kB.
_LIMIT = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The evidence of an image, and whether it is sufficient."""

    evidence: Evidence
    verified: bool


def attached_evidence(repository: PublishTarget, digest: str) -> Iterable[Evidence]:
    """Evidence attached to an image in a repository; damaged documents are skipped."""
    for entry in repository.referrers(digest):
        if entry.artifact_type != MEDIA_TYPE:
            continue
        try:
            document = blobs(repository.manifest(entry.digest))[1]
            data = read_blob(repository, document, _LIMIT)
            yield from parse_evidence(data, f"{repository.name}@{entry.digest}")
        except (RemoteError, UsageError, IndexError) as error:
            console.warn(f"{repository.name}@{entry.digest} is not evidence: {error}")


def prove(
    claims: Sequence[Claim],
    offered: Sequence[Evidence],
    levels: Sequence[str],
    *,
    repositories: Sequence[PublishTarget],
    verify_now: Callable[[Claim], Evidence] | None,
    force: bool,
) -> dict[str, Proof]:
    """The evidence that proves each image; with ``force`` also insufficient evidence.

    Raises:
        UsageError: the given evidence is for other images.
        SparkBuildError: an image is not proven, without ``force`` (exit 5).
    """
    for evidence in offered:
        if not any(evidence.is_of(claim) for claim in claims):
            named = ", ".join(evidence.statement.digests) or "no digest"
            wanted = ", ".join(claim.digest for claim in claims)
            raise UsageError(
                f"{evidence.origin} is evidence for {named}, but the published image is {wanted}",
                hint="spark-build verify SOURCE --json >evidence.json",
            )
    return {
        claim.digest: _proof(
            claim,
            [evidence for evidence in offered if evidence.is_of(claim)],
            _Search(levels, repositories, verify_now, force),
        )
        for claim in claims
    }


@dataclass(frozen=True)
class _Search:
    """Sources of evidence, besides given files."""

    levels: Sequence[str]
    repositories: Sequence[PublishTarget]
    verify_now: Callable[[Claim], Evidence] | None
    force: bool


def _proof(claim: Claim, given: list[Evidence], search: _Search) -> Proof:
    pool = given or [
        evidence
        for repository in search.repositories
        for evidence in attached_evidence(repository, claim.digest)
    ]
    best, reasons = best_evidence(claim, pool, search.levels)
    if best is None and not given and not search.force and search.verify_now is not None:
        pool = [search.verify_now(claim)]
        best, reasons = best_evidence(claim, pool, search.levels)
    if best is not None:
        console.say(f"  {claim.digest[:19]} is verified by {best.origin}")
        return Proof(evidence=best, verified=True)
    if not search.force:
        raise refuse_unproven(claim, reasons)
    console.warn(f"{claim.digest} is not verified: {'; '.join(reasons[:3]) or 'nothing was run'}")
    return Proof(evidence=failed_evidence(claim, pool, reasons), verified=False)
