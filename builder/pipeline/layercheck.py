"""Checks of ``layers check`` that would otherwise fail only with a base."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from builder.applier.agreement import Agreement
from builder.applier.opkinds import Env, Graft, Wheel
from builder.applier.versions import normalize
from builder.common.hints import instead, words
from builder.errors import UsageError
from builder.layers.pulls.resolve import refuse_unpinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.layers import InputPin, Layer, Pins, Variant
    from builder.applier.opkinds import Op

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9.]+)*")


def check_name(name: str, profiles: Mapping[str, Any]) -> None:
    """Refuse a name that ``--layers`` cannot use.

    Raises:
        UsageError: it is not a valid layer name, or a profile has it.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a layer name: lower-case words joined by '-'",
            hint=_other_name(name, "-".join(re.findall("[a-z0-9.]+", name.lower())).strip(".-")),
        )
    if name in profiles:
        raise UsageError(
            f"{name} is a profile, so no layer of this name can be selected",
            hint=_other_name(name, f"my-{name}"),
        )


def _other_name(name: str, better: str) -> str:
    """A command with a better name, where the name is the user's and not of a folder."""
    if name in words():
        return instead(name, better if NAME.fullmatch(better) else "my-layer")
    return "rename the folder: it is the layer's name"


def check_layer(layer: Layer) -> None:
    """Refuse a layer that cannot apply to any base.

    Raises:
        UsageError: two variants match the same base, or an input has no pin.
    """
    for one, other in itertools.combinations(layer.variants, 2):
        both = _both(one.when, other.when)
        if both:
            raise UsageError(
                f"layer {layer.name}: variants {one.name!r} and {other.name!r} overlap: "
                f"both match a base with {_packages(both)}",
                hint="narrow one range in layer.toml, for example with <VERSIONrc0",
            )
    refuse_unpinned(layer)
    for wanted in unpinned(layer):
        raise UsageError(
            f"layer {layer.name}: {wanted} is not pinned",
            hint=f"spark-build layers pin {layer.name}",
        )


def unpinned(layer: Layer) -> list[str]:
    """What a layer takes from the package index and does not pin."""
    return [wanted for op in layer.ops if (wanted := _without_pin(op, layer.pins))]


def check_together(layers: Sequence[Layer]) -> None:
    """Refuse layers that conflict with each other.

    Raises:
        ApplyError: on a base that both match, two of them set the same to different values.
    """
    for one, other in itertools.combinations(layers, 2):
        for mine, theirs in itertools.product(one.variants, other.variants):
            both = _both(mine.when, theirs.when)
            if both:
                agreement = Agreement()
                for layer, variant in ((one, mine), (other, theirs)):
                    flags = [*variant.serve_flags, *variant.moe_serve_flags]
                    where = f" on a base with {_packages(both)}"
                    agreement.add(layer.name, _variables(variant), flags, where)


def _variables(variant: Variant) -> dict[str, str]:
    """Variables that a variant sets on every base that it matches."""
    return {op.name: op.value for op in variant.ops if isinstance(op, Env) and not op.when}


def _packages(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _without_pin(op: Op, pins: Pins) -> str:
    """The input of an op that ``pins.toml`` lacks, or ``""``."""
    if isinstance(op, Graft):
        name, _, version = op.donor.partition("==")
        rows: Sequence[InputPin] = pins.donor
    elif isinstance(op, Wheel):
        name, version = op.distribution, op.version
        rows = pins.wheel
    else:
        return ""
    fits = [
        row
        for row in rows
        if normalize(row.distribution) == normalize(name) and version in ("", row.version)
    ]
    return "" if fits else f"{name} {version}".strip()


def _both(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Versions that match both ranges; empty if there are none."""
    found = {}
    for name in {**one, **other}:
        ranges = SpecifierSet(",".join(w[name] for w in (one, other) if w.get(name)))
        version = next((v for v in _candidates(ranges) if ranges.contains(v, True)), None)
        if version is None:
            return {}
        found[name] = version
    return found


def _candidates(ranges: SpecifierSet) -> Iterator[str]:
    """Versions at and around the bounds of ranges; if ranges overlap, one of these is in all."""
    for end in sorted({s.version.removesuffix(".*") for s in ranges}):
        try:
            version = Version(end)
        except InvalidVersion:
            continue
        release = ".".join(map(str, version.release))
        yield from (str(version), f"{version}.post1", release, f"{release}.1", f"{release}rc1")
        yield from (f"{version}.dev1",) if version.pre is None else ()
    yield from ("0.0.1", "99999")
