"""The evidence of an image: only verified images are published.

Evidence is the document that ``verify --json`` writes: given on the command line, attached to the
image, or from a new run.  It is accepted for an image only if it names that image's digest, and its
verdict is computed from its checks, not read from its own summary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from builder.common.console import console
from builder.common.document import Part, read
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.engines.metadata import LABEL_PREFIX
from builder.images.registry.model import blobs
from builder.publishing.subject import read_blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.proof.levels import Level
    from builder.publishing.repository import PublishTarget

EVIDENCE_TYPE = "application/vnd.spark-build.evidence.v1+json"
#: Annotation of attached evidence: ``true`` or ``false``.
PASSED = f"{LABEL_PREFIX}.passed"
#: Annotation: the levels that passed, comma-separated.
PASSED_LEVELS = f"{LABEL_PREFIX}.levels"
#: Levels that must have run before an image is published, if they have something to check.
REQUIRED: tuple[Level, ...] = ("static", "imports", "dispatch")
_FILE_LIMIT = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An image to prove, with every digest that evidence may use for it."""

    digest: str
    digests: tuple[str, ...]
    plan_digest: str
    #: whether the plan has expected log lines
    expects: bool

    def may_be_moot(self, level: str) -> bool:
        """Whether a level may have had nothing to check; expected lines can always be checked."""
        return level != "dispatch" or not self.expects


class CheckStatement(Part, frozen=True, kw_only=True):
    """The relevant fields of a check; an unknown status is never a pass."""

    level: str = ""
    name: str = ""
    status: str = "damaged"
    seen: str = ""
    reason: str = ""
    moot: bool = False


class Statement(Part, frozen=True, kw_only=True):
    """The relevant fields of evidence."""

    digests: tuple[str, ...] = ()
    plan_digest: str = ""
    checks: tuple[CheckStatement, ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A verification report and its origin."""

    document: Mapping[str, Any]
    origin: str

    @cached_property
    def statement(self) -> Statement:
        """The parsed statement.

        Raises:
            ValueError: it is not evidence; the message says where.
        """
        return read(self.document, Statement)

    def is_of(self, claim: Claim) -> bool:
        """Whether the evidence is for this image."""
        return bool(set(self.statement.digests) & set(claim.digests))

    def lacks(self, claim: Claim, levels: Sequence[str]) -> list[str]:
        """Why it does not prove the claim; empty if it does."""
        if not self.is_of(claim):
            named = ", ".join(self.statement.digests) or "no digest"
            return [f"{self.origin} is about {named}, not about {claim.digest}"]
        if self.statement.plan_digest != claim.plan_digest:
            return [f"{self.origin} is about plan {self.statement.plan_digest or 'of no digest'}"]
        checks = self.statement.checks
        reasons = [
            f"{c.level} {c.name} failed: {c.reason or c.seen}"
            for c in checks
            if c.status not in ("pass", "not-run")
        ]
        for level in levels:
            mine = [c for c in checks if c.level == level]
            idle = [c for c in mine if c.status == "not-run"]
            if claim.may_be_moot(level):
                idle = [c for c in idle if not c.moot]
            if not mine:
                reasons.append(f"level {level} was not run")
            reasons += [f"{level} {c.name} was not run: {c.reason}" for c in idle]
        if not any(c.status == "pass" for c in checks):
            reasons.append(f"{self.origin} has no check that passed")
        return reasons

    def levels(self) -> list[str]:
        """Levels whose checks all passed, in the order in which they ran."""
        checks = self.statement.checks
        named = dict.fromkeys(c.level for c in checks)
        return [n for n in named if all(c.status == "pass" for c in checks if c.level == n)]

    def about(self, claim: Claim) -> bytes:
        """The document to attach: with the image's digest, and without local paths."""
        document = {**self.document, "target": claim.digest, "digests": [claim.digest]}
        if isinstance(verdict := document.get("verdict"), dict):
            document["verdict"] = {**verdict, "todo": []}  # commands about this machine's files
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def parse_evidence(data: bytes, origin: str) -> list[Evidence]:
    """Parse the output of ``verify --json`` or ``image --json``.

    Raises:
        UsageError: it is neither.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{origin} is not JSON: {error}") from None
    documents = value if isinstance(value, list) else [value]
    found = []
    for document in documents:
        report = document.get("verify", document) if isinstance(document, dict) else None
        evidence = Evidence(document=report or {}, origin=origin)
        try:
            evidence.statement  # noqa: B018 - read now, where its origin is known
        except ValueError as error:
            raise UsageError(
                f"{origin} is not evidence from spark-build: {error}",
                hint="spark-build verify TARGET --json >evidence.json",
            ) from None
        found.append(evidence)
    return found


def read_evidence(path: Path) -> list[Evidence]:
    """Evidence from a file.

    Raises:
        UsageError: it cannot be read, or is not evidence.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _FILE_LIMIT:
        raise UsageError(f"{path} is larger than {_FILE_LIMIT} bytes, so it is not evidence")
    return parse_evidence(data, str(path))


def best_evidence(
    claim: Claim, offered: Sequence[Evidence], levels: Sequence[str]
) -> tuple[Evidence | None, list[str]]:
    """The first evidence that proves the claim, or None with what each lacks."""
    reasons: list[str] = []
    for evidence in offered:
        lacking = evidence.lacks(claim, levels)
        if not lacking:
            return evidence, []
        reasons += lacking
    return None, list(dict.fromkeys(reasons))


def refuse_unproven(claim: Claim, reasons: Sequence[str]) -> SparkBuildError:
    """The error for an unproven image (exit 5)."""
    listed = "\n  ".join(reasons[:8]) or "it was never verified"
    return SparkBuildError(
        f"{claim.digest} is not published, because it is not verified:\n  {listed}",
        Exit.VERIFY_FAILED,
        hint="verify it, or publish it marked as unverified with --force",
    )


def failed_evidence(claim: Claim, offered: Sequence[Evidence], reasons: Sequence[str]) -> Evidence:
    """The evidence attached to a forced image, with what it lacks."""
    mine = [e for e in offered if e.is_of(claim)]
    document = dict(mine[0].document) if mine else {"schema": 1, "checks": []}
    document |= {
        "plan_digest": claim.plan_digest,
        "digests": [claim.digest],
        "passed": False,
        "forced": True,
        "lacks": list(reasons) or ["it was never verified"],
    }
    document.pop("verdict", None)  # it was about what was asked for there, not about this
    return (
        replace(mine[0], document=document)
        if mine
        else Evidence(document=document, origin="--force")
    )


# ------------------------------------------------------------ the evidence to publish an image with


#: Limit of evidence's size; a few dozen checks take about 30 kB.
_ATTACHED_LIMIT = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The evidence of an image, and whether it is sufficient."""

    evidence: Evidence
    verified: bool


def attached_evidence(repository: PublishTarget, digest: str) -> Iterable[Evidence]:
    """Evidence attached to an image in a repository; damaged documents are skipped."""
    for entry in repository.referrers(digest):
        if entry.artifact_type != EVIDENCE_TYPE:
            continue
        try:
            document = blobs(repository.manifest(entry.digest))[1]
            data = read_blob(repository, document, _ATTACHED_LIMIT)
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
