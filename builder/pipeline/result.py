"""The result of a build: the image, its evidence, and the commands to run it."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from msgspec.structs import asdict

from builder.applier.digests import canonical_json, sha256_hex
from builder.errors import Exit, SparkBuildError
from builder.pipeline.documents import (
    Built,
    BuiltLayer,
    IndexDocument,
    NotVerified,
    PlatformLayer,
    PlatformsVerified,
    UnverifiedImage,
    VerifiedImage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.common.documents.plan import State
    from builder.common.model.plan import BuildPlan
    from builder.images.engines.model import BuiltImage
    from builder.images.engines.runcommands import RunCommands
    from builder.images.rootfs.base import Base
    from builder.pipeline.inputs import Planning
    from builder.proof.report import Report


@dataclass(frozen=True)
class PlatformPlan:
    """One platform's open base, and its plan."""

    platform: str
    planning: Planning
    plan: BuildPlan

    @property
    def base(self) -> Base:
        """The open base."""
        return self.planning.base


def plans_digest(entries: Sequence[PlatformPlan]) -> str:
    """One digest for all plans of an index."""
    plans = [[entry.platform, entry.plan.digest] for entry in entries]
    return f"sha256:{sha256_hex(canonical_json(plans))}"


def _layers(entry: PlatformPlan, built: BuiltImage) -> Iterator[BuiltLayer]:
    """Name and state of each layer, and whether an applied one came from the cache."""
    platform = entry.plan.base.platform.oci
    for decision in entry.plan.decisions:
        state = cast("State", decision.outcome.state)
        cached = built.cached.get((platform, decision.name))
        yield BuiltLayer(name=decision.name, state=state, cached=cached)


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A built image or index, and the evidence for each platform.

    ``reports`` is empty without verification.
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
        """Whether every platform was verified and passed."""
        return bool(self.reports) and not self.failed

    def document(self) -> VerifiedImage | UnverifiedImage | IndexDocument:
        """The document of ``image --json``."""
        plan = self.entries[0].plan
        image = Built(
            plan_digest=plans_digest(self.entries) if self.is_index else plan.digest,
            image=self.built.ref.text,
            digest=self.built.digest,
            engine=self.built.engine,
            added_bytes=self.built.added_bytes,
            timings={name: round(seconds, 3) for name, seconds in self.timings.items()},
            run=self.started.block,
        )
        common = asdict(image)
        if self.is_index:
            return IndexDocument(
                **common,
                plans=tuple(entry.plan.document for entry in self.entries),
                layers=tuple(
                    PlatformLayer(**asdict(layer), platform=entry.platform)
                    for entry in self.entries
                    for layer in _layers(entry, self.built)
                ),
                verify=self._platforms(),
            )
        overlay = plan.base.is_wheels
        layers = tuple(_layers(self.entries[0], self.built))
        if not self.reports:
            return UnverifiedImage(**common, layers=layers, overlay=overlay, verify=NotVerified())
        report = self.reports[0].document()
        return VerifiedImage(**common, layers=layers, overlay=overlay, verify=report)

    def _platforms(self) -> PlatformsVerified:
        pairs = zip(self.entries, self.reports, strict=False)
        return PlatformsVerified(
            passed=self.passed,
            checks=tuple(check for report in self.reports for check in report.checks),
            verdicts={entry.platform: report.verdict() for entry, report in pairs},
        )

    def refuse_failed(self) -> None:
        """Raise if verification failed.

        Raises:
            SparkBuildError: that; the image exists (exit 5).
        """
        if not self.failed:
            return
        if self.is_index:
            names = [report.target for report in self.failed]
            message = f"verification failed for {', '.join(names)}"
            target = names[0]
        else:
            checks = self.failed[0].of("fail")
            message = "verification failed: " + "; ".join(
                f"{check.name}: expected {check.expected!r}, seen {check.seen!r}"
                for check in checks
            )
            target = self.built.subject.text
        raise SparkBuildError(
            f"{self.built.pinned} was built, but {message}",
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {shlex.quote(target)}",
        )


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of a successful block to its step."""
    began = time.monotonic()
    yield
    timings[name] = timings.get(name, 0.0) + time.monotonic() - began
