"""Verification: what was expected, what was seen, where; pass, fail, or not run and why.

A check that could not run is never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.runtime.spark_apply import Tree
    from builder.verify.necessity import Necessity
    from builder.verify.parts import Parts

SCHEMA = 1
#: Levels that this version has, cheapest first.
LEVELS = ("static", "imports", "dispatch", "codegen", "binaries", "device", "serve")
#: Those that run when none is named: ``codegen`` downloads a CuTe DSL and takes half a minute,
#: ``binaries`` reads tens of megabytes of extension modules, ``device`` and ``serve`` need a GPU.
DEFAULT_LEVELS = ("static", "imports", "dispatch")
#: Those that can show a layer to be necessary, and run by default when that is asked for.
PROOF_LEVELS = ("static", "imports", "dispatch", "codegen")

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

    def of(self, status: Status) -> list[Check]:
        """Checks with that status."""
        return [check for check in self.checks if check.status == status]

    def passed(self, require: Sequence[str] = ()) -> bool:
        """No check failed, at least one passed, and none of a required level was left out."""
        skipped = [c for c in self.of("not-run") if c.level in require]
        ran = {check.level for check in self.checks}
        absent = [level for level in require if level not in ran]
        return bool(self.of("pass")) and not self.of("fail") and not skipped and not absent

    def as_json(self, require: Sequence[str] = ()) -> dict[str, Any]:
        """The evidence."""
        value = {
            "schema": SCHEMA,
            "target": self.target,
            "digests": list(self.digests),
            "plan_digest": self.plan_digest,
            "passed": self.passed(require),
            "not_run": len(self.of("not-run")),
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
    #: runs the in-image verifier's level where it may find a GPU, and gives its document
    on_gpu: Callable[[str], Mapping[str, Any]] | None = None
    cannot_use_gpu: str = "only an image, or an environment of this machine, can run on a GPU"
    close: Callable[[], None] = lambda: None
    #: the digest that the image's label gives the plan baked into it ("" where it has no such
    #: label); None for a plan that was made just now
    label: str | None = None
    #: takes the target apart; None where nothing says what it is made of
    parts: Callable[[], Parts] | None = None


def parse_levels(words: Sequence[str], default: Sequence[str] = DEFAULT_LEVELS) -> tuple[str, ...]:
    """``--level`` values, in order of cost.

    Raises:
        UsageError: a level is unknown.
    """
    chosen = {word for item in words for word in map(str.strip, item.split(",")) if word}
    for word in chosen:
        if word not in LEVELS:
            raise UsageError(
                f"unknown verification level {word!r}{did_you_mean(word, LEVELS)}",
                hint=f"levels: {', '.join(LEVELS)}",
            )
    return tuple(level for level in LEVELS if level in (chosen or set(default)))


def verify(target: VerifyTarget, levels: Sequence[str]) -> Report:
    """Run the levels and collect the evidence."""
    from builder.verify.binaries import check_binaries
    from builder.verify.codegen import check_codegen
    from builder.verify.dispatch import check_dispatch
    from builder.verify.imports import check_imports
    from builder.verify.ongpu import check_on_gpu
    from builder.verify.static import check_static

    report = Report(
        target=target.name, plan_digest=str(target.plan["plan_digest"]), digests=target.digests
    )
    runners: dict[str, Callable[[VerifyTarget], Iterable[Check]]] = {
        "static": check_static,
        "imports": check_imports,
        "dispatch": check_dispatch,
        "codegen": check_codegen,
        "binaries": check_binaries,
        "device": lambda target: check_on_gpu(target, "device"),
        "serve": lambda target: check_on_gpu(target, "serve"),
    }
    for level in levels:
        report.checks.extend(runners[level](target))
    return report
