"""The JSON of ``compile wheel``, and the ``companion.json`` in an extension wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.compile.link import Runtime
from builder.compile.outcome import UnitRow
from builder.compile.registration import OperatorName
from builder.documents.compiled import Input
from builder.util.documents import Count, Document, Part, Seconds, Sha256, Text, always

if TYPE_CHECKING:
    from builder.compile.kernelcheck import KernelProof
    from builder.compile.link import Linked
    from builder.compile.wheelplan import WheelPlan


Gigabytes = Annotated[float, Meta(ge=0)]


class CompilerVersions(Part, frozen=True, kw_only=True):
    """The versions of both compilers."""

    nvcc: Text
    host: Text


class KernelFacts(Part, frozen=True, kw_only=True):
    """The kernels of a library; all fields but the first two only if no instruction is known."""

    by_target: Annotated[dict[str, Count], Meta(description="kernels by target")]
    instructions: Annotated[dict[str, Count], Meta(description="tensor-core instructions by name")]
    writing: Annotated[
        Count | None,
        Meta(description="kernels that write to memory; where no instruction is known to tell"),
    ] = None
    from_ptx: Annotated[
        Count | None, Meta(description="kernels that the driver compiles on SM121")
    ] = None
    as_released: Annotated[
        tuple[Text, ...] | None, Meta(description="kernels that do not, like those of the release")
    ] = None

    @classmethod
    def of(cls, proof: KernelProof) -> KernelFacts:
        """The facts from a check of kernels."""
        told = proof.writing is not None
        return cls(
            by_target=dict(proof.kernels),
            instructions=dict(proof.instructions),
            writing=proof.writing,
            from_ptx=proof.from_ptx if told else None,
            as_released=proof.as_released if told else None,
        )


class WheelFacts(Part, frozen=True, kw_only=True):
    """The wheel's contents, in its ``companion.json``, without machine or time."""

    schema: Literal[1] = always(1)
    name: Text
    mark: Annotated[
        Text,
        Meta(description="the source location that torch shows for the operators"),
    ]
    vllm: Text
    source_sha256: Annotated[str, Meta(description="of the source archive; empty for a folder")]
    change: Text
    changed: Annotated[
        dict[str, Sha256], Meta(description="changed source file -> sha256 of its new text")
    ]
    torch: Text
    cuda: Text
    compilers: CompilerVersions
    toolkit: Annotated[
        tuple[Input, ...],
        Meta(description="the released wheels that nvcc comes from; empty where it was installed"),
    ]
    cuda_runtime: Annotated[
        Runtime,
        Meta(description="shared: the base's own; static: one of its own"),
    ]
    flags: tuple[Text, ...]
    flags_between: Annotated[
        tuple[Text, ...],
        Meta(description="of the units between, instead of the release's own definitions"),
    ]
    targets: tuple[Text, ...]
    capabilities: Annotated[
        tuple[tuple[Count, Count], ...],
        Meta(description="compute capabilities on which it is loaded"),
    ]
    units: tuple[Text, ...]
    modules: Annotated[tuple[Text, ...], Meta(description="extensions that are loaded before it")]
    operators: tuple[OperatorName, ...]
    library: Text
    library_sha256: Sha256
    older_glibc: Annotated[
        dict[str, Text],
        Meta(
            description="function of the C library -> the version that is asked for instead of "
            "the newest"
        ),
    ]
    kernels: KernelFacts


class AbiFacts(Part, frozen=True, kw_only=True):
    """The library's requirements from the base."""

    symbols: Annotated[
        dict[str, Count],
        Meta(description="library of the base -> symbols that are taken from it"),
    ]
    needed: tuple[Text, ...]
    newest_versions: Annotated[
        dict[str, Text], Meta(description="family of versions -> the newest required version")
    ]
    faults: tuple[Text, ...]
    stand_ins: Annotated[
        dict[str, Text],
        Meta(description="library that the base lacks -> the file that was read instead"),
    ]

    @classmethod
    def of(cls, linked: Linked) -> AbiFacts:
        """The facts of a linked library."""
        proof = linked.proof
        return cls(
            symbols=dict(proof.symbols),
            needed=proof.needed,
            newest_versions=dict(proof.versions),
            faults=proof.faults,
            stand_ins=dict(linked.base.stand_ins),
        )


class WheelUnit(Part, frozen=True, kw_only=True):
    """A unit of the wheel."""

    path: Text
    seconds: Annotated[
        Seconds, Meta(description="seconds of its compilation, possibly in an earlier run")
    ]


class WheelTimes(Part, frozen=True, kw_only=True):
    """Seconds of this run."""

    compile: Seconds
    link_and_proof: Seconds


class WheelReport(Document, frozen=True, kw_only=True):
    """An extension wheel, with its checks."""

    wheel: Annotated[Text, Meta(description="its path")]
    sha256: Sha256
    size: Count
    companion: WheelFacts
    abi: AbiFacts
    units: tuple[WheelUnit, ...]
    seconds: WheelTimes
    peak_memory_gb: Annotated[
        Gigabytes | None,
        Meta(
            description="of the largest program that this run started; null where a toolkit "
            "image compiled"
        ),
    ]
    passed: Annotated[bool, Meta(extra_json_schema={"const": True})]


class PlannedWheel(Document, frozen=True, kw_only=True):
    """The plan of an extension wheel."""

    vllm: Text
    rebuild: Annotated[tuple[UnitRow, ...], Meta(description="units that the change reaches")]
    between: Annotated[
        tuple[UnitRow, ...], Meta(description="units between these and their operators")
    ]
    operators: tuple[Text, ...]
    units: Annotated[Count, Meta(description="of the whole release")]
    jobs: Annotated[Count, Meta(description="units compiled at once")]

    @classmethod
    def of(cls, plan: WheelPlan, vllm: str, jobs: int) -> PlannedWheel:
        """The document for a plan."""
        return cls(
            vllm=vllm,
            rebuild=tuple(map(UnitRow.of, plan.rebuilt)),
            between=tuple(map(UnitRow.of, plan.siblings)),
            operators=tuple(operator.name for operator in plan.operators),
            units=len(plan.recipe.units),
            jobs=jobs,
        )
