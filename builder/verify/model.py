"""The values of verification: a check with its evidence, a report, and the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from msgspec import Meta

from builder.documents.plan import State
from builder.util.documents import Count, Digest, Document, Part, Text, always
from builder.verify.levels import Level
from builder.verify.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.documents.plan import PlanDocument
    from builder.verify.launches import Replies
    from builder.verify.parts import Parts
    from builder.verify.replies import CodegenReply, CodegenRequest, DispatchReply, DispatchRequest
    from builder.verify.unrecorded import Unrecorded

Status = Literal["pass", "fail", "not-run"]


def _status_rule(given: dict[str, Any], status: Status) -> dict[str, Any]:
    return {"if": given, "then": {"properties": {"status": {"const": status}}}}


class Check(Part, frozen=True, kw_only=True):
    """One check and its evidence."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [
            _status_rule({"required": ["moot"]}, "not-run"),
            _status_rule({"required": ["refusal"]}, "pass"),
            {"properties": {"moot": {"const": True}}},
            {
                "if": {"properties": {"status": {"const": "not-run"}}},
                "then": {"properties": {"reason": {"minLength": 1}}},
            },
        ]
    }

    level: Level
    name: Annotated[Text, Meta(description="unique within its level")]
    status: Annotated[Status, Meta(description="a check that could not run is never a pass")]
    expected: str
    seen: str
    where: Annotated[str, Meta(description="a file, a log, a compiler")] = always("")
    reason: str = always("")
    moot: Annotated[
        bool,
        Meta(
            description="not run because there is nothing to check in this target, "
            "not because it could not run"
        ),
    ] = False
    simulated: Annotated[tuple[Text, ...], Meta(description="simulated parts")] = ()
    figures: Annotated[
        Mapping[str, int | float],
        Meta(description="numbers worth drawing, such as instruction counts by name"),
    ] = {}
    refusal: Annotated[
        Text,
        Meta(
            description="of a pass that is vLLM's refusal, as expected: which models will not start"
        ),
    ] = ""
    unrecorded: Annotated[
        tuple[Text, ...],
        Meta(
            min_length=1,
            description="of startup hooks: files that no RECORD and no receipt speaks of, "
            "below site-packages or absolute; a folder ends with /",
        ),
    ] = ()

    @property
    def idle(self) -> bool:
        """Whether it had nothing to check; ``dispatch`` always needs an expected line."""
        return self.moot and self.level != "dispatch"


