"""Replaces the pull requests of a selection by ops, with pins from the lock if there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.applier.layers import Layer
from builder.applier.opkinds import Pull
from builder.documents.pulls import read_pin
from builder.errors import SparkBuildError, UsageError
from builder.forge import MERGED
from builder.forge.normalize import read_sections
from builder.forge.reference import parse_pull
from builder.layers.catalog import Selection, order
from builder.pulls.parts import Pulled
from builder.pulls.releases import Releases
from builder.pulls.render import Table, layer_of, merged_entry, notes_of, ops_of, parts_of
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.documents.pulls import Pin
    from builder.forge.reference import PullRef
    from builder.forge.store import PullStore
    from builder.pulls.parts import Parts
    from builder.pypi.index import PackageIndex


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A selection for the applier, and its pull requests by layer."""

    selection: Selection
    pulled: Mapping[str, list[Pulled]]
    #: pins of pull requests from the command line, by request
    pins: Mapping[str, Pin]


@dataclass(frozen=True)
class Resolver:
    """Turns ``pull`` ops and ``--with-pr`` into rendered layers."""

    store: PullStore
    index: PackageIndex
    #: pins to keep, by request; others are requested from the forge
    held: Mapping[str, Pin]

    def resolve(self, selection: Selection, requests: Sequence[str]) -> Resolved:
        """Render every pull request of a selection, and additional ones, in order.

        Raises:
            UsageError: a reference is malformed, given twice, or not expressible as text.
            RemoteError: the forge does not respond, or no longer has the pinned commit.
        """
        pulled: dict[str, list[Pulled]] = {}
        layers = [self._layer(layer, pulled) for layer in selection.layers]
        pins: dict[str, Pin] = {}
        refs = [parse_pull(text) for text in requests]
        names = _names(refs, {layer.name for layer in layers})
        after: list[str] = []
        for ref, name in zip(refs, names, strict=True):
            held = self.held.get(str(ref))
            entry = self._pulled(name, held or self.store.resolve(ref), Pull(str(ref)))
            if held is None and entry.pin.state == MERGED and not entry.pin.release:
                entry = replace(entry, pin=self._released(entry))
            pins[str(ref)] = entry.pin
            pulled[name] = [entry]
            layers.append(Layer.read(layer_of(entry.pin, entry.parts, name, after)))
            after = [name]
        if not layers:
            raise UsageError(
                "nothing is selected; give --layers or --with-pr", hint="spark-build layers list"
            )
        done = Selection(tuple(order(layers)), selection.profiles)
        return Resolved(selection=done, pulled=pulled, pins=pins)

    def _layer(self, layer: Layer, pulled: dict[str, list[Pulled]]) -> Layer:
        """A layer of the catalogue without ``pull`` ops."""
        if not has_pulls(layer):
            return layer
        name = layer.name
        pins = {p.request: p for p in (read_pin(row, name) for row in layer.pins.pull)}
        entries: list[Pulled] = []
        variants = []
        for variant, rendered in zip(layer.variants, layer.rendered["variants"], strict=True):
            ops, notes = [], list(variant.notes)
            for op, raw in zip(variant.ops, rendered["ops"], strict=True):
                if not isinstance(op, Pull):
                    ops.append(raw)
                    continue
                if op.pull not in pins:
                    raise UsageError(
                        f"layer {name}: {op.pull} is not pinned",
                        hint=f"spark-build layers pin {name}",
                    )
                entry = self._pulled(name, pins[op.pull], op, layer.package)
                entries.append(entry)
                ops += ops_of(entry.pin, entry.parts, op.when)
                notes += notes_of(entry.pin, entry.parts)
            variants.append({**rendered, "ops": ops, **({"notes": notes} if notes else {})})
        pulled[name] = list({entry.pin.request: entry for entry in entries}.values())
        kept = {key: rows for key, rows in layer.rendered["pins"].items() if key != "pull"}
        changed = {"variants": variants, "pins": kept, **_history(layer, entries)}
        return Layer.read({**layer.rendered, **changed})

    def _pulled(self, name: str, pin: Pin, op: Pull, package: str = "") -> Pulled:
        sections = read_sections(self.store.diff(pin))
        parts = parts_of(pin, sections, op, package)
        return Pulled(layer=name, pin=pin, parts=parts)

    def _released(self, entry: Pulled) -> Pin:
        """The pin with the first release that has the change, if wheels show it."""
        release = release_of(entry.pin, entry.parts, self.index)
        return self.store.released(entry.pin, release) if release else entry.pin


def release_of(pin: Pin, parts: Parts, index: PackageIndex) -> str:
    """The first release that has a merged change, by the content of wheels, or ``""``."""
    try:
        return Releases(index, parts.project).first_with(parts)
    except SparkBuildError as error:
        console.detail(f"{pin.request}: cannot find the release that has it: {error}")
        return ""


def has_pulls(layer: Layer) -> bool:
    """Whether a layer has ops that need a forge."""
    return any(isinstance(op, Pull) for op in layer.ops)


def _history(layer: Layer, entries: Sequence[Pulled]) -> Table:
    """Merge information of a layer that consists of pull requests of one repository."""
    repositories = {entry.pin.repository.lower() for entry in entries}
    if not all(isinstance(op, Pull) for op in layer.ops) or len(repositories) != 1:
        return {}
    value: Table = {"series": repositories.pop()}
    requests = {entry.pin.request for entry in entries}
    merged = merged_entry(entries[0].pin, entries[0].parts.project.package)
    return {**value, "merged": merged} if merged and len(requests) == 1 else value


def _names(refs: Sequence[PullRef], taken: set[str]) -> list[str]:
    """A layer name for each reference; includes the owner only if necessary."""
    seen: set[str] = set()
    names: list[str] = []
    for ref in refs:
        same = f"{ref.repository.lower()}#{ref.number}" if ref.number else str(ref).lower()
        if same in seen:
            raise UsageError(f"{ref}: the pull request is named twice")
        seen.add(same)
        name = ref.layer_name
        if name in taken:
            kind, _, rest = name.partition("-")
            name = f"{kind}-{ref.owner.lower()}-{rest}"
        if name in taken:
            raise UsageError(f"{ref}: there is a layer {name} already")
        taken.add(name)
        names.append(name)
    return names
