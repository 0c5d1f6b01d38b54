"""What a companion is compiled of: the units that a change reaches, and their operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import Exit, SparkBuildError, UsageError
from builder.native.cmake import evaluate
from builder.native.cost import cost_of_units
from builder.native.includes import Sources, touched
from builder.native.registration import operators_behind, sibling_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.native.changes import SourceChange
    from builder.native.cmake import BuildRecipe, Unit
    from builder.native.registration import Operator
    from builder.native.source import SourceTree


@dataclass(frozen=True, kw_only=True)
class CompanionPlan:
    """What would be compiled: units that change, and units that lie between them and operators."""

    recipe: BuildRecipe
    sources: Sources
    rebuilt: tuple[Unit, ...]
    siblings: tuple[Unit, ...]
    operators: tuple[Operator, ...]
    #: the extension that registers them: ``vllm/_C``
    module: str


def plan_companion(
    source: SourceTree,
    change: SourceChange,
    arch_list: str,
    cuda: str,
    operators: Sequence[Operator] = (),
    rebuilt: Sequence[Unit] = (),
    recipe: BuildRecipe | None = None,
) -> CompanionPlan:
    """Find the units and operators of a change; nothing is compiled.

    ``source`` may have the change already; ``rebuilt`` are the units that it reaches, where more
    than the texts of the change tells; ``recipe`` is what its build makes of it, where that was
    asked already.

    Raises:
        SparkBuildError: the release has the change already (nothing to do, exit 3).
        SparkBuildError: the operator of a unit is not known, so that nothing less than its whole
            extension would do (exit 10).
        UsageError: no unit comes from what changes.
        EngineError: there is no cmake.
    """
    if not (change.texts or rebuilt):
        since = f" (upstream since {change.upstream})" if change.upstream else ""
        raise SparkBuildError(
            f"vllm {source.version} has {change.name} already{since}: nothing to compile",
            Exit.NOTHING_TO_DO,
        )
    recipe = recipe or evaluate(source, arch_list, cuda)
    sources = Sources(source.root, recipe.generated)
    rebuilt = rebuilt or touched(sources, recipe, change.texts)
    if not rebuilt:
        raise UsageError(f"{change.name}: no unit of vllm {source.version} comes from what changes")
    try:
        named = list(operators) or operators_behind(rebuilt, source.version)
    except UsageError as error:
        raise _whole_extension(str(error), rebuilt, recipe, source.version) from None
    modules = sorted({operator.module for operator in named})
    if len(modules) != 1:
        raise UsageError(
            f"{change.name} reaches operators of {len(modules)} extensions ({', '.join(modules)}); "
            "a companion goes beside one"
        )
    between = [unit for operator in named for unit in sibling_units(operator, recipe.units)]
    paths = {unit.path for unit in rebuilt}
    siblings = {unit.path: unit for unit in between if unit.path not in paths}
    return CompanionPlan(
        recipe=recipe,
        sources=sources,
        rebuilt=tuple(rebuilt),
        siblings=tuple(siblings.values()),
        operators=tuple(named),
        module=modules[0],
    )


def _whole_extension(
    reason: str, rebuilt: Sequence[Unit], recipe: BuildRecipe, release: str
) -> SparkBuildError:
    """Why a companion will not do, and what would: how much there is to compile, and how long."""
    names = sorted({unit.extension for unit in rebuilt})
    whole = [path for path, unit in recipe.units.items() if unit.extension in names]
    return SparkBuildError(
        f"{reason}; without it all of {', '.join(names)} has to be compiled, not "
        f"{len(rebuilt)} of {len(recipe.units)} units: {cost_of_units(whole)}",
        Exit.NEEDS_REBUILD,
        hint=f"build vllm {release} from its sources with the change; spark-build compile run "
        "compiles the changed units alone and reads their machine code",
    )
