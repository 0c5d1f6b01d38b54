"""For every CUDA unit of a release: which operators a change to it alone would register anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.compile.build import HOST_SUFFIXES
from builder.compile.discovery import Discovery
from builder.compile.includes import Sources
from builder.compile.wheelplan import find_operators
from builder.errors import UsageError

if TYPE_CHECKING:
    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.discovery import RelatedUnits
    from builder.compile.source import SourceTree


@dataclass(frozen=True, kw_only=True)
class Row:
    """One unit; either what stands behind it, or why that cannot be said."""

    unit: Unit
    behind: RelatedUnits | None
    refused: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row in ``compile show --operators --json``."""
        operators = self.behind.operators if self.behind else ()
        siblings = self.behind.siblings if self.behind else ()
        return {
            "path": self.unit.path,
            "extension": self.unit.extension,
            "operators": [{"name": op.name, "key": op.key} for op in operators],
            "between": [unit.path for unit in siblings],
            "refused": self.refused,
        }


def operator_rows(source: SourceTree, recipe: BuildRecipe) -> list[Row]:
    """Ask for each CUDA unit of a release, by path; nothing is compiled."""
    sources = Sources(source.root, recipe.generated)
    discovery = Discovery(sources, recipe, source.version)
    rows = []
    for path, unit in sorted(recipe.units.items()):
        if path.endswith(HOST_SUFFIXES):
            continue
        try:
            rows.append(Row(unit=unit, behind=find_operators([unit], discovery)))
        except UsageError as error:
            rows.append(Row(unit=unit, behind=None, refused=str(error)))
    return rows
