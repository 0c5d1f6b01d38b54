"""The document of ``image``: what was built, or with --dry-run would be built."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from builder.common.document import Count, Digest, Document, Part, Seconds, Text, always
from builder.common.documents.plan import PlanDocument, State
from builder.images.engines.runcommands import RunBlock
from builder.proof.checks import Check
from builder.proof.report import ReportDocument, Verdict

Timings = Annotated[dict[str, Seconds], Meta(description="seconds by step")]
Plans = Annotated[tuple[PlanDocument, ...], Meta(min_length=1, description="one plan a platform")]


class BuiltLayer(Part, frozen=True, kw_only=True):
    """A layer of the plan."""

    name: Text
    state: State
    cached: Annotated[
        bool | None,
        Meta(
            description="of a layer that was applied: whether it was reused from an earlier build"
        ),
    ] = None


class PlatformLayer(BuiltLayer, frozen=True, kw_only=True):
    """A layer of the plan for one platform."""

    platform: Text


class NotVerified(Part, frozen=True, kw_only=True):
    """The placeholder for evidence that was not requested."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [{"properties": {"passed": {"const": False}, "checks": {"maxItems": 0}}}]
    }

    passed: bool = always(False)
    checks: tuple[Check, ...] = always(())
    not_run: Count = always(1)


class PlatformsVerified(Part, frozen=True, kw_only=True):
    """The evidence on each platform."""

    passed: bool
    checks: tuple[Check, ...]
    verdicts: Annotated[dict[str, Verdict], Meta(description="one a platform")]


class Built(Document, frozen=True, kw_only=True):
    """What was built."""

    plan_digest: Digest
    image: Text
    digest: Digest
    engine: Text
    added_bytes: Count
    timings: Timings
    run: RunBlock


class ImageDocument(Built, frozen=True, kw_only=True):
    """An image that was built."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [{"properties": {"overlay": {"const": True}}}]
    }

    layers: tuple[BuiltLayer, ...]
    overlay: Annotated[bool, Meta(description="only the changed files; cannot run alone")] = False


class VerifiedImage(ImageDocument, frozen=True, kw_only=True):
    """An image that was built and verified."""

    verify: ReportDocument


class UnverifiedImage(ImageDocument, frozen=True, kw_only=True):
    """An image that was built without verification."""

    verify: NotVerified


class IndexDocument(Built, frozen=True, kw_only=True):
    """An index that was built, with a plan for each entry."""

    plans: Plans
    layers: tuple[PlatformLayer, ...]
    verify: PlatformsVerified


class IndexPlans(Document, frozen=True, kw_only=True):
    """The plans of an index, with --dry-run."""

    plan_digest: Digest
    plans: Plans
    timings: Timings


class DockerfileText(Document, frozen=True, kw_only=True):
    """The document of ``image --print-dockerfile``."""

    plan_digest: Digest
    dockerfile: Text
