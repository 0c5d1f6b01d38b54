"""Turns pull requests into layers: pins, ops with all content inlined, provenance.

Pins are recorded in ``pins.toml`` of a layer's folder, or in the lock of a project.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from builder.applier.layers import Layer
from builder.applier.opkinds import Pull
from builder.common.console import console
from builder.common.diffs import read_sections
from builder.common.documents.pulls import read_pin
from builder.common.forge import MERGED, parse_pull
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Selection, order
from builder.layers.pulls.parts import Parts, Pulled, mapped, project_of, take_apart
from builder.layers.pulls.releases import Releases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.diffs import Section
    from builder.common.documents.pulls import Pin
    from builder.common.forge import PullRef, PullStore
    from builder.common.pypi import PackageIndex

# ------------------------------------------------------------------ a layer of pinned pull requests


Table = dict[str, Any]

#: After layers that replace whole distributions (10 to 40), before those that edit vLLM (50).
ORDER = 45
#: Names that a note lists at most.
_LISTED = 6
#: Distributions whose CUDA sources a stage can compile, and their architectures.
_COMPILED, _ARCH = "vllm", "12.1a"


def parts_of(
    pin: Pin,
    sections: Sequence[Section],
    op: Pull,
    package: str = "",
) -> Parts:
    """Split a pinned diff with the description of its repository, or of its op.

    Raises:
        UsageError: it is unknown which of its files are installed.
    """
    repository = op.project or pin.repository
    project = project_of(repository, [section.path for section in sections])
    if op.map:
        project = mapped(project, repository, package, op.map)
    if project is None:
        raise UsageError(
            f"{pin.request}: no changed file is in a folder that matches {pin.repository}: "
            f"{_some([section.path for section in sections])}; a layer can name the folders with "
            "'map', or for a fork the upstream repository with 'project'",
            hint="spark-build layers new NAME --from-pr PULL",
        )
    return take_apart(pin.request, sections, project, op.include, op.exclude)


def ops_of(pin: Pin, parts: Parts, when: Mapping[str, str] | None = None) -> list[Table]:
    """The ops for a pull request; ``when`` is the condition of the replaced op."""
    source = {
        "repository": pin.repository,
        "number": pin.number,
        "commit": pin.commit,
        "sha256": pin.sha256,
    }
    dropped = [list(row) for row in parts.dropped]
    common: Table = {"file": pin.request, "pull": source}
    ops: list[Table] = []
    for layout, sections in parts.installed:
        if sections:
            text = b"".join(section.render() for section in sections).decode("utf-8")
            op = {"op": "diff", **common, "diff": text, "dropped": dropped}
            ops.append(_conditional(op, {**(when or {}), **layout.when}))
    if parts.compiled:
        ops.append(_conditional({**_compile_op(pin, parts), **common}, when or {}))
    late = parts.late()
    if late:
        brought = parts.project.prebuilt_by
        op = {"op": "compile", **common, "files": list(late), "diff": ""}
        op["reason"] = (
            f"{_some(late)} comes compiled from {brought}, and a change to the source has no effect"
        )
        ops.append(_conditional(op, {**(when or {}), brought: ">=0"}))
    return ops


def _compile_op(pin: Pin, parts: Parts) -> Table:
    """The op for compiled sources; with ``source``, a compile stage can build it."""
    paths = [section.path for section in parts.compiled]
    text = b"".join(s.render() for s in parts.compiled if not s.special).decode("utf-8")
    op: Table = {"op": "compile", "files": paths, "diff": text}
    op["reason"] = f"{_some(paths)} reach {parts.project.package} compiled"
    special = next((s for s in parts.compiled if s.special), None)
    if special is not None:
        op["reason"] += f"; {special.path} is {special.special}"
    elif parts.project.package == _COMPILED:
        op |= {"source": _COMPILED, "arch": _ARCH, "name": parse_pull(pin.request).layer_name}
    return op


def _conditional(op: Table, when: Mapping[str, str]) -> Table:
    return {**op, "if": dict(when)} if when else op


def notes_of(pin: Pin, parts: Parts) -> list[str]:
    """Notes in the plan about an applied pull request."""
    notes = []
    known = parts.project
    if known.described and known.repository.lower() != pin.repository.lower():
        notes.append(f"{pin.repository} is read as a fork of {known.repository}")
    if parts.dropped:
        names = [path for path, _ in parts.dropped]
        notes.append(f"{pin.request}: not installed, so dropped: {_some(names)}")
    if parts.late():
        late = _some(parts.late())
        notes.append(f"{pin.request}: {late} are compiled at first use")
    return notes


def merged_entry(pin: Pin, package: str) -> Table | None:
    """A layer's entry about its merged change: the first release with it, and its reference."""
    if not pin.release or not pin.merge_commit:
        return None
    return {
        "when": {package: f">={pin.release}"},
        "since": f"{package} {pin.release}",
        "reason": f"merged as {pin.merge_commit[:12]}, which is in {package} {pin.release} and "
        "later; this base has changed there since",
    }


