"""Makes a plan from a base and a selection: judges each layer after the layers before it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from builder import settings
from builder.applier.judging import judge_in_order
from builder.applier.states import (
    AMBIGUOUS,
    APPLIED,
    DRIFT,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    UPSTREAM,
)
from builder.applier.values import all_match
from builder.common.plan import BuildPlan, LayerDecision
from builder.compile.host import where_to_compile
from builder.compile.known import compile_ops, estimate_of
from builder.errors import Exit, NotServed, SparkBuildError, UsageError
from builder.images.engines.maker import maker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.applier.judging import Step
    from builder.applier.layers import Layer
    from builder.applier.sources import Sources
    from builder.common.plan import BaseIdentity
    from builder.images.subject import Subject
    from builder.layers.catalog import Selection


#: Limit of timestamps, about the year 9999.
_SECONDS = re.compile("[0-9]{1,11}")


def make_plan(
    base: Subject,
    selection: Selection,
    sources: Sources,
    *,
    epoch: int | None = None,
    single_layer: bool = False,
    steps: Iterable[Step] | None = None,
) -> BuildPlan:
    """Judge every layer; writes nothing and refuses no layer.

    ``epoch`` is the image's timestamp, by default from :func:`epoch_for`; ``steps`` are how the
    layers were judged, if that is known.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest.
        UsageError: ``SOURCE_DATE_EPOCH`` is not a time.
    """
    identity = base.identity
    if steps is None:
        steps = judge_in_order(
            selection.layers, base.tree, sources, identity.platform.target, identity.env
        )
    decisions = [
        LayerDecision(layer=s.layer, outcome=s.outcome, receipt=s.receipt, changes=s.changes)
        for s in steps
    ]
    return BuildPlan(
        name=selection.name,
        profiles=tuple(p.name for p in selection.profiles),
        base=identity,
        decisions=tuple(decisions),
        expect=selection.expected(identity.packages),
        maker=maker(),
        epoch=epoch_for(identity, selection.layers) if epoch is None else epoch,
        single_layer=single_layer,
        mends=frozenset(name for profile in selection.profiles for name in profile.mends),
        hints=tuple(hints(selection, decisions, identity.packages)),
    )


def epoch_for(base: BaseIdentity, layers: Iterable[Layer]) -> int:
    """The timestamp of every file and of the image, in seconds since 1970: never the current time.

    ``SOURCE_DATE_EPOCH`` if set, else the base's creation time, else the newest layer's
    ``last-update``.

    Raises:
        UsageError: ``SOURCE_DATE_EPOCH`` is not a time.
    """
    named = settings.EPOCH.value
    if named:
        if not _SECONDS.fullmatch(named):
            raise UsageError(
                f"SOURCE_DATE_EPOCH is {named!r}, not a number of seconds since 1970",
                hint="export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)",
            )
        return int(named)
    try:
        moment = datetime.fromisoformat(f"{base.created[:19]}+00:00")
    except ValueError:
        moment = datetime.min.replace(tzinfo=UTC)
    if moment.year > 1980:
        return int(moment.timestamp())
    days = [str(layer.provenance["last-update"]) for layer in layers]
    newest = max(days, default="1980-01-01")
    return int(datetime.fromisoformat(f"{newest}T00:00:00+00:00").timestamp())


def hints(
    selection: Selection, decisions: list[LayerDecision], packages: Mapping[str, str]
) -> list[str]:
    """Hints for the user, such as that no file is patched."""
    if any(d.outcome.state in (NEEDS_REBUILD, APPLIED) for d in decisions):
        return []
    if any(d.needed and (d.outcome.changes or d.outcome.pending) for d in decisions):
        return []
    return [
        f"vllm {packages.get('vllm')} needs no patch for {profile.name}, only settings"
        for profile in selection.profiles
        if profile.layers
    ]


def refuse_plan(plan: BuildPlan, command: str = "") -> None:
    """Raise if a plan cannot be built, naming every layer that prevents it.

    Args:
        plan: the plan.
        command: the command line that would build it with a compile stage.

    Raises:
        SparkBuildError: a layer drifted, is ambiguous, or needs a rebuild (exit 4 or 10).
    """
    stuck = [d for d in plan.decisions if d.outcome.state in (DRIFT, AMBIGUOUS)]
    if stuck:
        lines = [f"layer {d.name}: {d.outcome.state}: {d.outcome.reason}" for d in stuck]
        named = {pull.layer: pull.request for pull in plan.pulls}
        hint = f"spark-build layers show {stuck[0].name}"
        if stuck[0].name in named:
            lines.append("adapt the pull request in a layer of your own")
            hint = f"spark-build layers new NAME --from-pr '{named[stuck[0].name]}'"
        raise SparkBuildError("\n  ".join(lines), Exit.DRIFT, hint=hint)
    rebuild = [d for d in plan.decisions if d.outcome.state == NEEDS_REBUILD]
    if rebuild:
        names = ", ".join(d.name for d in rebuild)
        lines = [f"{names}: the base is prebuilt, and this layer changes compiled code"]
        for decision in rebuild:
            lines.append(f"layer {decision.name}: {decision.outcome.reason}")
            lines += [f"note: {note}" for note in decision.outcome.notes]
        changes = [op.change_name for d in rebuild for op in compile_ops(d.layer)]
        hint = ""
        if all(_may_compile(d) for d in rebuild):
            lines += [f"compiling {name}: {estimate_of(name)}" for name in dict.fromkeys(changes)]
            hint = command or "spark-build image --compile"
            if where := where_to_compile(plan.base.platform.oci):
                lines.append(f"compile {where}")
        raise SparkBuildError("\n  ".join(lines), Exit.NEEDS_REBUILD, hint)


def _may_compile(decision: LayerDecision) -> bool:
    """Whether a compile stage may help and was not requested."""
    compiled = decision.outcome.compiled
    return compiled is not None and compiled.sources is None


def refuse_unserved(plan: BuildPlan, selection: Selection, subject: str = "the base") -> None:
    """Raise if a profile does not support this base; ``subject`` is the user's word for it.

    Raises:
        NotServed: it does not (exit 2).
    """
    for profile in selection.profiles:
        if profile.needs and not all_match(profile.needs, plan.base.packages):
            wanted = ", ".join(f"{name} {spec}" for name, spec in profile.needs.items())
            raise NotServed(
                f"profile {profile.name} needs {wanted}; {subject} has vllm "
                f"{plan.base.packages.get('vllm')}: {profile.needs_reason}; the newest supported "
                f"release is {profile.newest}",
                hint=f"spark-build plan --layers {profile.name} --base pypi:vllm=={profile.newest}",
            )


def refuse_nothing(plan: BuildPlan, selection: Selection, *, building: bool = False) -> None:
    """Raise if a profile does not support this base, or no layer applies to it.

    Raises:
        NotServed: a profile does not support this base (exit 2).
        SparkBuildError: there is nothing to do (exit 3).
    """
    refuse_unserved(plan, selection)
    idle = all(d.outcome.state == NOT_APPLICABLE for d in plan.decisions)
    done = all(d.outcome.state in (APPLIED, UPSTREAM, NOT_APPLICABLE) for d in plan.decisions)
    if idle or (building and done):
        reasons = "\n  ".join(f"layer {d.name}: {d.outcome.reason}" for d in plan.decisions)
        names = ",".join(d.name for d in plan.decisions)
        raise SparkBuildError(
            f"nothing to do:\n  {reasons}\n  the matrix shows which releases need it",
            Exit.NOTHING_TO_DO,
            hint=f"spark-build matrix --layers {names}",
        )
