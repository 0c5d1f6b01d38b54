"""Runs the ops of a variant and combines their results into the outcome of a layer."""

from __future__ import annotations

import symtable
from typing import TYPE_CHECKING

from builder.applier.diff import parse_diff
from builder.applier.files import unpatched
from builder.applier.opkinds import Diff, counts
from builder.applier.outcomes import OpResult, Outcome
from builder.applier.states import (
    APPLIED,
    DRIFT,
    NEEDED,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
    POST,
    PRE,
    SKIP,
    UPSTREAM,
)
from builder.applier.text import NOT_PYTHON
from builder.applier.trees import stale_pyc
from builder.applier.versions import all_match

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.layers import Layer, Variant
    from builder.applier.opkinds import Op
    from builder.applier.ops import Ops

_TEXT_OPS = ("replace", "diff", "graft", "copy", "hook")


def diffs_of(ops: Iterable[Op], packages: Mapping[str, str]) -> list[str]:
    """The diffs among some ops that apply to a base with these packages."""
    return [op.diff for op in ops if isinstance(op, Diff) and counts(op, packages)]


def judge_variant(run: Ops, layer: Layer, variant: Variant, later: Sequence[str] = ()) -> Outcome:
    outcome = Outcome(layer.name, NEEDED, "", variant=variant.name)
    outcome.serve_flags = list(variant.serve_flags)
    outcome.moe_serve_flags = list(variant.moe_serve_flags)
    outcome.notes = list(variant.notes)
    texts: dict[str, list[str]] = {PRE: [], POST: []}
    ensured: dict[str, list[str]] = {PRE: [], POST: []}
    skipped: list[OpResult] = []
    why_compiled = ""
    for number, op in enumerate(variant.ops, 1):
        if not counts(op, run.packages):
            continue
        kind = op.kind
        run.later = [*diffs_of(variant.ops[number:], run.packages), *later]
        label = f"{number} ({kind} {op.subject})"
        if kind == "compile" and texts[POST] and not texts[PRE]:
            outcome.notes.append(
                f"op {label} is assumed to be applied, because the text edits of this layer are"
            )
            continue
        result = run.judged(op)
        if result.found == SKIP:
            skipped.append(result)
            outcome.compiled = outcome.compiled or result.compiled
            continue
        if result.found not in (PRE, POST):
            outcome.state, outcome.changes = result.found, {}
            outcome.compiled, outcome.since = result.compiled, result.since
            outcome.notes += result.notes
            outcome.reason = result.reason if result.compiled else f"op {label}: {result.reason}"
            fresh = isinstance(op, Diff) and unpatched(parse_diff(op.diff), run.view)
            return outcome if texts[PRE] or fresh else _unless_merged(layer, outcome, run.packages)
        (texts if kind in _TEXT_OPS else ensured)[result.found].append(label)
        outcome.env.update(result.env)
        outcome.inputs.extend(result.inputs)
        if kind == "diff" and result.reason:
            outcome.notes.append(result.reason)
        outcome.notes += result.notes
        if result.compiled:
            outcome.compiled, why_compiled = result.compiled, result.reason
        run.view.update(result.changes)
        outcome.changes.update(result.changes)
        for path in result.changes:
            outcome.ops.setdefault(path, []).append(kind)
    if texts[PRE] and texts[POST]:
        return _half_there(outcome, texts)
    outcome.reason = _reason(outcome, variant, texts, ensured, why_compiled)
    if outcome.state == NOT_APPLICABLE and skipped:
        outcome.state = UPSTREAM if any(r.since for r in skipped) else NOT_APPLICABLE
        outcome.since = next((r.since for r in skipped if r.since), None)
        outcome.reason = "; ".join(r.reason for r in skipped)
    else:
        outcome.notes += [r.reason for r in skipped]
    if outcome.state == NEEDED:
        _finish_changes(run, outcome)
    return outcome


def _unless_merged(layer: Layer, outcome: Outcome, packages: Mapping[str, str]) -> Outcome:
    """A change that was merged and then edited has neither its old nor its new text in the tree.

    If a layer knows the first release with its merged change, that decides; if any of
    its old text still exists, this is not called.
    """
    merged = layer.merged
    open_question = outcome.state in (DRIFT, NEEDS_REBUILD)
    if not merged or not open_question or not all_match(merged.when, packages):
        return outcome
    return Outcome(layer.name, UPSTREAM, merged.reason, since=merged.since)


def _half_there(outcome: Outcome, texts: Mapping[str, list[str]]) -> Outcome:
    outcome.state, outcome.changes = DRIFT, {}
    outcome.reason = (
        f"partly applied: {', '.join(texts[POST])} already in the base, {', '.join(texts[PRE])} not"
    )
    return outcome


def _reason(
    outcome: Outcome,
    variant: Variant,
    texts: Mapping[str, list[str]],
    ensured: Mapping[str, list[str]],
    why_compiled: str,
) -> str:
    compiled = outcome.compiled
    if compiled and ensured[POST] and not (texts[PRE] or texts[POST] or ensured[PRE]):
        outcome.state, outcome.changes = APPLIED, {}
        return why_compiled
    if compiled and ensured[PRE]:  # the same before and after: what it makes is not known before
        how = f"compiled with layer {compiled.carrier}"
        if compiled.stage:
            how = f"{compiled.stage.change} compiled for {compiled.stage.arch}"
        edited = sum("compile" not in kinds for kinds in outcome.ops.values())
        beside = f"; {edited} file{'s' if edited != 1 else ''} to change as well"
        return f"{how}: {why_compiled}{beside if edited else ''}"
    if texts[PRE] or ensured[PRE]:
        what = len(outcome.changes)
        settings = [label for label in ensured[PRE] if "(env " in label]
        parts = [f"{what} file{'s' if what != 1 else ''} to change"] if what else []
        if settings:
            parts.append("sets " + ", ".join(f"{k}={v}" for k, v in outcome.env.items()))
        return "; ".join(parts) or "nothing to change"
    if texts[POST] or ensured[POST]:
        outcome.state, outcome.changes = APPLIED, {}
        return "the change is already applied, byte for byte"
    flags = outcome.serve_flags + outcome.moe_serve_flags
    if flags:
        return "settings only: " + " ".join(flags)
    outcome.state, outcome.changes = NOT_APPLICABLE, {}
    return f"no op of variant {variant.name} applies to this base"


def _finish_changes(run: Ops, outcome: Outcome) -> None:
    """Parse every changed module and remove its compiled files."""
    for path, content in outcome.changes.items():
        if path.endswith(".py") and content is not None and content.data is not None:
            try:
                # half of the time of ast.parse, which makes a tree; it takes bytes, whatever is
                # declared, and reads the line that names their encoding
                symtable.symtable(content.data, path, "exec")  # type: ignore[arg-type]
            except NOT_PYTHON as error:
                outcome.state, outcome.changes = DRIFT, {}
                outcome.reason = f"{path} would no longer parse: {error}"
                return
    outcome.changes.update(dict.fromkeys(stale_pyc(run.view, outcome.changes)))
