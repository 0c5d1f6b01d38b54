"""Compiled changes of several layers, which are compiled together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.applier.opkinds import Compile


@dataclass
class SharedStage:
    """The ``compile`` ops of a plan.  They share one stage: if two extension wheels registered the
    same operator, one would silently override the other.

    ``last`` is how many ops there are, and ``carrier`` the layer that brings what they make; they
    are not known while the ops are counted.
    """

    last: int | None = None
    carrier: str = ""
    #: layer and op, of those that are to be compiled
    ops: list[tuple[str, Compile]] = field(default_factory=list)
    #: the same of layers that a receipt says are applied: what they had compiled is there
    standing: list[tuple[str, Compile]] = field(default_factory=list)
    #: folders of what was compiled for this plan, which says nothing of the base
    made: set[str] = field(default_factory=set)

    def with_op(self, op: Compile) -> list[Compile]:
        """What goes into a stage up to an op."""
        return [*(known for _, known in (*self.standing, *self.ops)), op]

    def layers(self) -> set[str]:
        """The layers whose extension wheels a new one takes the place of."""
        return {name for name, _ in (*self.standing, *self.ops)}

    def add(self, layer: str, op: Compile) -> bool:
        """Count an op in; whether it is the one that brings what all of them make."""
        self.ops.append((layer, op))
        return self.last is not None and len(self.ops) >= self.last
