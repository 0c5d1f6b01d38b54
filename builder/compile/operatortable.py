"""Lists, for each CUDA unit of a release, the operators that a change would register again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.compile.build import HOST_SUFFIXES
from builder.compile.discovery import Discovery
from builder.compile.includes import Sources
from builder.compile.registration import OperatorName
from builder.compile.wheelplan import find_operators
from builder.errors import UsageError
from builder.util.documents import Part, Text, always

if TYPE_CHECKING:
    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.discovery import RelatedUnits
    from builder.compile.source import SourceTree


class Row(Part, frozen=True, kw_only=True):
    """One unit with its operators, or the reason why they are unknown."""

    path: Text
    extension: Text
    operators: Annotated[
        tuple[OperatorName, ...],
        Meta(description="the registration that is replaced: an operator for a dispatch key"),
    ] = always(())
    between: Annotated[
        tuple[Text, ...], Meta(description="units that must be compiled together with it")
    ] = always(())
    refused: Annotated[
        str,
        Meta(description="why its whole extension must be compiled; empty if not"),
    ] = always("")

    @classmethod
    def of(cls, unit: Unit, behind: RelatedUnits) -> Row:
        """The row for a unit and its operators."""
        return cls(
            path=unit.path,
            extension=unit.extension,
            operators=tuple(map(OperatorName.of, behind.operators)),
            between=tuple(sibling.path for sibling in behind.siblings),
        )


def operator_rows(source: SourceTree, recipe: BuildRecipe) -> list[Row]:
    """A row for each CUDA unit of a release, by path; compiles nothing."""
    sources = Sources(source.root, recipe.generated)
    discovery = Discovery(sources, recipe, source.version)
    rows = []
    for path, unit in sorted(recipe.units.items()):
        if path.endswith(HOST_SUFFIXES):
            continue
        try:
            rows.append(Row.of(unit, find_operators([unit], discovery)))
        except UsageError as error:
            rows.append(Row(path=path, extension=unit.extension, refused=str(error)))
    return rows
