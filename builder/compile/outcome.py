"""Shows what a build of a release for SM121 would contain, without compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.compile.cmake import evaluate
from builder.compile.includes import Sources, dead_guards, touched
from builder.errors import UsageError, did_you_mean
from builder.machinecode.fatbin import GB10, Arch
from builder.util.documents import Part, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.cmake import BuildRecipe, Unit
    from builder.compile.source import SourceTree


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
