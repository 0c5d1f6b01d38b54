"""Verification: what was expected, what was seen, where; pass, fail, or not run and why.

A check that could not run is never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.runtime.spark_apply import Tree

SCHEMA = 1
#: Levels that this version has, cheapest first.
LEVELS = ("static", "imports", "dispatch", "codegen")
#: Those that run when none is named: ``codegen`` downloads a CuTe DSL and takes half a minute.
DEFAULT_LEVELS = ("static", "imports", "dispatch")

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
    #: parts that were simulated, for levels that simulate
    simulated: tuple[str, ...] = ()
    #: numbers worth drawing, such as instruction counts by mnemonic
    figures: Mapping[str, int] = field(default_factory=dict)

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
    checks: list[Check] = field(default_factory=list)

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
        return {
            "schema": SCHEMA,
            "target": self.target,
            "plan_digest": self.plan_digest,
            "passed": self.passed(require),
            "not_run": len(self.of("not-run")),
            "checks": [check.as_json() for check in self.checks],
        }


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """What is verified: files, what they should be, and how its vLLM can be asked.

    ``ask`` runs the dispatch probe with a request and gives its result; None means that it cannot
    run here, and ``cannot_ask`` says why and which command would.
    """

    name: str
    kind: str
    plan: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    tree: Tree
    env: Mapping[str, str]
    #: the target's own variables, before those the plan sets
    ask: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    cannot_ask: str = ""
    #: absolute paths that an overlay lays over its base; receipts and the plan explain each
    brought: tuple[str, ...] = ()
    #: runs the codegen probe with a request; None means that nothing here can compile
    compile: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    close: Callable[[], None] = lambda: None


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
    from builder.verify.codegen import check_codegen
    from builder.verify.dispatch import check_dispatch
    from builder.verify.imports import check_imports
    from builder.verify.static import check_static

    report = Report(target=target.name, plan_digest=str(target.plan["plan_digest"]))
    runners = {
        "static": check_static,
        "imports": check_imports,
        "dispatch": check_dispatch,
        "codegen": check_codegen,
    }
    for level in levels:
        report.checks.extend(runners[level](target))
    return report
