"""Judges layers on a tree, in order: their states and the exact new bytes, without writing."""

from __future__ import annotations

import symtable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.diff import NOT_PYTHON, first_line, parse_diff
from builder.applier.edits import unpatched
from builder.applier.layers import Compile, Diff, counts
from builder.applier.ops import Ops, SharedStage
from builder.applier.receipts import (
    make_receipt,
    receipt_bytes,
    receipt_path,
    receipts_of,
    settled_records,
    unexplained,
)
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
    OpResult,
    Outcome,
    Target,
)
from builder.applier.trees import Changes, Content, OverlayTree, Tree, stale_pyc, versions
from builder.applier.values import EXIT_USAGE, ApplyError, all_match, normalize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.applier.layers import Clause, Layer, Op, Variant
    from builder.applier.receipts import Receipt
    from builder.applier.sources import Sources
    from builder.applier.states import Target


def flag_values(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags of ``vllm serve``, each with its value."""
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            after = words[place + 1] if place + 1 < len(words) else "--"
            yield name, value if equals else None if after.startswith("--") else after


class Agreement:
    """Variables and flags set by layers so far."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}

    def add(
        self, layer: str, env: Mapping[str, str], flags: Sequence[str], where: str = ""
    ) -> None:
        """Add a layer's settings; ``where`` names the base in messages.

        Raises:
            ApplyError: an earlier layer sets a different value.
        """
        for name, value in [*env.items(), *flag_values(flags)]:
            other, before = self._set.setdefault(name, (layer, value))
            if before != value:
                raise ApplyError(
                    f"layers {other} and {layer} contradict each other{where}: {other} sets "
                    f"{_shown(name, before)}, {layer} sets {_shown(name, value)}",
                    EXIT_USAGE,
                    "name only one of them, or a profile with only one of them, with --layers",
                )


def _shown(name: str, value: str | None) -> str:
    if not name.startswith("--"):
        return f"{name}={value}"
    return name if value is None else f"{name} {value}"


# ---------------------------------------------------------------------------------------- a variant


#: Ops that a message names.
_LISTED = 5
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
        if result.form == SKIP:
            skipped.append(result)
            outcome.compiled = outcome.compiled or result.compiled
            continue
        if result.form not in (PRE, POST):
            outcome.state, outcome.changes = result.form, {}
            outcome.compiled, outcome.since = result.compiled, result.since
            outcome.notes += result.notes
            outcome.reason = result.reason if result.compiled else f"op {label}: {result.reason}"
            fresh = isinstance(op, Diff) and unpatched(parse_diff(op.diff), run.view)
            return outcome if texts[PRE] or fresh else _unless_merged(layer, outcome, run.packages)
        (texts if kind in _TEXT_OPS else ensured)[result.form].append(label)
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


def _some(texts: Sequence[str]) -> str:
    """The first of some texts, and how many more there are."""
    more = len(texts) - _LISTED
    return ", ".join(texts[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _half_there(outcome: Outcome, texts: Mapping[str, list[str]]) -> Outcome:
    outcome.state, outcome.changes = DRIFT, {}
    outcome.reason = (
        f"partly applied: {_some(texts[POST])} already in the base, {_some(texts[PRE])} not"
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


# ------------------------------------------------------------------------------------------ a layer


def judge(
    layer: Layer,
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str] | None = None,
    later: Sequence[Layer] = (),
    together: SharedStage | None = None,
) -> Outcome:
    """Decide a layer's state on a tree and compute its changes, without writing.

    Args:
        layer: the rendered layer.
        tree: the tree with earlier layers applied.
        sources: the sources of pinned wheels.
        target: platform and interpreter of the tree.
        env: environment variables of the base.
        later: the layers after this one, if it belongs to a series.
        together: the shared compile stage; None means that nothing is compiled.

    Raises:
        ApplyError: a pin is missing, or an input cannot be downloaded or does not match its digest.
    """
    packages = versions(tree)
    package = normalize(layer.package)
    name = layer.name
    if package not in packages:
        return Outcome(name, NOT_APPLICABLE, f"{package} is not in the base")
    together = together or SharedStage(last=1, carrier=name)
    receipted = _judge_by_receipt(layer, tree, env or {})
    if receipted is not None:
        together.standing += [(name, op) for op in _compiled_by(layer, receipted, packages)]
        return receipted
    early = _judge_by_probe(layer, tree, packages)
    if early is not None:
        return early
    matching = [v for v in layer.variants if all_match(v.when, packages)]
    if not matching:
        return _judge_no_variant(layer, packages)
    if len(matching) > 1:
        both = " and ".join(v.name for v in matching)
        raise ApplyError(f"layer {name}: variants {both} both match this base", EXIT_USAGE)
    judge_ops = Ops(layer, tree, sources, target, env or {}, together)
    return judge_variant(judge_ops, layer, matching[0], _diffs_after(layer, later, packages))


def _diffs_after(layer: Layer, later: Iterable[Layer], packages: Mapping[str, str]) -> list[str]:
    """The diffs of the layers that follow this one in its series."""
    return [
        diff
        for other in later
        if layer.series and other.series == layer.series
        for variant in other.variants
        if all_match(variant.when, packages)
        for diff in diffs_of(variant.ops, packages)
    ]


def _compiled_by(layer: Layer, outcome: Outcome, packages: Mapping[str, str]) -> list[Compile]:
    """The ops of an applied variant with compiled changes."""
    ops = (op for v in layer.variants if v.name == outcome.variant for op in v.ops)
    mine = (op for op in ops if isinstance(op, Compile) and op.source)
    return [op for op in mine if counts(op, packages)]


def _judge_by_receipt(layer: Layer, tree: Tree, env: Mapping[str, str]) -> Outcome | None:
    receipts = receipts_of(tree)
    receipt = next((r for r in receipts if r.layer == layer.name), None)
    if receipt is None or receipt.layer_digest != layer.digest:
        return None
    if unexplained(receipt, receipts, tree) or any(
        env.get(name) != value for name, value in receipt.env.items()
    ):
        return None
    count = len(receipt.files)
    return Outcome(
        layer.name,
        APPLIED,
        f"receipt found, {count} file{'s match' if count != 1 else ' matches'} it",
        variant=receipt.variant,
        env=dict(receipt.env),
        serve_flags=list(receipt.serve_flags),
        moe_serve_flags=list(receipt.moe_serve_flags),
    )


def _judge_by_probe(layer: Layer, tree: Tree, packages: Mapping[str, str]) -> Outcome | None:
    for entry in layer.upstream:
        if all_match(entry.when, packages) and probe_holds(entry.probe, tree):
            return Outcome(layer.name, UPSTREAM, entry.reason, since=entry.since)
    for entry in layer.not_applicable:
        if all_match(entry.when, packages):
            return Outcome(layer.name, NOT_APPLICABLE, entry.reason)
    return None


def _judge_no_variant(layer: Layer, packages: Mapping[str, str]) -> Outcome:
    nominated = [e for e in layer.upstream if all_match(e.when, packages)]
    if nominated:
        failed = nominated[0]
        return Outcome(
            layer.name,
            DRIFT,
            f"{failed.since} should have this fix, but its probe failed; expected: "
            f"{describe_probe(failed.probe)}",
        )
    wanted = [", ".join(f"{p} {s}" for p, s in v.when.items()) for v in layer.variants]
    names = sorted({normalize(p) for v in layer.variants for p in v.when})
    have = ", ".join(f"{p} {packages.get(p, 'absent')}" for p in names)
    return Outcome(
        layer.name, NOT_APPLICABLE, f"made for {' or '.join(wanted)}; the base has {have}"
    )


def probe_holds(probe: Iterable[Clause], tree: Tree) -> bool:
    """Whether every clause of a probe is true; reads text only, without imports."""
    for clause in probe:
        data = tree.read(clause.file)
        if clause.missing:
            if data is not None:
                return False
            continue
        if data is None:
            return False
        text = data.decode("utf-8", "replace")
        if clause.contains is not None and clause.contains not in text:
            return False
        if clause.lacks is not None and clause.lacks in text:
            return False
    return True


def describe_probe(probe: Iterable[Clause]) -> str:
    """A probe as text, for messages."""
    parts = []
    for clause in probe:
        if clause.missing:
            parts.append(f"{clause.file} is absent")
        elif clause.contains is not None:
            parts.append(f"{clause.file} contains {first_line(clause.contains)!r}")
        else:
            parts.append(f"{clause.file} lacks {first_line(clause.lacks or '')!r}")
    return " and ".join(parts)


# ---------------------------------------------------------------------------------- layers in order


@dataclass(frozen=True)
class Step:
    """One judged layer; ``changes`` includes its receipt."""

    layer: Layer
    outcome: Outcome
    receipt: Receipt | None
    changes: Changes


def judge_in_order(
    layers: Iterable[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
) -> Iterator[Step]:
    """Judge each layer on the tree with the previous layers applied, without writing.

    Compiled changes share a stage: the ops are counted first, and the last one's layer
    installs the result of all.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest; or
        two layers
            contradict each other.
    """
    ordered = list(layers)
    counted = SharedStage()
    steps = list(_judged_once(ordered, tree, sources, target, env, counted))
    if counted.ops:
        known = SharedStage(last=len(counted.ops), carrier=counted.ops[-1][0])
        steps = list(_judged_once(ordered, tree, sources, target, env, known))
    return iter(steps)


def _judged_once(
    ordered: Sequence[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
    together: SharedStage,
) -> Iterator[Step]:
    overlay = OverlayTree(tree)
    current = dict(env)
    agreement = Agreement()
    sequence = max((r.sequence for r in receipts_of(tree)), default=0)
    for number, layer in enumerate(ordered, 1):
        outcome = judge(layer, overlay, sources, target, current, ordered[number:], together)
        receipt: Receipt | None = None
        changes: Changes = {}
        if outcome.state == NEEDED:
            sequence += 1
        if outcome.pending:  # what is known of it already: a later layer may change it further
            overlay.update(outcome.changes)
        elif outcome.state == NEEDED:
            records = settled_records(layer, outcome.changes, overlay)
            receipt = make_receipt(layer, outcome, overlay, sequence, records)
            changes = {**outcome.changes, **records}
            changes[receipt_path(layer.name)] = Content.of(receipt_bytes(receipt))
            overlay.update(changes)
        flags = [*outcome.serve_flags, *outcome.moe_serve_flags]
        agreement.add(layer.name, outcome.env, flags)
        current.update(outcome.env)
        yield Step(layer, outcome, receipt, changes)
