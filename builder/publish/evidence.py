"""Evidence by digest: a published image is one that ``verify`` has passed, and nothing else.

Evidence is the document that ``verify --json`` writes.  It counts for an image only when it names
that image's digest, and its verdict is read from its checks, not from what it says of itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builder.engines.metadata import LABEL_PREFIX
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.verify.levels import Level

MEDIA_TYPE = "application/vnd.spark-build.evidence.v1+json"
#: Annotation of attached evidence: ``true`` or ``false``.
PASSED = f"{LABEL_PREFIX}.passed"
#: Annotation: the levels that passed, comma-separated.
PASSED_LEVELS = f"{LABEL_PREFIX}.levels"
#: What must have run before an image is published, where there is anything to check.
REQUIRED: tuple[Level, ...] = ("static", "imports", "dispatch")
_FILE_LIMIT = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is to be proven: one image, under every digest that evidence may know it by."""

    digest: str
    digests: tuple[str, ...]
    plan: Mapping[str, Any]

    def may_be_moot(self, level: str) -> bool:
        """Whether a level may have had nothing to check; a line that is expected can be checked."""
        return level != "dispatch" or not self.plan.get("expect")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A verification report, and where it came from."""

    document: Mapping[str, Any]
    origin: str

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the image that was verified."""
        value = self.document.get("digests")
        return tuple(map(str, value)) if isinstance(value, list) else ()

    def is_of(self, claim: Claim) -> bool:
        """Whether it is about this image."""
        return bool(set(self.digests) & set(claim.digests))

    def lacks(self, claim: Claim, levels: Sequence[str]) -> list[str]:
        """Why it does not prove the claim; empty when it does."""
        if not self.is_of(claim):
            named = ", ".join(self.digests) or "no digest"
            return [f"{self.origin} is about {named}, not about {claim.digest}"]
        if self.document.get("plan_digest") != claim.plan.get("plan_digest"):
            return [f"{self.origin} is about plan {self.document.get('plan_digest')}"]
        checks = self._checks()
        reasons = [
            f"{c['level']} {c['name']} failed: {c.get('reason') or c.get('seen')}"
            for c in checks
            if c["status"] != "pass" and c["status"] != "not-run"
        ]
        for level in levels:
            mine = [c for c in checks if c["level"] == level]
            idle = [c for c in mine if c["status"] == "not-run"]
            if claim.may_be_moot(level):
                idle = [c for c in idle if not c.get("moot")]
            if not mine:
                reasons.append(f"level {level} was not run")
            reasons += [f"{level} {c['name']} was not run: {c.get('reason')}" for c in idle]
        if not any(c["status"] == "pass" for c in checks):
            reasons.append(f"{self.origin} has no check that passed")
        return reasons

    def levels(self) -> list[str]:
        """Levels of which every check passed, in the order in which they ran."""
        checks = self._checks()
        named = dict.fromkeys(str(c["level"]) for c in checks)
        return [n for n in named if all(c["status"] == "pass" for c in checks if c["level"] == n)]

    def _checks(self) -> list[Mapping[str, Any]]:
        checks = self.document.get("checks")
        rows = checks if isinstance(checks, list) else []
        return [
            {"level": "", "name": "", "status": "damaged", **row}
            for row in rows
            if isinstance(row, dict)
        ]

    def about(self, claim: Claim) -> bytes:
        """The document as it is attached: about the digest, without a path of this machine."""
        document = {**self.document, "target": claim.digest, "digests": [claim.digest]}
        if isinstance(verdict := document.get("verdict"), dict):
            document["verdict"] = {**verdict, "todo": []}  # commands about this machine's files
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def parse_evidence(data: bytes, origin: str) -> list[Evidence]:
    """What ``verify --json`` or ``image --json`` wrote.

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
        if not isinstance(report, dict) or not isinstance(report.get("checks"), list):
            raise UsageError(
                f"{origin} is not evidence from spark-build",
                hint="spark-build verify TARGET --json >evidence.json",
            )
        found.append(Evidence(document=report, origin=origin))
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
    """The first piece that proves the claim, or None with what every piece about it lacks."""
    reasons: list[str] = []
    for evidence in offered:
        lacking = evidence.lacks(claim, levels)
        if not lacking:
            return evidence, []
        reasons += lacking
    return None, list(dict.fromkeys(reasons))


def refuse_unproven(claim: Claim, reasons: Sequence[str]) -> SparkBuildError:
    """The error for an image that nothing proves (exit 5)."""
    listed = "\n  ".join(reasons[:8]) or "it was never verified"
    return SparkBuildError(
        f"{claim.digest} is not published, because it is not verified:\n  {listed}",
        Exit.VERIFY_FAILED,
        hint="verify it, or publish it marked as unverified with --force",
    )


def failed_evidence(claim: Claim, offered: Sequence[Evidence], reasons: Sequence[str]) -> Evidence:
    """What stands beside an image that was forced: the evidence there is, and what it lacks."""
    mine = [e for e in offered if e.is_of(claim)]
    document = dict(mine[0].document) if mine else {"schema": 1, "checks": []}
    document |= {
        "plan_digest": claim.plan.get("plan_digest", ""),
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
