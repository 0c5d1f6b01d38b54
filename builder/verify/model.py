"""What verification says: a check and its evidence, a report, and the target that it is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from builder.verify.verdict import verdict_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.verify.launches import Replies
    from builder.verify.necessity import Necessity
    from builder.verify.parts import Parts
    from builder.verify.unrecorded import Unrecorded
    from builder.verify.verdict import Verdict

SCHEMA = 1
Status = Literal["pass", "fail", "not-run"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its evidence."""

    level: str
    name: str
    status: Status
    expected: str
    seen: str
    where: str = ""
    reason: str = ""
    #: not run because there is nothing to check in this target, not because it could not run
    moot: bool = False
    #: parts that were simulated, for levels that simulate
    simulated: tuple[str, ...] = ()
    #: numbers worth drawing, such as instruction counts by mnemonic
    figures: Mapping[str, float] = field(default_factory=dict)
    #: of a pass that is vLLM's refusal, as expected: what it means to a user
    refusal: str = ""
    #: files that no RECORD and no receipt speaks of
    unrecorded: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether it had nothing to do; a line to expect is what ``dispatch`` cannot do without."""
        return self.moot and self.level != "dispatch"

    def as_json(self) -> dict[str, Any]:
        """The check in the evidence."""
        value: dict[str, Any] = {
            "level": self.level,
            "name": self.name,
            "status": self.status,
            "expected": self.expected,
            "seen": self.seen,
            "where": self.where,
            "reason": self.reason,
        }
        if self.moot:
            value["moot"] = True
        if self.simulated:
            value["simulated"] = list(self.simulated)
        if self.figures:
            value["figures"] = dict(self.figures)
        if self.refusal:
            value["refusal"] = self.refusal
        if self.unrecorded:
            value["unrecorded"] = list(self.unrecorded)
        return value


@dataclass(kw_only=True)
class Report:
    """All checks of one verification."""

    target: str
    plan_digest: str
    #: digests of the image that was verified, under every name; none for what is no image
    digests: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)
    #: a verdict on each layer, where it was asked for
    necessity: list[Necessity] | None = None
    #: the plan that the target was held against
    plan: Mapping[str, Any] = field(default_factory=dict)

    def of(self, status: Status) -> list[Check]:
        """Checks with that status."""
        return [check for check in self.checks if check.status == status]

    def counts(self) -> list[str]:
        """Checks by what came of them, in words: ``19 pass``, ``1 expected refusal``."""
        refused = sum(bool(check.refusal) for check in self.checks)
        also = [f"{refused} expected refusal{'s' if refused > 1 else ''}"] if refused else []
        good, bad, idle = (len(self.of(status)) for status in ("pass", "fail", "not-run"))
        return [f"{good - refused} pass", *also, f"{bad} fail", f"{idle} not run"]

    def passed(self, require: Sequence[str] = ()) -> bool:
        """No check failed, at least one passed, and none of a required level was left out."""
        skipped = [c for c in self.of("not-run") if c.level in require and not c.idle]
        ran = {check.level for check in self.checks}
        absent = [level for level in require if level not in ran]
        return bool(self.of("pass")) and not self.of("fail") and not skipped and not absent

    def verdict(self, require: Sequence[str] = ()) -> Verdict:
        """What it says as a whole; ``require`` are the levels that had to run."""
        return verdict_of(self, self.plan, require)

    def as_json(self, require: Sequence[str] = ()) -> dict[str, Any]:
        """The evidence."""
        value = {
            "schema": SCHEMA,
            "target": self.target,
            "digests": list(self.digests),
            "plan_digest": self.plan_digest,
            "passed": self.passed(require),
            "not_run": len(self.of("not-run")),
            "verdict": self.verdict(require).as_json(),
            "checks": [check.as_json() for check in self.checks],
        }
        if self.necessity is not None:
            value["necessity"] = [verdict.as_json() for verdict in self.necessity]
        return value


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """What is verified: files, what they should be, and how its vLLM can be asked.

    ``ask`` runs the dispatch probe with a request and gives its result; None means that it cannot
    run here, and ``cannot_ask`` says why and which command would.
    """

    name: str
    kind: str
    plan: Mapping[str, Any]
    #: rendered layers in order of application, whatever their state
    layers: Sequence[Mapping[str, Any]]
    tree: Tree
    env: Mapping[str, str]
    #: the target's own variables, before those the plan sets
    ask: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    cannot_ask: str = ""
    #: absolute paths that an overlay lays over its base; receipts and the plan explain each
    brought: tuple[str, ...] = ()
    #: digests of manifest and configuration, where this is an image
    digests: tuple[str, ...] = ()
    #: runs the codegen probe with a request; None means that nothing here can compile
    compile: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    #: launches kernels and runs them without a device; None means that nothing here can
    launch: Callable[[Mapping[str, Any]], Replies] | None = None
    #: runs the in-image verifier's level where it may find a GPU, and gives its document
    on_gpu: Callable[[str], Mapping[str, Any]] | None = None
    #: what ``docker run`` knows it by, where that is not its name
    runs_as: str = ""
    cannot_use_gpu: str = "only an image, or an environment of this machine, can run on a GPU"
    close: Callable[[], None] = lambda: None
    #: the digest that the image's label gives the plan baked into it ("" where it has no such
    #: label); None for a plan that was made just now
    label: str | None = None
    #: takes the target apart; None where nothing says what it is made of
    parts: Callable[[], Parts] | None = None
    #: looks for what nobody recorded; None where only the files that are checked are at hand
    unrecorded: Callable[[], Unrecorded] | None = None


class Listener(Protocol):
    """Hears of a verification while it runs."""

    def __call__(self, check: Check) -> None:
        """One more check, of the level that runs."""

    def end(self) -> None:
        """Of this level there is nothing more to come."""
