"""Checks layers: their files, what their text shows, and on request what releases show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.judging import judge_in_order
from builder.applier.trees import versions
from builder.applier.values import ApplyError
from builder.common.console import console
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.layers.catalog import Catalog, Selection, order
from builder.layers.lints import CheckedLayers, LayerFinding, findings, findings_on
from builder.layers.planner import IndexSources
from builder.layers.pulls import without_pulls
from builder.pipeline.bases import ReleasedTrees
from builder.pipeline.pins import check_layer, check_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer

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
    found = [finding for layer in wanted for finding in findings(layer)]
    if releases:
        index = PackageIndex(refresh=refresh)
        for layer in wanted:
            before = before_of(catalog, layer)
            found += _on_releases(layer, before, index, None if releases == ALL else releases)
    return CheckedLayers(checked=tuple(checked), findings=tuple(found))


def before_of(catalog: Catalog, layer: Layer) -> list[Layer]:
    """The layers that a layer comes after, and those that they come after, in order."""
    found: dict[str, Layer] = {}
    waiting = list(layer.after)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = catalog.layer(name)
            waiting += found[name].after
    return order(list(found.values()))


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
