"""Probes: whether the files of a tree contain the upstream form of a fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.applier.layers import Clause
    from builder.applier.trees import Tree


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
