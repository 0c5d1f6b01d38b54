"""The shared compile stage of several layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.applier.opkinds import Compile


@dataclass
class SharedStage:
    """The ``compile`` ops of a plan.  They share one stage: if two extension wheels registered the
    same operator, one would silently override the other.

    ``last`` is the number of ops, and ``carrier`` the layer that installs the result; they
    are unknown while the ops are counted.
    """

    last: int | None = None
    carrier: str = ""
    #: layer and op of changes to compile
    ops: list[tuple[str, Compile]] = field(default_factory=list)
    #: the same for applied layers, whose compiled changes are installed
    standing: list[tuple[str, Compile]] = field(default_factory=list)
    #: folders of this plan's compiled results, which do not show the base's state
    made: set[str] = field(default_factory=set)

    def with_op(self, op: Compile) -> list[Compile]:
        """The inputs of a stage up to an op."""
        return [*(known for _, known in (*self.standing, *self.ops)), op]

    def layers(self) -> set[str]:
        """The layers whose extension wheels a new one replaces."""
        return {name for name, _ in (*self.standing, *self.ops)}

    def add(self, layer: str, op: Compile) -> bool:
        """Count an op; returns whether it is the one that installs the result of all."""
        self.ops.append((layer, op))
        return self.last is not None and len(self.ops) >= self.last