def layer_of(pin: Pin, parts: Parts, name: str, after: Sequence[str]) -> Table:
    """The layer for a pull request from the command line."""
    package = parts.project.package
    every = {package: ">=0"}
    ops = ops_of(pin, parts)
    layer: Table = {
        "name": name,
        "summary": f"{pin.request}: {pin.title}" if pin.title else pin.request,
        "order": ORDER,
        "after": list(after),
        "package": package,
        "provenance": provenance(pin),
        "upstream": [],
        "not-applicable": [],
        "variants": [{"name": pin.short, "when": every, "notes": notes_of(pin, parts), "ops": ops}],
        "pins": {"wheel": [], "donor": []},
        "series": pin.repository.lower(),
    }
    if not ops:
        reason = f"none of its files is installed: {_some([path for path, _ in parts.dropped])}"
        layer["not-applicable"] = [{"when": every, "reason": reason}]
    merged = merged_entry(pin, package)
    return {**layer, "merged": merged} if merged else layer


def provenance(pin: Pin) -> Table:
    """The origin of a pull request in DEP-3 fields."""
    kind = "pull request" if pin.number else "commit"
    value: Table = {
        "origin": f"upstream, {pin.repository} {kind} "
        f"{pin.number or pin.short}{f', {pin.url}' if pin.url else ''}",
        "forwarded": "not-needed",
        "applied-upstream": "no",
        "last-update": pin.date,
    }
    if pin.number:
        value["bug"] = [f"{pin.repository}#{pin.number}"]
    if pin.merge_commit:
        value["applied-upstream"] = f"{pin.release or 'merged'}, {pin.merge_commit}"
    return value


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


# ----------------------------------------------------------------- the pull requests of a selection


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


# ---------------------------------------------------------------------------- pins in layer folders


def pin_pull(op: Pull, package: str, store: PullStore, index: PackageIndex) -> tuple[Pin, Parts]:
    """Pin an op's pull request in its current state, with the release that has it if merged.

    Raises:
        RemoteError: the forge does not respond, or it does not exist.
        UsageError: its changes cannot be expressed as text.
    """
    pin = store.resolve(parse_pull(op.pull))
    parts = parts_of(pin, read_sections(store.diff(pin)), op, package)
    if pin.state == MERGED and not pin.release:
        pin = structs.replace(pin, release=release_of(pin, parts, index))
    return pin, parts


def refuse_unpinned(layer: Layer) -> None:
    """Raise for a ``pull`` op without a pin.

    Raises:
        UsageError: there is one.
    """
    pinned = {row["request"] for row in layer.pins.pull}
    for op in layer.ops:
        if isinstance(op, Pull) and op.pull not in pinned:
            raise UsageError(
                f"layer {layer.name}: {op.pull} is not pinned",
                hint=f"spark-build layers pin {layer.name}",
            )
