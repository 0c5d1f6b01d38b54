"""Asks a release which kernels it selects, for a record."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from builder.applier.values import all_match
from builder.common.document import read
from builder.errors import Exit, SparkBuildError
from builder.probes.dispatch_expect import backends
from builder.proof.checks import KINDS
from builder.proof.recorded import (
    Alone,
    AskedBase,
    Outcome,
    Record,
    WithProfile,
    decides,
    inputs_digest,
    setting,
)
from builder.proof.replies import Ask, DispatchRequest, machine_cause
from builder.proof.target import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from builder.common.plan import BuildPlan, State
    from builder.images.subject import Subject
    from builder.layers.catalog import Catalog, Selection
    from builder.layers.pinned import IndexSources
    from builder.proof.replies import DispatchReply


@dataclass(frozen=True, kw_only=True)
class RecordInputs:
    """Inputs of a record besides the release."""

    catalog: Catalog
    sources: IndexSources
    #: a release's wheels as a base
    identify: Callable[[str, Selection], Subject]


def record_of(release: str, asking: RecordInputs) -> Record:
    """The record of a release: by default, with every choice, and with each profile.

    Raises:
        SparkBuildError: the release cannot be queried here.
    """
    from builder.layers.planner import make_plan

    names = list(asking.catalog.profile_files)
    selection = asking.catalog.select(names[:1])
    with closing(asking.identify(release, selection)) as base:
        asked = _base(base)
        alone = by_itself(make_plan(base, selection, asking.sources), base)
    simulated = dict.fromkeys(alone.simulated)
    profiles: dict[str, WithProfile] = {}
    for name in names:
        selection = asking.catalog.select([name])
        with closing(asking.identify(release, selection)) as base:
            profiles[name], parts = _with_profile(base, selection, asking)
        simulated.update(dict.fromkeys(parts))
    return Record(
        vllm=release,
        base=asked,
        default=alone.default,
        choices=alone.choices,
        real=alone.real,
        simulated=tuple(simulated),
        profiles=profiles,
    )


def _base(base: Subject) -> AskedBase:
    identity = base.identity
    return AskedBase(
        platform=identity.platform.oci, digest=identity.digest, packages=dict(identity.packages)
    )


def by_itself(plan: BuildPlan, base: Subject) -> Alone:
    """Kernels of an unpatched base, by default and with each of its choices.

    Raises:
        SparkBuildError: it cannot be queried here.
    """
    request = DispatchRequest(ask=tuple(Ask(kind=kind) for kind in KINDS), choices=tuple(KINDS))
    reply = _ask(plan, base, request)
    choices: dict[str, dict[str, str | Outcome]] = {kind: {} for kind in KINDS}
    for answer in reply.choices:
        outcome = Outcome.of(answer)  # a kernel as its name alone: there are a hundred choices
        choices[answer.kind][setting(answer.request)] = outcome.selected or outcome
    return Alone(
        default={answer.kind: Outcome.of(answer) for answer in reply.answers},
        choices=choices,
        real=reply.real,
        simulated=reply.simulated,
    )


def _with_profile(
    base: Subject, selection: Selection, asking: RecordInputs
) -> tuple[WithProfile, Sequence[str]]:
    """Kernels that a release selects with a profile, and the simulated parts."""
    inputs = inputs_digest(selection)
    for profile in selection.profiles:
        if not all_match(profile.needs, base.identity.packages):
            return WithProfile(inputs=inputs, not_served=profile.needs_reason), ()
    from builder.layers.planner import make_plan

    plan = make_plan(base, selection, asking.sources)
    flags = (*plan.serve_flags, *plan.moe_serve_flags)
    asks = tuple(read({"kind": kind, **backends(flags, kind)}, Ask) for kind in KINDS)
    reply = _ask(plan, base, DispatchRequest(env={**plan.env}, ask=asks), patched=True)
    states = {d.name: d.outcome.state for d in plan.decisions if decides(d.layer)}
    row = WithProfile(
        inputs=inputs,
        layers=cast("dict[str, State]", states),
        env=dict(plan.env),
        flags=flags,
        kinds={answer.kind: Outcome.of(answer) for answer in reply.answers},
    )
    return row, reply.simulated


def _ask(
    plan: BuildPlan, base: Subject, request: DispatchRequest, *, patched: bool = False
) -> DispatchReply:
    from builder.proof.opening import target_of_plan

    target = target_of_plan(plan, base, base.identity.ref, patched=patched)
    reply = target.runner.dispatch(request)
    if isinstance(reply, Refusal):
        raise SparkBuildError(f"{target.name}: {reply.reason}", hint=reply.command)
    errors = (reply.fatal, *(one.error for one in (*reply.answers, *reply.choices)))
    if cause := next(filter(None, map(machine_cause, errors)), ""):
        raise SparkBuildError(f"{target.name}: {cause}")
    if reply.fatal:
        raise SparkBuildError(
            f"{target.name}: vllm cannot be imported: {reply.fatal}", Exit.VERIFY_FAILED
        )
    return reply
