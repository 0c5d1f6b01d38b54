"""The documents of ``compile show`` and ``compile run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.compile.includes import Sources
from builder.compile.operatortable import Row
from builder.compile.outcome import UnitRow, sm12x_units
from builder.compile.unitcheck import CompiledUnit
from builder.util.documents import Count, Document, Part, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.compile.outcome import Outcome


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
        found: Outcome,
        rebuild: Iterable[UnitRow | str],
        *,
        operators: Iterable[Row] | None = None,
        jobs: int | None = None,
    ) -> CompiledRelease:
        """The document for an outcome."""
        recipe = found.recipe
        guards = Sources(found.source.root).guards if found.dead else {}
        dead = (
            DeadKernels(unit=path, guard=guard, where=where, condition=guards[guard])
            for path, rows in found.dead.items()
            for guard, where in rows.items()
        )
        return cls(
            vllm=found.source.version,
            source_sha256=found.source.sha256,
            cuda=recipe.cuda,
            arch_list=recipe.arch_list,
            archs=tuple(recipe.archs),
            supported_archs=tuple(recipe.supported),
            sm12x_units=tuple(map(UnitRow.of, sm12x_units(recipe))),
            dead=tuple(dead),
            changed=found.changed,
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
