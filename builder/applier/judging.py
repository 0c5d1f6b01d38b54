"""Judges a layer on a tree: its state and the exact new bytes, without writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.opkinds import Compile, counts
from builder.applier.ops import Ops
from builder.applier.outcomes import Outcome, Target
from builder.applier.receipts import receipts_of, unexplained
from builder.applier.sharedstage import SharedStage
from builder.applier.states import APPLIED, DRIFT, NOT_APPLICABLE, UPSTREAM
from builder.applier.text import first_line
from builder.applier.trees import Tree, versions
from builder.applier.variants import diffs_of, judge_variant
from builder.applier.versions import all_match, normalize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.layers import Clause, Layer
    from builder.applier.sources import Sources


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
