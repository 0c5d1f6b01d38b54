"""Checks layers: their files, what their text shows, and on request what releases show."""

from __future__ import annotations

import datetime
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from packaging.version import Version

from builder.applier.diff import parse_diff
from builder.applier.judging import judge_in_order, probe_holds
from builder.applier.layers import Diff, Replace
from builder.applier.states import AMBIGUOUS, DRIFT, NEEDED
from builder.applier.trees import versions
from builder.applier.values import ApplyError, all_match
from builder.common.console import console
from builder.common.document import Document, Part, Text
from builder.common.forge import parse_pull
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.reference import NEWEST_VLLM
from builder.errors import UsageError
from builder.layers import layerfile
from builder.layers.catalog import Catalog, Selection, order
from builder.layers.edited import after_newest, ends
from builder.layers.pinned import IndexSources
from builder.layers.pulls import without_pulls
from builder.pipeline.bases import ReleasedTrees
from builder.pipeline.pins import check_layer, check_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer, Variant
    from builder.applier.states import Outcome
    from builder.applier.trees import Tree


#: The word for all releases.
ALL = "all"


def check_layers(
    names: Sequence[str], patches: Sequence[Path], releases: str | None, *, refresh: bool
) -> CheckedLayers:
    """Check layers by name, or all.

    Args:
        names: the layers; none means all.
        patches: folders of layers of the user's own.
        releases: also read these releases of each layer's package, "all", or None for none.
        refresh: ask the package index again.

    Raises:
        UsageError: a layer's file is wrong, or an input of it is not pinned.
    """
    catalog = Catalog.discover(patches)
    catalog.say_shadows(names)
    checked = names or list(catalog.folders)
    wanted = [catalog.layer(name) for name in checked]
    layers = [*wanted]
    for layer in layers:  # grows: what a layer comes after is checked too
        layers += [o for n in layer.after if (o := catalog.layer(n)) not in layers]
        check_name(layer.name, catalog.profile_files)
        check_layer(layer)
    order(layers)
    all_findings = [
        finding
        for layer in wanted
        for finding in findings(layer, layerfile.open_ended(catalog.folders[layer.name]))
    ]
    if releases:
        index = PackageIndex(refresh=refresh)
        for layer in wanted:
            before = before_of(catalog, layer)
            all_findings += _on_releases(
                layer, before, index, None if releases == ALL else releases
            )
    return CheckedLayers(checked=tuple(checked), findings=tuple(all_findings))


def before_of(catalog: Catalog, layer: Layer) -> list[Layer]:
    """The layers that a layer comes after, and those that they come after, in order."""
    before: dict[str, Layer] = {}
    waiting = list(layer.after)
    while waiting:
        name = waiting.pop()
        if name not in before:
            before[name] = catalog.layer(name)
            waiting += before[name].after
    return order(list(before.values()))


def _on_releases(
    layer: Layer, before: Sequence[Layer], index: PackageIndex, named: str | None
) -> Iterator[LayerFinding]:
    """What the releases of a layer's package show."""
    selection = without_pulls(Selection((*before, layer), ()))
    released = ReleasedTrees(package=layer.package, selection=selection, index=index)
    sources = IndexSources(index)
    for version, tree in released.trees(named):
        console.detail(f"judging {layer.name} on {layer.package} {version}")
        try:
            *_, step = judge_in_order(selection.layers, tree, sources, Platform().target, {})
        except ApplyError as error:
            console.warn(f"{layer.name} on {layer.package} {version}: {error}")
            continue
        yield from findings_on(layer, tree, versions(tree), step.outcome)


# ------------------------------------------------------------------------ what a layer's text shows


Rule = Literal["provenance", "context", "anchor", "probe", "range"]
#: An anchor with less than this is likely to occur elsewhere one day: characters without blanks.
_SHORT = 20


class LayerFinding(Part, frozen=True, kw_only=True):
    """A weakness of a layer."""

    layer: Text
    rule: Rule
    where: Annotated[Text, Meta(description="the table, or the release")]
    problem: Text

    def __str__(self) -> str:
        """One line."""
        return f"{self.layer}: {self.where}: {self.problem} ({self.rule})"


class CheckedLayers(Document, frozen=True, kw_only=True):
    """The checked layers."""

    checked: tuple[Text, ...]
    findings: Annotated[
        tuple[LayerFinding, ...], Meta(description="weaknesses, which --strict refuses")
    ] = ()


def findings(layer: Layer, open_ended: str = "") -> Iterator[LayerFinding]:
    """What a layer's own text shows.

    ``open_ended`` is the layer's reason for a range without an end.
    """

    def finding(rule: Rule, where: str, problem: str) -> LayerFinding:
        return LayerFinding(layer=layer.name, rule=rule, where=where, problem=problem)

    yield from (finding("provenance", "provenance", text) for text in _provenance(layer))
    for variant in layer.variants:
        where = f"variant {variant.name}"
        yield from (finding("context", where, text) for text in _context(variant))
        yield from (finding("anchor", where, text) for text in _anchors(variant))
        if not (open_ended and _is_open(layer, variant)):
            yield from (finding("range", where, text) for text in _range(layer, variant))
    if open_ended and not any(_is_open(layer, variant) for variant in layer.variants):
        yield finding("range", "open-ended", "it explains nothing: every variant has an end")
    yield from (finding("probe", where, text) for where, text in _probes(layer))


