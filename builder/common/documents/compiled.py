"""Compiled code in a plan: the machine code of the base, and the compile stage."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from builder.common.document import Count, Digest, Part, Sha256, Text


class Input(Part, frozen=True, kw_only=True):
    """A pinned wheel or archive, or a file of one."""

    distribution: Text
    version: Text
    filename: Text
    sha256: Sha256
    size: Count | None = None
    platform: Text | None = None
    python: Text | None = None
    member: Text | None = None
    member_sha256: Sha256 | None = field(default=None, name="member-sha256")


class PinnedWheel(Part, frozen=True, kw_only=True):
    """A wheel by its sha256."""

    filename: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]{0,195}\.whl$(?!\n)")]
    sha256: Sha256


class CompiledWheel(Part, frozen=True, kw_only=True):
    """The wheel of a compile stage."""

    filename: Text
    sha256: Sha256


class MachineCode(Part, frozen=True, kw_only=True):
    """Facts about the base's machine code."""

    module: Annotated[str, Meta(description="empty where the base has no compiled module")]
    sha256: str
    how: Literal["runs", "trap", "not-loadable", "absent", "no-code"]
    arch: str | None = None
    guard: Annotated[
        str | None,
        Meta(description="part of the kernels' names that shows the supported chips"),
    ] = None


class SourceFile(Part, frozen=True, kw_only=True):
    """A source file that changes; null means that it does not exist before or after."""

    path: Text
    before: Sha256 | None
    after: Sha256 | None


class SourceUnit(Part, frozen=True, kw_only=True):
    """A translation unit that is compiled."""

    path: Text
    extension: Text
    gencode: tuple[Text, ...]


class ToolkitImage(Part, frozen=True, kw_only=True):
    """The image that a stage compiles in."""

    image: Text
    digest: Digest


class CompiledPull(Part, frozen=True, kw_only=True):
    """A compiled pull request."""

    request: Text
    repository: Text
    number: Count
    commit: Text
    sha256: Sha256


class StageRequest(Part, frozen=True, kw_only=True):
    """The inputs of a compile stage."""

    change: Annotated[
        Text,
        Meta(
            description="what is changed, by name; several that are compiled together are "
            "joined by '-'"
        ),
    ]
    arch: Text
    platform: Text
    vllm: Text
    torch: Annotated[Text, Meta(description="of the base; headers come from the same release")]
    module: Annotated[
        Sha256,
        Meta(description="the extension that the compiled code extends and is checked against"),
    ]
    compilers: Annotated[
        dict[str, str],
        Meta(
            description="versions by name: nvcc, and the host's compiler",
            extra_json_schema={"required": ["nvcc"]},
        ),
    ]
    operators: Annotated[
        tuple[Text, ...],
        Meta(min_length=1, description="torch operators that are registered again"),
    ]
    files: tuple[SourceFile, ...]
    units: Annotated[
        tuple[SourceUnit, ...],
        Meta(
            min_length=1,
            description="those that change, and those between them and the operators",
        ),
    ]
    inputs: Annotated[
        tuple[Input, ...],
        Meta(description="the source archive, and the wheels that headers are taken from"),
    ]
    toolkit: Annotated[ToolkitImage | None, Meta(description="absent if this machine compiles")] = (
        None
    )
    pulls: Annotated[
        tuple[CompiledPull, ...] | None,
        Meta(description="by commit and the sha256 of the diff"),
    ] = None


class FoundSources(Part, frozen=True, kw_only=True):
    """The state of a pull request's change in the release's source archive."""

    change: Text
    filename: Annotated[Text, Meta(description="the archive")]
    sha256: Sha256
    found: Literal["to-compile", "there", "nothing", "conflict", "not-compiled"]
    unreached: Annotated[
        tuple[Text, ...] | None,
        Meta(description="changed files without effect: no unit is compiled from them"),
    ] = None


class CompiledCode(Part, frozen=True, kw_only=True):
    """Compiled code of a layer: the base's, and the compile stage for a change."""

    code: MachineCode | None = None
    wheel: Annotated[
        CompiledWheel | None, Meta(description="the output of the stage; null before it has run")
    ]
    carrier: Annotated[
        Text | None,
        Meta(description="the layer whose extension wheel includes this layer's change too"),
    ] = field(default=None, name="with")
    stage: StageRequest | None = None
    sources: FoundSources | None = None
