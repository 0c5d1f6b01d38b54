"""What is compiled: by a release's build for SM121, and for an extension wheel with a change.

An extension wheel compiles the units that the change affects, and those up to their operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Count, Document, Part, Text, always
from builder.common.machinecode import GB10, Arch
from builder.compile.build import HOST_SUFFIXES, CompiledUnit
from builder.compile.costs import cost_of_units
from builder.compile.operators import (
    Discovery,
    OperatorName,
    RelatedUnits,
    demangled,
    known_operators,
    operators_behind,
    sibling_units,
)
from builder.compile.sources import Sources, dead_guards, evaluate, touched
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.compile.changes import SourceChange
    from builder.compile.operators import Operator
    from builder.compile.sources import BuildRecipe, SourceTree, Unit


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A release's build for an architecture list: what runs on SM121, and the cost of a change."""

    source: SourceTree
    recipe: BuildRecipe
    #: units compiled for SM12x whose guards exclude their kernels there
    dead: dict[str, dict[str, str]]
    changed: tuple[str, ...]
    units: tuple[Unit, ...]

    @property
    def extensions(self) -> list[str]:
        """Extensions that the changed units belong to."""
        return sorted({unit.extension for unit in self.units})


class UnitRow(Part, frozen=True, kw_only=True):
    """A unit, its targets, and whether a GB10 runs them."""

    path: Text
    extension: Text
    gencode: Annotated[tuple[Text, ...], Meta(description="VIRTUAL,REAL of each target")]
    runs_on_sm121: bool

    @classmethod
    def of(cls, unit: Unit) -> UnitRow:
        """The row for a unit."""
        return cls(
            path=unit.path,
            extension=unit.extension,
            gencode=gencode_of(unit),
            runs_on_sm121=any(runs_on_gb10(real) for _, real in unit.gencodes),
        )


def gencode_of(unit: Unit) -> tuple[str, ...]:
    """``compute_121a,sm_121a`` for each target of a unit."""
    return tuple(f"{virtual},{real}" for virtual, real in unit.gencodes)


def runs_on_gb10(real: str) -> bool:
    """Whether a GB10 loads code for a target (``sm_120f``), or its driver compiles the PTX."""
    return runs_on(real, GB10)


def runs_on(real: str, device: tuple[int, int]) -> bool:
    """The same for a compute capability."""
    kind, _, number = real.partition("_")
    arch = Arch.parse(f"sm_{number}")
    return arch.compiles_on(device) if kind == "compute" else arch.loads_on(device)


def sm12x_units(recipe: BuildRecipe) -> list[Unit]:
    """Units that are compiled only for 12.x."""
    return [
        unit
        for _, unit in sorted(recipe.units.items())
        if unit.gencodes and all(1200 <= arch < 1300 for arch in unit.cuda_arch)
        if "sm12" in unit.path.rsplit("/", 1)[-1]
    ]


def outcome(source: SourceTree, arch_list: str, cuda: str, changed: Sequence[str] = ()) -> Outcome:
    """Evaluate a release's build for an architecture list.

    Raises:
        UsageError: a changed file is not in the sources, or the build files cannot be evaluated.
        EngineError: cmake is missing.
    """
    recipe = evaluate(source, arch_list, cuda)
    sources = Sources(source.root, recipe.generated)
    for path in changed:
        if path not in sources.texts:
            raise UsageError(
                f"vllm {source.version} has no source file {path}"
                f"{did_you_mean(path, sources.texts)}"
            )
    dead = {unit.path: dead_guards(sources, unit) for unit in sm12x_units(recipe)}
    return Outcome(
        source=source,
        recipe=recipe,
        dead={path: guards for path, guards in dead.items() if guards},
        changed=tuple(changed),
        units=tuple(touched(sources, recipe, changed)),
    )


# ---------------------------------------------------------------------------------------- operators


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


# ---------------------------------------------------------------------------------------- documents


class DeadKernels(Part, frozen=True, kw_only=True):
    """A unit for SM12x whose kernels a guard leaves out on SM121."""

    unit: Text
    guard: Text
    where: Text
    condition: Text


class CompiledRelease(Document, frozen=True, kw_only=True):
    """What a release's build would compile, and the cost of a change."""

    vllm: Text
    source_sha256: Annotated[str, Meta(description="empty for your own source tree")]
    cuda: Text
    arch_list: Text
    archs: tuple[Text, ...]
    supported_archs: tuple[Text, ...]
    sm12x_units: Annotated[
        tuple[UnitRow, ...], Meta(description="sources that were written for this family")
    ]
    dead: tuple[DeadKernels, ...]
    changed: tuple[Text, ...]
    rebuild: Annotated[
        tuple[UnitRow | Text, ...],
        Meta(description="the units of the changed files; only paths from `compile run --dry-run`"),
    ]
    units: Annotated[Count, Meta(description="of the whole release")]
    external_projects: tuple[Text, ...]
    operators: Annotated[
        tuple[Row, ...] | None,
        Meta(description="with --operators: every CUDA unit, and what a change to it compiles"),
    ] = None
    jobs: Annotated[Count | None, Meta(description="units compiled at once")] = None

    @classmethod
    def of(
        cls,
        build: Outcome,
        rebuild: Iterable[UnitRow | str],
        *,
        operators: Iterable[Row] | None = None,
        jobs: int | None = None,
    ) -> CompiledRelease:
        """The document for an outcome."""
        recipe = build.recipe
        guards = Sources(build.source.root).guards if build.dead else {}
        dead = (
            DeadKernels(unit=path, guard=guard, where=where, condition=guards[guard])
            for path, rows in build.dead.items()
            for guard, where in rows.items()
        )
        return cls(
            vllm=build.source.version,
            source_sha256=build.source.sha256,
            cuda=recipe.cuda,
            arch_list=recipe.arch_list,
            archs=tuple(recipe.archs),
            supported_archs=tuple(recipe.supported),
            sm12x_units=tuple(map(UnitRow.of, sm12x_units(recipe))),
            dead=tuple(dead),
            changed=build.changed,
            rebuild=tuple(rebuild),
            units=len(recipe.units),
            external_projects=tuple(recipe.external),
            operators=None if operators is None else tuple(operators),
            jobs=jobs,
        )


class CompileRun(Document, frozen=True, kw_only=True):
    """Units that were compiled, and their machine code."""

    vllm: Text
    units: tuple[CompiledUnit, ...]
    passed: Annotated[bool, Meta(description="false if some unit contains only traps")]
