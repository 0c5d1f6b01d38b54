"""A plan as JSON: printed, and stored in images."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from builder.common.document import Count, Digest, Document, Part, Sha256, Text, always
from builder.common.documents.compiled import CompiledCode, Input, PinnedWheel
from builder.common.documents.pulls import PullReport

#: The state of a layer on a base.
State = Literal[
    "needed", "applied", "upstream", "not-applicable", "needs-rebuild", "drift", "ambiguous"
]


class PlannedBase(Part, frozen=True, kw_only=True):
    """The pinned base."""

    kind: Text
    ref: Text
    digest: Digest
    platform: Annotated[str, Meta(pattern="^linux/")]
    python: Annotated[str, Meta(pattern=r"^3\.\d+$(?!\n)")]
    site_packages: Annotated[str, Meta(pattern="^/")]
    interpreter: Text
    packages: Annotated[
        dict[str, Text], Meta(description="versions by normalised distribution name")
    ]
    wheels: tuple[PinnedWheel, ...] = ()


class PlannedFile(Part, frozen=True, kw_only=True):
    """A file that a layer changes."""

    path: Annotated[str, Meta(pattern="^[^/]", description="below site-packages")]
    before: Annotated[Sha256 | None, Meta(description="null: the file is new")]
    after: Annotated[Sha256 | None, Meta(description="null: the file is removed")]
    size: Annotated[Count, Meta(description="bytes afterwards")]


class PlannedLayer(Part, frozen=True, kw_only=True):
    """A layer and its state."""

    name: Text
    state: State
    reason: Text
    variant: str | None
    digest: Annotated[Sha256, Meta(description="of the rendered layer")]
    files: tuple[PlannedFile, ...]
    since: Annotated[Text | None, Meta(description="the release that has the fix")] = None
    compile: CompiledCode | None = None
    notes: tuple[Text, ...] = ()
    inputs: Annotated[
        tuple[Input, ...], Meta(description="pinned wheels and files out of wheels")
    ] = ()
    env: dict[str, str] = field(default_factory=dict)
    serve_flags: tuple[Text, ...] = ()
    moe_serve_flags: tuple[Text, ...] = ()


class ExpectedChoice(Part, frozen=True, kw_only=True):
    """What vLLM must do with a kind of layer."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": ["line"]}, {"required": ["selected"]}, {"required": ["refused"]}]
    }

    kind: Text
    line: Annotated[Text | None, Meta(description="part of a log line")] = None
    selected: Annotated[
        Text | None, Meta(description="pattern for vLLM's name of what it selects")
    ] = None
    refused: Annotated[
        Text | None, Meta(description="part of the message with which vLLM refuses")
    ] = None

    def __post_init__(self) -> None:
        """Refuse an expectation with none or several results.

        Raises:
            ValueError: it has none or several.
        """
        if sum(bool(word) for word in (self.line, self.selected, self.refused)) != 1:
            raise ValueError(f"{self.kind} must have one of line, selected and refused")


class ImageInputs(Part, frozen=True, kw_only=True):
    """What an image's bytes depend on, besides base and layers."""

    version: Annotated[Text, Meta(description="version of spark-build that makes the image")]
    files: Annotated[Digest, Meta(description="of the files that it adds to every image")]
    epoch: Annotated[
        Count, Meta(description="time of every file and of the image: seconds since 1970")
    ]
    single_layer: Annotated[bool, Meta(description="everything that is added is one layer")]


class PlanDocument(Document, frozen=True, kw_only=True):
    """A plan: the state of each layer on a base."""

    schema: Literal[2] = always(2)  # type: ignore[assignment]
    plan_digest: Digest
    name: Annotated[Text, Meta(description="a short name for tags")]
    profiles: tuple[Text, ...]
    base: PlannedBase
    layers: Annotated[tuple[PlannedLayer, ...], Meta(description="in order of application")]
    env: Annotated[dict[str, str], Meta(description="variables that the image sets")]
    serve_flags: Annotated[tuple[Text, ...], Meta(description="`vllm serve` flags of the profile")]
    moe_serve_flags: Annotated[
        tuple[Text, ...], Meta(description="flags for MoE models that its kernels support")
    ]
    expect: Annotated[tuple[ExpectedChoice, ...], Meta(description="what vLLM must log on SM121")]
    build: ImageInputs
    hints: Annotated[tuple[Text, ...], Meta(description="for readers; not part of the digest")]
    pulls: tuple[PullReport, ...] = ()


class BakedPlan(PlanDocument, frozen=True, kw_only=True):
    """A plan in an image; older ones lack the build inputs."""

    schema: Literal[1, 2]  # type: ignore[assignment]
    name: Text = ""
    profiles: tuple[Text, ...] = ()
    build: ImageInputs | None = None  # type: ignore[assignment]
    hints: tuple[Text, ...] = ()


class AppliedPlan(PlanDocument, frozen=True, kw_only=True):
    """A plan for a directory, and whether it was applied."""

    directory: Annotated[str, Meta(pattern="^/")]
    written: Annotated[bool, Meta(description="false with --dry-run")]
