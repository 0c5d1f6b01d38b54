"""The layers selected by ``--layers`` and ``--with-pr``, with pull requests as diffs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.layers.pulls.resolve import has_pulls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.documents.pulls import Pin
    from builder.layers.catalog import Selection


def without_pulls(
    selection: Selection,
    with_pr: Sequence[str] = (),
    forge_clone: Sequence[str] = (),
    held: Mapping[str, Pin] | None = None,
) -> Selection:
    """A selection with its pull requests, and additional ones, turned into diffs.

    ``forge_clone`` are local clones to use for their repositories, ``held`` pins to keep.
    """
    if not with_pr and not any(has_pulls(layer) for layer in selection.layers):
        return selection
    from builder.common.forge import Forges, PullStore
    from builder.common.pypi import PackageIndex
    from builder.layers.pulls.resolve import Resolver

    resolver = Resolver(PullStore(Forges(forge_clone)), PackageIndex(), held or {})
    return resolver.resolve(selection, with_pr).selection
