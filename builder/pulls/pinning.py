"""Pins of pull requests in layer folders, as recorded in ``pins.toml``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.applier.opkinds import Pull
from builder.errors import UsageError
from builder.forge import MERGED
from builder.forge.normalize import read_sections
from builder.forge.reference import parse_pull
from builder.pulls.render import parts_of
from builder.pulls.resolve import release_of

if TYPE_CHECKING:
    from builder.applier.layers import Layer
    from builder.documents.pulls import Pin
    from builder.forge.store import PullStore
    from builder.pulls.parts import Parts
    from builder.pypi.index import PackageIndex


def pin_pull(op: Pull, package: str, store: PullStore, index: PackageIndex) -> tuple[Pin, Parts]:
    """Pin an op's pull request in its current state, with the release that has it if merged.

    Raises:
        RemoteError: the forge does not respond, or it does not exist.
        UsageError: its changes cannot be expressed as text.
    """
    pin = store.resolve(parse_pull(op.pull))
    parts = parts_of(pin, read_sections(store.diff(pin)), op, package)
    if pin.state == MERGED and not pin.release:
        pin = replace(pin, release=release_of(pin, parts, index))
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
