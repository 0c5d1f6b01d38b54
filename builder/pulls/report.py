"""The state of each pull request on a base, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from msgspec.structs import asdict, replace

from builder.applier.diff import parse_diff
from builder.applier.files import judge_file
from builder.applier.hunks import judge_hunks
from builder.applier.opkinds import Diff, counts
from builder.applier.states import APPLIED, NEEDED, POST, PRE, UPSTREAM
from builder.applier.trees import OverlayTree
from builder.documents.pulls import DroppedFile, PatchedFile, PullReport
from builder.pulls.conflict import conflicts_of
from builder.pulls.history import History

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.applier.diff import FileDiff
    from builder.applier.trees import Tree
    from builder.compile.stage import RejectedDiff
    from builder.documents.pulls import Conflict, Found
    from builder.model.plan import BuildPlan, LayerDecision
    from builder.pulls.parts import Pulled
    from builder.pypi.index import PackageIndex
    from builder.rootfs.base import Base


def report_pulls(
    plan: BuildPlan,
    base: Base,
    pulled: Mapping[str, list[Pulled]],
    index: PackageIndex,
    rejected_diffs: Mapping[str, RejectedDiff] | None = None,
) -> list[PullReport]:
    """A report on every pull request of a plan, in its order.

    Args:
        plan: the plan.
        base: the base.
        pulled: the pull requests, by layer.
        index: the package index.
        rejected_diffs: the sources that a pull request's diff does not match, by request.
    """
    reports = []
    view = OverlayTree(base.tree)
    changers: dict[str, str] = {}
    for decision in plan.decisions:
        for entry in pulled.get(decision.name, []):
            history = History(entry, plan.base.packages, changers, index)
            rejected = (rejected_diffs or {}).get(entry.pin.request)
            reports.append(_report(decision, entry, view, history, rejected))
        view.update(decision.changes)
        changers.update(dict.fromkeys(decision.changes, decision.name))
    return reports


def _report(
    decision: LayerDecision,
    entry: Pulled,
    tree: Tree,
    history: History,
    rejected: RejectedDiff | None,
) -> PullReport:
    changes = list(_changes(decision, entry, history.packages))
    state = decision.outcome.state
    files = tuple(_file(change, tree) for change in changes)
    conflicts: list[Conflict] = []
    if state not in (NEEDED, APPLIED, UPSTREAM):
        for change in changes:
            conflicts += conflicts_of(change, tree)
        conflicts = history.added_to(conflicts, changes)
        conflicts += _in_sources(rejected) if rejected else []
    hints = [*_left_over(entry, files), *history.hints(state)]
    return PullReport(
        **asdict(entry.pin),
        layer=entry.layer,
        in_base=_in_base(state, files),
        installed=files,
        compiled=tuple(section.path for section in entry.parts.compiled),
        dropped=tuple(DroppedFile(path=path, why=why) for path, why in entry.parts.dropped),
        conflicts=tuple(conflicts),
        hints=tuple(hints),
    )


def _in_base(state: str, files: Iterable[PatchedFile]) -> Literal["whole", "part", "no"]:
    if state in (APPLIED, UPSTREAM):
        return "whole"
    return "part" if any(POST in file.hunks for file in files) else "no"


def _in_sources(rejected: RejectedDiff) -> Iterator[Conflict]:
    """Hunks of compiled sources that do not match the release's sources."""
    for change in parse_diff(rejected.diff):
        if change.old is None:
            continue
        for conflict in conflicts_of(change, rejected.tree):
            yield replace(conflict, history=f"the text is that of {rejected.archive}")


def _left_over(entry: Pulled, files: Sequence[PatchedFile]) -> Iterator[str]:
    """The hint for a change that is partly present, and whose rest still applies."""
    found = {hunk for file in files for hunk in file.hunks}
    if found == {PRE, POST}:
        there = [file.path for file in files if POST in file.hunks]
        yield (
            f"{entry.pin.request} is partly applied ({', '.join(there[:4])}): a layer can add the "
            f"rest, file by file: spark-build layers new NAME --from-pr, and 'include'"
        )


def _changes(
    decision: LayerDecision, entry: Pulled, packages: Mapping[str, str]
) -> Iterator[FileDiff]:
    """The changes of a pull request to installed packages of this base."""
    for op in decision.layer.ops:
        if isinstance(op, Diff) and op.file == entry.pin.request and counts(op, packages):
            yield from parse_diff(op.diff)


def _file(change: FileDiff, tree: Tree) -> PatchedFile:
    kind: Literal["edit", "new", "delete", "rename", "mode"] = "edit"
    if change.old is None or change.new is None:
        kind = "new" if change.old is None else "delete"
    elif change.old != change.new:
        kind = "rename"
    elif not change.hunks:
        kind = "mode"
    data = tree.read(change.path)
    if kind in ("edit", "rename") and change.hunks and data is not None:
        verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), change.hunks)
        hunks = [cast("Found", verdict.found) for verdict in verdicts]
        offsets = [verdict.offset for verdict in verdicts]
    else:
        hunks, offsets = [cast("Found", judge_file(change, tree).found)], [0]
    return PatchedFile(path=change.path, change=kind, hunks=tuple(hunks), offsets=tuple(offsets))
