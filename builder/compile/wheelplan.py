"""Plans an extension wheel: the units that a change affects, and their operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.compile.build import cost_of_units
from builder.compile.operators import (
    Discovery,
    RelatedUnits,
    demangled,
    known_operators,
    operators_behind,
    sibling_units,
)
from builder.compile.units import Sources, evaluate, touched
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.changes import SourceChange
    from builder.compile.operators import Operator
    from builder.compile.source import SourceTree
    from builder.compile.units import BuildRecipe, Unit


@dataclass(frozen=True, kw_only=True)
class WheelPlan:
    """The units to compile: changed units, and units between them and operators."""

    recipe: BuildRecipe
    sources: Sources
    rebuilt: tuple[Unit, ...]
    siblings: tuple[Unit, ...]
    operators: tuple[Operator, ...]
    #: the extension that registers them: ``vllm/_C``
    module: str
    #: siblings needed only for unresolved symbols
    added: tuple[Unit, ...] = ()


def plan_wheel(
    source: SourceTree,
    change: SourceChange,
    arch_list: str,
    cuda: str,
    operators: Sequence[Operator] = (),
    rebuilt: Sequence[Unit] = (),
    recipe: BuildRecipe | None = None,
) -> WheelPlan:
    """Find the units and operators of a change, without compiling.

    ``source`` may already have the change; ``rebuilt`` are the affected units, if they depend on
    more than the texts of the change; ``recipe`` is its build recipe, if it was already evaluated.
    Operators are the given ones, else those in our table for all units, else those found in the
    release's sources.

    Raises:
        SparkBuildError: the release already has the change (nothing to do, exit 3).
        SparkBuildError: the operator of a unit is unknown, so that its whole
            extension must be built (exit 10).
        UsageError: the change affects no unit.
        EngineError: cmake is missing.
    """
    if not (change.texts or rebuilt):
        since = f" (upstream since {change.upstream})" if change.upstream else ""
        raise SparkBuildError(
            f"vllm {source.version} has {change.name} already{since}, so there is nothing to "
            f"compile",
            Exit.NOTHING_TO_DO,
        )
    recipe = recipe or evaluate(source, arch_list, cuda)
    sources = Sources(source.root, recipe.generated)
    changed = replace(sources, changed=change.texts)
    rebuilt = rebuilt or touched(changed, recipe, change.texts)
    if not rebuilt:
        raise UsageError(
            f"{change.name}: no unit of vllm {source.version} is affected by the change"
        )
    try:
        discovery = Discovery(changed, recipe, source.version)
        behind = find_operators(rebuilt, discovery, operators)
    except UsageError as error:
        raise _whole_extension(str(error), rebuilt, recipe, source.version) from None
    modules = sorted({operator.module for operator in behind.operators})
    if len(modules) != 1:
        raise UsageError(
            f"{change.name} reaches operators of {len(modules)} extensions ({', '.join(modules)}); "
            "an extension wheel extends only one"
        )
    paths = {unit.path for unit in rebuilt}
    siblings = {unit.path: unit for unit in behind.siblings if unit.path not in paths}
    return WheelPlan(
        recipe=recipe,
        sources=sources,
        rebuilt=tuple(rebuilt),
        siblings=tuple(siblings.values()),
        operators=behind.operators,
        module=modules[0],
    )


def find_operators(
    rebuilt: Sequence[Unit], discovery: Discovery, given: Sequence[Operator] = ()
) -> RelatedUnits:
    """Operators and the units between: as given, else from our table, else from the sources.

    Facts from our table about an operator's kernels are kept.

    Raises:
        UsageError: they cannot be found, or there are too many units.
    """
    named = list(given)
    if not named:
        try:
            named = operators_behind(rebuilt, discovery.release)
        except UsageError:
            related = discovery.behind(rebuilt)
            known = {operator.name: operator for operator in known_operators(discovery.release)}
            existing = (
                replace(operator, kernels=row.kernels, holds=row.holds)
                if (row := known.get(operator.name))
                else operator
                for operator in related.operators
            )
            return replace(related, operators=tuple(existing))
    between = [u for operator in named for u in sibling_units(operator, discovery.recipe.units)]
    return RelatedUnits(operators=tuple(named), siblings=tuple(between))


def with_definers(
    plan: WheelPlan, change: SourceChange, release: str, symbols: Sequence[str]
) -> WheelPlan | None:
    """A plan extended by the units that define unresolved symbols.

    The sources give most units beforehand; unresolved symbols are exact.

    Args:
        plan: the compiled plan.
        change: the change.
        release: the vLLM release.
        symbols: mangled names.

    Returns:
        None if no unit of the release defines any, or one is already compiled.

    Raises:
        SparkBuildError: there are too many units (exit 10).
    """
    if not symbols or any(operator.defines for operator in plan.operators):
        return None
    sources = replace(plan.sources, changed=change.texts)
    discovery = Discovery(sources, plan.recipe, release)
    extension = plan.rebuilt[0].extension
    there = {unit.path for unit in (*plan.rebuilt, *plan.siblings)}
    names = demangled(symbols)
    definers = {path for name in names for path in discovery.providers(name, extension)} - there
    if not definers:
        return None
    every = sorted(there | definers)
    try:
        discovery.must_be_few(every, extension, [unit.path for unit in plan.rebuilt])
        more = discovery.operators_of(
            [path for path in sorted(definers) if discovery.unit(path).rows], extension
        )
    except UsageError as error:
        raise _whole_extension(str(error), plan.rebuilt, plan.recipe, release) from None
    known = {(operator.name, operator.key) for operator in plan.operators}
    added = tuple(plan.recipe.units[path] for path in sorted(definers))
    return replace(
        plan,
        siblings=(*plan.siblings, *added),
        added=(*plan.added, *added),
        operators=(*plan.operators, *(op for op in more if (op.name, op.key) not in known)),
    )


def _whole_extension(
    reason: str, rebuilt: Sequence[Unit], recipe: BuildRecipe, release: str
) -> SparkBuildError:
    """The error if an extension wheel is not enough, with the cost of the whole extension."""
    names = sorted({unit.extension for unit in rebuilt})
    whole = [path for path, unit in recipe.units.items() if unit.extension in names]
    return SparkBuildError(
        f"{reason}; without it all of {', '.join(names)} has to be compiled, not "
        f"{len(rebuilt)} of {len(recipe.units)} units: {cost_of_units(whole)}",
        Exit.NEEDS_REBUILD,
        hint=f"build vllm {release} from its sources with the change; spark-build compile run "
        "compiles the changed units alone and reads their machine code",
    )
