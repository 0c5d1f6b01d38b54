"""What came of a build: the image, the evidence on it, and how it is started."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.digests import canonical_json, sha256_hex
from builder.errors import Exit, SparkBuildError
from builder.util.documents import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.bases.model import Base
    from builder.engines.model import BuiltImage
    from builder.engines.runcommands import RunCommands
    from builder.model import BuildPlan
    from builder.verify.model import Report


@dataclass(frozen=True)
class PlatformPlan:
    """One platform's base, still open, and the plan for it."""

    platform: str
    base: Base
    plan: BuildPlan


def plans_digest(entries: Sequence[PlatformPlan]) -> str:
    """One digest for all plans of an index."""
    plans = [[entry.platform, entry.plan.digest] for entry in entries]
    return f"sha256:{sha256_hex(canonical_json(plans))}"


def layer_rows(plan: BuildPlan, built: BuiltImage) -> list[dict[str, Any]]:
    """Name and state of each layer; of one that was applied, whether it was made anew."""
    rows: list[dict[str, Any]] = []
    for decision in plan.decisions:
        row: dict[str, Any] = {"name": decision.name, "state": decision.outcome.state}
        cached = built.cached.get((plan.base.platform.oci, decision.name))
        rows.append(row if cached is None else {**row, "cached": cached})
    return rows


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """An image or index that was built, and the evidence on each of its platforms.

    ``reports`` is empty where verification was not asked for.
    """

    entries: tuple[PlatformPlan, ...]
    built: BuiltImage
    reports: tuple[Report, ...]
    #: seconds by step
    timings: Mapping[str, float]
    started: RunCommands
    is_index: bool = False

    @property
    def failed(self) -> list[Report]:
        """Reports of platforms that did not pass."""
        return [report for report in self.reports if not report.passed()]

    @property
    def passed(self) -> bool:
        """Every platform was verified, and passed."""
        return bool(self.reports) and not self.failed

    def as_json(self) -> dict[str, Any]:
        """The document of ``image --json``."""
        image = {
            "image": self.built.ref,
            "digest": self.built.digest,
            "engine": self.built.engine,
            "added_bytes": self.built.added_bytes,
            "timings": {name: round(seconds, 3) for name, seconds in self.timings.items()},
            "run": self.started.as_json(),
        }
        if self.is_index:
            return {"schema": 1, **self._index_json(), **image}
        plan = self.entries[0].plan
        value = {
            "schema": 1,
            "plan_digest": plan.digest,
            **image,
            "layers": layer_rows(plan, self.built),
            "verify": plain(self.reports[0].document())
            if self.reports
            else {"passed": False, "checks": [], "not_run": 1},
        }
        return {**value, "overlay": True} if plan.base.kind == "pypi" else value

    def _index_json(self) -> dict[str, Any]:
        verdicts = {
            entry.platform: plain(report.verdict())
            for entry, report in zip(self.entries, self.reports, strict=False)
        }
        return {
            "plan_digest": plans_digest(self.entries),
            "plans": [entry.plan.as_json() for entry in self.entries],
            "layers": [
                {**row, "platform": entry.platform}
                for entry in self.entries
                for row in layer_rows(entry.plan, self.built)
            ],
            "verify": {
                "passed": self.passed,
                "checks": [plain(c) for report in self.reports for c in report.checks],
                "verdicts": verdicts,
            },
        }

    def refuse_failed(self) -> None:
        """Raise where verification failed.

        Raises:
            SparkBuildError: that; the image exists (exit 5).
        """
        if not self.failed:
            return
        if self.is_index:
            names = [report.target for report in self.failed]
            said = f"verification failed for {', '.join(names)}"
            target = names[0]
        else:
            checks = self.failed[0].of("fail")
            said = "verification failed: " + "; ".join(
                f"{check.name}: expected {check.expected!r}, seen {check.seen!r}"
                for check in checks
            )
            target = self.built.target or self.built.ref
        raise SparkBuildError(
            f"{self.built.pinned} was built, but {said}",
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {shlex.quote(target)}",
        )