def _provenance(layer: Layer) -> Iterator[str]:
    values = layer.provenance
    for key in ("origin", "forwarded", "applied-upstream"):
        if not str(values.get(key, "")).strip():
            yield f"{key} is empty: say where the change comes from, and where it went"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if str(values.get("last-update", "")) > today:
        yield f"last-update {values['last-update']} has not come yet"
    for bug in _listed(values.get("bug")):
        try:
            parse_pull(bug)
        except UsageError:
            yield f"bug {bug!r} is not OWNER/REPO#NUMBER, so its state cannot be looked up"


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, (list, tuple)) else []


def _context(variant: Variant) -> Iterator[str]:
    for op in variant.ops:
        if isinstance(op, Replace) and len("".join(op.old.split())) < _SHORT:
            yield f"{op.file}: {op.old.strip()!r} is a short anchor; add the lines around it"
        elif isinstance(op, Diff):
            for change in parse_diff(op.diff):
                if any(_bare(hunk.old, hunk.new) for hunk in change.hunks if change.old):
                    yield f"{change.path}: a hunk's context is only empty lines"


def _bare(old: tuple[str, ...], new: tuple[str, ...]) -> bool:
    same = {line for line in old if line in new}
    return not any(line.strip() for line in same)


def _anchors(variant: Variant) -> Iterator[str]:
    ops = [op for op in variant.ops if isinstance(op, Replace)]
    for op in ops:
        for other in ops:
            if other is op or other.file != op.file or op.count > 1:
                continue
            if op.old in other.new and op.old not in other.old:
                line = op.old.strip().splitlines()[0]
                yield f"{op.file}: the anchor {line!r} also occurs in another op's new text"


def _is_open(layer: Layer, variant: Variant) -> bool:
    """Whether a variant is for every later release of the layer's package."""
    spec = variant.when.get(layer.package)
    return spec is not None and not ends(spec)[1]


def _range(layer: Layer, variant: Variant) -> Iterator[str]:
    spec = variant.when.get(layer.package)
    if spec is None:
        if variant.when:
            return
        yield f"no range of {layer.package}: every release gets it, also those nobody has read"
        return
    top = ends(spec)[1]
    if not top:
        yield f"{layer.package} {spec} has no end: it is also for releases that nobody has read"
    elif layer.package == "vllm":
        most = after_newest(NEWEST_VLLM)
        if Version(top) > Version(most):
            yield f"vllm {spec} reaches beyond {NEWEST_VLLM}, the newest release that was read"


def _probes(layer: Layer) -> Iterator[tuple[str, str]]:
    """Probes that also hold for the text before a change, as far as the layer has it."""
    for number, entry in enumerate(layer.upstream, 1):
        if any(clause.missing for clause in entry.probe):
            continue
        for variant in layer.variants:
            before = _before(variant)
            if all(
                clause.contains in before[clause.file]
                if clause.contains is not None
                else clause.file in before and (clause.lacks or "") not in before[clause.file]
                for clause in entry.probe
            ) and any(clause.contains is not None for clause in entry.probe):
                yield (
                    f"upstream {number}",
                    f"the probe also holds for the text that variant {variant.name} replaces",
                )


def _before(variant: Variant) -> Mapping[str, str]:
    """The text that a variant replaces, by file."""
    texts: dict[str, str] = defaultdict(str)
    written: dict[str, str] = defaultdict(str)
    for op in variant.ops:
        if isinstance(op, Replace):
            texts[op.file] += "" if op.old in written[op.file] else op.old + "\0"
            written[op.file] += op.new + "\0"
        elif isinstance(op, Diff):
            for change in parse_diff(op.diff):
                texts[change.path] += "\0".join("".join(hunk.old) for hunk in change.hunks)
    return texts


def findings_on(
    layer: Layer, tree: Tree, packages: Mapping[str, str], outcome: Outcome
) -> Iterator[LayerFinding]:
    """What a release shows, given the layer's state on it."""
    version = packages.get(layer.package, "")
    where = f"{layer.package} {version}"

    def finding(rule: Rule, problem: str) -> LayerFinding:
        return LayerFinding(layer=layer.name, rule=rule, where=where, problem=problem)

    inside = [v.name for v in layer.variants if all_match(v.when, packages)]
    if outcome.state == DRIFT and inside:
        yield finding(
            "range", f"variant {inside[0]} is for it, and does not fit it: {outcome.reason}"
        )
    elif outcome.state == DRIFT:  # an `upstream` range, whose probe fails
        yield finding("probe", outcome.reason)
    if outcome.state == AMBIGUOUS:
        yield finding("anchor", outcome.reason)
    if outcome.state != NEEDED:
        return
    for number, entry in enumerate(layer.upstream, 1):
        try:
            holds = probe_holds(entry.probe, tree)
        except ApplyError:
            continue
        if holds:
            yield finding(
                "probe", f"the probe of upstream {number} holds, but the change is not there"
            )
