"""The state of each pull request on a base, as text and as JSON.

Hunks that do not match are shown with both texts side by side, and with the releases that match.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Literal, cast

from msgspec.structs import asdict, replace

from builder.applier.diff import parse_diff
from builder.applier.files import judge_file
from builder.applier.hunks import judge_hunks
from builder.applier.opkinds import Diff, counts
from builder.applier.states import AMBIGUOUS, APPLIED, DRIFT, NEEDED, POST, PRE, UPSTREAM
from builder.applier.text import lines_of
from builder.applier.trees import OverlayTree
from builder.common.documents.pulls import Conflict, DroppedFile, PatchedFile, PullReport
from builder.layers.pulls.releases import History

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.applier.diff import FileDiff, Hunk
    from builder.applier.trees import Tree
    from builder.common.documents.pulls import Found
    from builder.common.model.plan import BuildPlan, LayerDecision
    from builder.common.pypi import PackageIndex
    from builder.compile.stage import RejectedDiff
    from builder.images.rootfs.base import Base
    from builder.layers.pulls.parts import Pulled

# -------------------------------------------------------------------------- hunks that do not match


#: Part of a hunk's text that must be near a place to show that place.
_NEAR = 0.3
#: Limit of a file's lines times its conflicts for which the nearest text is looked up: about 5 s.
_SEARCHED = 10_000_000
#: Lines of each text that are shown side by side.
_SIDE = 200


def conflicts_of(change: FileDiff, tree: Tree) -> list[Conflict]:
    """The hunks of a file that match neither the old nor the new text."""
    path = change.old or change.path
    data = tree.read(path)
    if data is None:
        data = tree.read(change.path)
    if data is None:
        return [Conflict(path=path, hunk=1, line=0, why="the file is not in the base")]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return [Conflict(path=path, hunk=1, line=0, why="the file is not UTF-8 text")]
    verdicts, _ = judge_hunks(text, change.hunks)
    lines = lines_of(text)
    found: list[Conflict] = []
    for number, (hunk, verdict) in enumerate(zip(change.hunks, verdicts, strict=True), 1):
        if verdict.found == DRIFT:
            near = len(lines) * (len(found) + 1) <= _SEARCHED
            found.append(_missing(path, number, hunk, lines if near else None))
        elif verdict.found == AMBIGUOUS:
            why = f"the text occurs more than once ({verdict.reason})"
            expected = tuple(_shown(hunk.old))
            found.append(
                Conflict(path=path, hunk=number, line=hunk.start, why=why, expected=expected)
            )
    return found


def _missing(path: str, number: int, hunk: Hunk, lines: Sequence[str] | None) -> Conflict:
    if lines is None:
        why = "the text is not in the file; the nearest was not looked up, there are too many"
        return Conflict(path=path, hunk=number, line=hunk.start, why=why)
    start = nearest(lines, hunk.old, hunk.start - 1)
    near = list(lines[start : start + len(hunk.old)]) if start is not None else []
    why = "the file has no similar text" if start is None else "the text differs"
    if near and [x.strip() for x in near] == [x.strip() for x in hunk.old]:
        why = "only whitespace or line endings differ"
    return Conflict(
        path=path,
        hunk=number,
        line=hunk.start,
        why=why,
        expected=tuple(_shown(hunk.old)),
        found_line=0 if start is None else start + 1,
        found=tuple(_shown(near)),
    )


def _shown(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        text = line.removesuffix("\n")
        yield f"{text.removesuffix(chr(13))}\\r" if text.endswith("\r") else text


def nearest(lines: Sequence[str], wanted: Sequence[str], hint: int) -> int | None:
    """The line (from 0) near which most of the wanted lines are; the one nearest ``hint`` if equal.

    None if less than a third of the text is found together.
    """
    weights = {line.strip(): len(line.strip()) for line in wanted}
    total = sum(len(line.strip()) for line in wanted)
    worth = [weights.get(line.strip(), 0) for line in lines]
    size = len(wanted)
    best, score, running = None, 0, sum(worth[:size])
    for start in range(max(1, len(lines) - size + 1)):
        closer = best is None or abs(start - hint) < abs(best - hint)
        if running > score or (running == score and running and closer):
            best, score = start, running
        if start + size < len(worth):
            running += worth[start + size] - worth[start]
    return best if score >= _NEAR * total and score else None


def side_by_side(left: Sequence[str], right: Sequence[str], width: int) -> list[str]:
    """Two texts in columns; ``|`` marks lines that differ, ``<`` and ``>`` lines that
    only one side has.  Of long texts, the beginning."""
    column = max(20, (width - 3) // 2)
    rows = []
    more = max(len(left), len(right)) - _SIDE
    left, right = left[:_SIDE], right[:_SIDE]
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        for number in range(max(b - a, d - c)):
            one = left[a + number] if a + number < b else None
            other = right[c + number] if c + number < d else None
            mark = "" if tag == "equal" else "<" if other is None else ">" if one is None else "|"
            rows.append(_row(one or "", mark, other or "", column))
    return [*rows, f"and {more} more lines"] if more > 0 else rows


def _row(left: str, mark: str, right: str, column: int) -> str:
    return f"{_cut(left, column):<{column}} {mark:1} {_cut(right, column)}".rstrip()


def _cut(text: str, column: int) -> str:
    text = text.expandtabs(4)
    return text if len(text) <= column else f"{text[: column - 1]}…"


# --------------------------------------------------------------------------------------- the report


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