class Necessity(Part, frozen=True, kw_only=True):
    """Whether a layer is necessary, and the check that fails without it."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "if": {"properties": {"necessary": {"const": True}}},
        "then": {"properties": {key: {"minLength": 1} for key in ("check", "level", "seen")}},
        "else": {
            "properties": {
                "check": {"const": ""},
                "level": {"const": ""},
                "reason": {"minLength": 1},
            }
        },
    }

    layer: Text
    state: Annotated[State, Meta(description="the layer's state in the plan")]
    necessary: Annotated[
        bool | Literal["unknown"],
        Meta(description="unknown: a level that could tell did not run"),
    ]
    check: Annotated[
        str,
        Meta(description="the check that fails without the layer; empty unless it is necessary"),
    ] = always("")
    level: Level | Literal[""] = always("")
    expected: str = always("")
    seen: str = always("")
    where: str = always("")
    reason: str
    also: Annotated[
        tuple[Text, ...], Meta(description="other checks of that level that fail without it")
    ] = always(())

    @classmethod
    def by(cls, layer: str, state: State, failed: Check, also: Sequence[Check] = ()) -> Necessity:
        """The result for a layer without which checks fail."""
        return cls(
            layer=layer,
            state=state,
            necessary=True,
            check=failed.name,
            level=failed.level,
            expected=failed.expected,
            seen=failed.seen,
            where=failed.where,
            reason=failed.reason,
            also=tuple(check.name for check in also),
        )


class ReportDocument(Document, frozen=True, kw_only=True):
    """The evidence of one verification."""

    target: Text
    digests: Annotated[
        tuple[Digest, ...],
        Meta(description="of the verified image, under every name; none if it is not an image"),
    ]
    plan_digest: Digest
    passed: Annotated[
        bool,
        Meta(
            description="no check failed, at least one passed, and no required level was left out"
        ),
    ]
    not_run: Count
    verdict: Verdict
    checks: tuple[Check, ...]
    necessity: Annotated[
        tuple[Necessity, ...] | None,
        Meta(
            description="a verdict on each layer, in order of application; "
            "only when it was asked for"
        ),
    ] = None


class VerifierDocument(Document, frozen=True, kw_only=True):
    """What the verifier in an image found there."""

    plan_digest: Digest
    passed: Annotated[
        bool,
        Meta(description="no check failed, at least one passed, and every named level ran"),
    ]
    checks: tuple[Check, ...]


@dataclass(kw_only=True)
class Report:
    """All checks of one verification."""

    target: str
    #: the plan that the target was compared with
    plan: PlanDocument
    #: all digests of the verified image; empty if it is not an image
    digests: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)
    #: the necessity of each layer, if requested
    necessity: list[Necessity] | None = None

    def of(self, status: Status) -> list[Check]:
        """Checks with a status."""
        return [check for check in self.checks if check.status == status]

    def counts(self) -> list[str]:
        """Numbers of checks by result, as text: ``19 pass``, ``1 expected refusal``."""
        refused = sum(bool(check.refusal) for check in self.checks)
        also = [f"{refused} expected refusal{'s' if refused > 1 else ''}"] if refused else []
        good, bad, idle = (len(self.of(status)) for status in ("pass", "fail", "not-run"))
        return [f"{good - refused} pass", *also, f"{bad} fail", f"{idle} not run"]

    def passed(self, require: Sequence[str] = ()) -> bool:
        """Whether no check failed, at least one passed, and all required levels ran."""
        skipped = [c for c in self.of("not-run") if c.level in require and not c.idle]
        ran = {check.level for check in self.checks}
        absent = [level for level in require if level not in ran]
        return bool(self.of("pass")) and not self.of("fail") and not skipped and not absent

    def verdict(self, require: Sequence[str] = ()) -> Verdict:
        """The overall verdict; ``require`` are the levels that must run."""
        return verdict_of(self, require)

    def document(self, require: Sequence[str] = ()) -> ReportDocument:
        """The evidence."""
        return ReportDocument(
            target=self.target,
            digests=self.digests,
            plan_digest=self.plan.plan_digest,
            passed=self.passed(require),
            not_run=len(self.of("not-run")),
            verdict=self.verdict(require),
            checks=tuple(self.checks),
            necessity=None if self.necessity is None else tuple(self.necessity),
        )


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """A verification target: files, their expected state, and how to query its vLLM.

    ``ask`` runs the dispatch probe with a request and returns its result; None means that it cannot
    run here, and ``cannot_ask`` gives the reason and a command that works.
    """

    name: str
    kind: str
    plan: PlanDocument
    #: rendered layers in order of application, in any state
    layers: Sequence[Layer]
    tree: Tree
    env: Mapping[str, str]
    #: the target's own variables, without those of the plan
    ask: Callable[[DispatchRequest], DispatchReply] | None
    cannot_ask: str = ""
    #: absolute paths that an overlay adds to its base; receipts and the plan explain each
    brought: tuple[str, ...] = ()
    #: digests of manifest and configuration, for an image
    digests: tuple[str, ...] = ()
    #: runs the codegen probe with a request; None means that no compiler is available
    compile: Callable[[CodegenRequest], CodegenReply] | None = None
    #: launches kernels and runs them without a device; None means that this is not possible here
    launch: Callable[[Mapping[str, Any]], Replies] | None = None
    #: runs a level of the in-image verifier where it may find a GPU; returns its document
    on_gpu: Callable[[str], VerifierDocument] | None = None
    #: its name for ``docker run``, if different
    runs_as: str = ""
    cannot_use_gpu: str = "only an image, or an environment of this machine, can run on a GPU"
    close: Callable[[], None] = lambda: None
    #: the plan digest in the image's label ("" without such a
    #: label); None for a new plan
    label: str | None = None
    #: for a baked-in plan: its recomputed digest
    recomputed: str = ""
    #: splits the target into its parts; None if they are unknown
    parts: Callable[[], Parts] | None = None
    #: finds unrecorded files; None if only the checked files are available
    unrecorded: Callable[[], Unrecorded] | None = None

    @property
    def asked_in_itself(self) -> bool:
        """Whether its own interpreter runs in a container, instead of a sandbox."""
        return self.kind == "image"

    @property
    def whole_here(self) -> bool:
        """Whether all its files are local, so that reading them needs no download."""
        return self.kind in ("dir", "image")


class Listener(Protocol):
    """Is called during a verification."""

    def __call__(self, check: Check) -> None:
        """A new check of the current level."""

    def end(self) -> None:
        """The end of a level."""
