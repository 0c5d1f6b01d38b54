"""A recipe: what serves one model, with where each value comes from."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from builder.common.document import Document, Part, Text
from builder.serving.memorydocuments import KvCache, MemoryFigure
from builder.serving.models import KnownFailure, Measured

#: One Spark; two that share a model, without or with Ray; two, each with the whole model.
Topology = Literal["solo", "tp2", "tp2-ray", "two-solos"]


class Setting(Part, frozen=True, kw_only=True):
    """A flag or a variable, and where its value comes from."""

    name: Text
    value: Annotated[str | None, Meta(description="null: the flag has no value")]
    origin: Annotated[Text, Meta(description="model, profile, topology or --set, with the source")]

    @property
    def words(self) -> tuple[str, ...]:
        """The setting as words of a command line."""
        return (self.name,) if self.value is None else (self.name, self.value)


class LeftOut(Part, frozen=True, kw_only=True):
    """A setting that is not in the recipe, with the reason."""

    name: Text
    value: str | None
    origin: Text
    reason: Text


class RecipeNode(Part, frozen=True, kw_only=True):
    """One Spark, with its own settings."""

    rank: Annotated[int, Meta(ge=0)]
    address: Annotated[str, Meta(description="as the other nodes and clients reach it")] = ""
    flags: tuple[Setting, ...] = ()
    env: tuple[Setting, ...] = ()


class RecipeImage(Part, frozen=True, kw_only=True):
    """The image that containers run."""

    ref: Text
    build: Annotated[str, Meta(description="command that builds it; absent: nothing to build")] = ""
    mod: Annotated[str, Meta(description="mod that has the same effect on the official image")] = ""
    official: Annotated[str, Meta(description="the image that the mod is for")] = ""


class PluginFile(Part, frozen=True, kw_only=True):
    """A file that vLLM needs by its path: of the checkpoint, or one that the user chose."""

    name: Text
    path: Annotated[Text, Meta(description="in the container")]
    host: Annotated[str, Meta(description="on the machine; absent: next to the recipe")] = ""
    chosen: Annotated[bool, Meta(description="with --set; else it comes with the checkpoint")] = (
        False
    )

    @property
    def source(self) -> str:
        """The path on the machine, absolute or from the recipe's folder."""
        return self.host or f"./{self.name}"


class RecipeMemory(Part, frozen=True, kw_only=True):
    """An estimate whether the context fits into the memory that the flags give vLLM."""

    checkpoint: Annotated[
        str, Meta(description="the folder that was read; absent: the model's file alone")
    ] = ""
    utilization: Annotated[float, Meta(description="share of the memory that vLLM takes")]
    source: Annotated[Text, Meta(description="the source of the share")]
    weights: MemoryFigure | None
    kv_cache: KvCache | None
    room: Annotated[
        int | None,
        Meta(description="bytes for the KV cache, below zero: missing; null: unknown"),
    ]
    fits: Literal["yes", "no", "unknown"]


class Recipe(Document, frozen=True, kw_only=True):
    """What serves a model."""

    model: Text
    id: Annotated[Text, Meta(description="on Hugging Face")]
    revision: str = ""
    vllm: Text
    profile: Text
    made_by: Annotated[Text, Meta(description="command that makes this recipe")]
    topology: Topology
    image: RecipeImage
    port: Annotated[int, Meta(ge=1, le=65535)]
    flags: Annotated[tuple[Setting, ...], Meta(description="of `vllm serve`, on every node")]
    env: Annotated[tuple[Setting, ...], Meta(description="variables, on every node")]
    nodes: Annotated[tuple[RecipeNode, ...], Meta(min_length=1)]
    plugins: tuple[PluginFile, ...] = ()
    memory: Annotated[RecipeMemory | None, Meta(description="absent: one model over two nodes")] = (
        None
    )
    left_out: tuple[LeftOut, ...] = ()
    unknown: Annotated[
        tuple[str, ...], Meta(description="values of the model that no source gives")
    ] = ()
    notes: tuple[Text, ...] = ()
    failures: Annotated[
        tuple[KnownFailure, ...], Meta(description="known failures of the model, and their fixes")
    ] = ()
    measured: Annotated[
        tuple[Measured, ...], Meta(description="by others; not with this exact recipe")
    ] = ()

    def command(self, node: RecipeNode) -> list[str]:
        """``vllm serve`` with all flags of one node."""
        revision = ("--revision", self.revision) if self.revision else ()
        flags = (word for flag in (*self.flags, *node.flags) for word in flag.words)
        return ["vllm", "serve", self.id, *revision, *flags]

    def variables(self, node: RecipeNode) -> dict[str, str]:
        """All variables of one node."""
        return {one.name: one.value or "" for one in (*self.env, *node.env)}


class RecipeText(Document, frozen=True, kw_only=True):
    """A recipe in the format of a tool."""

    format: Text
    recipe: Annotated[
        Recipe | None, Meta(description="absent: TensorRT-LLM's, which has no profile")
    ] = None
    files: Annotated[dict[str, str], Meta(description="text by file name, the first is the main")]
    written: Annotated[tuple[Text, ...], Meta(description="files that -o wrote")] = ()
