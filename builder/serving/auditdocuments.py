"""How the modules of a model are quantised: what vLLM reports, and what `audit` prints."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from builder.common.document import Count, Document, Part, Text
from builder.serving.memorydocuments import Ceiling

Share = Annotated[float, Meta(ge=0, le=1)]


class LoadedModule(Part, frozen=True, kw_only=True, rename={"kind": "class"}):
    """A module with tensors of its own."""

    name: str
    kind: Annotated[Text, Meta(description="its class")]
    bytes: Annotated[
        dict[Text, Count], Meta(description="bytes of its parameters, by torch's name of the dtype")
    ]
    buffers: Annotated[Count, Meta(description="bytes")] = 0
    method: Annotated[Text | None, Meta(description="class of its quantisation method")] = None
    scheme: Annotated[Text | None, Meta(description="class of its compressed-tensors scheme")] = (
        None
    )
    kernel: Annotated[Text | None, Meta(description="class of its kernel, or of its experts")] = (
        None
    )
    shares: Annotated[
        Text | None, Meta(description="module that shares this memory, and counts it")
    ] = None
    experts: Annotated[
        tuple[Count, Count] | None,
        Meta(description="experts that a token uses, experts in the layer"),
    ] = None


class Renamed(Part, frozen=True, kw_only=True):
    """How vLLM renames a checkpoint's tensors, in this order."""

    substr: dict[str, str] = msgspec.field(default_factory=dict)
    prefix: dict[str, str] = msgspec.field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """vLLM's name for a tensor of the checkpoint."""
        for old, new in self.substr.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefix.items():
            if name.startswith(old):
                name = name.replace(old, new, 1)
        return name


class LoadedModel(Part, frozen=True, kw_only=True):
    """The document that `spark_build_audit.py` writes inside vLLM."""

    schema: Literal[1]
    vllm: Text
    model: str
    architecture: Text
    rank: Count
    world_size: Annotated[int, Meta(ge=1)]
    packed: Annotated[
        dict[str, tuple[str, ...]], Meta(description="modules into which vLLM merges several")
    ]
    renamed: Renamed = Renamed()
    modules: Annotated[tuple[LoadedModule, ...], Meta(min_length=1)]


class Method(Part, frozen=True, kw_only=True):
    """Modules with the same quantisation method."""

    name: Annotated[
        Text,
        Meta(description="class of vLLM's method, or of a module without one; kind, by headers"),
    ]
    kernel: Annotated[str, Meta(description="class of vLLM's kernel, where it has one")] = ""
    modules: Annotated[Count | None, Meta(description="null: unknown")]
    bytes: Annotated[Count | None, Meta(description="null: unknown")]
    read: Annotated[Count | None, Meta(description="bytes read for each token; null: unknown")]
    dtypes: Annotated[dict[str, Count], Meta(description="bytes by dtype")] = msgspec.field(
        default_factory=dict
    )
    source: Annotated[str, Meta(description="for a model's file: the source")] = ""


class KeptLayers(Part, frozen=True, kw_only=True):
    """Modules of one name that are not quantised, over all layers."""

    name: Annotated[Text, Meta(description="* is the number of a layer")]
    group: Text
    layers: Annotated[str, Meta(description="numbers, such as 0-11, 13; empty: not in a layer")]
    modules: Count
    bytes: Count
    read: Annotated[Count | None, Meta(description="bytes read for each token; null: unknown")]
    share: Annotated[Share | None, Meta(description="of all that a token reads; null: unknown")]


class Difference(Part, frozen=True, kw_only=True):
    """Modules whose form differs between the checkpoint and vLLM."""

    name: Annotated[Text, Meta(description="* is the number of a layer")]
    layers: str
    modules: Count
    bytes: Annotated[Count, Meta(description="in vLLM")]
    checkpoint: Annotated[Text, Meta(description="kinds, by the headers")]
    loaded: Annotated[Text, Meta(description="vLLM's method")]
    what: Literal["not quantised in vLLM", "quantised by vLLM"]


class Unmatched(Part, frozen=True, kw_only=True):
    """Modules that only the checkpoint or only vLLM has."""

    name: Text
    layers: str
    modules: Count
    bytes: Count


class Comparison(Part, frozen=True, kw_only=True):
    """What vLLM loaded, compared with a checkpoint's headers."""

    checkpoint: Text
    same: Annotated[
        Count, Meta(description="modules that are the same in vLLM and in the checkpoint")
    ]
    differences: tuple[Difference, ...]
    only_checkpoint: tuple[Unmatched, ...]
    only_loaded: tuple[Unmatched, ...]

    @property
    def lost(self) -> tuple[Difference, ...]:
        """Layers in 16 bits that the checkpoint has quantised."""
        return tuple(one for one in self.differences if one.what == "not quantised in vLLM")


class Audit(Document, frozen=True, kw_only=True):
    """The modules of a model by quantisation method."""

    model: Text
    source: Annotated[
        Literal["headers", "model", "vllm"],
        Meta(description="headers of a checkpoint, a model's file, or a loaded model"),
    ]
    vllm: Annotated[str, Meta(description="the release that loaded it")] = ""
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1)] = 1
    bytes: Annotated[Count | None, Meta(description="weights of all modules; null: unknown")]
    at_least: Annotated[bool, Meta(description="the true bytes may be more")] = False
    buffers: Annotated[Count, Meta(description="bytes besides the weights")] = 0
    methods: tuple[Method, ...]
    kept: Annotated[
        tuple[KeptLayers, ...], Meta(description="in 16 bits or more; the most read first")
    ]
    ceiling: Ceiling | None
    compared: Comparison | None = None
    unknown: Annotated[tuple[Text, ...], Meta(description="and why")] = ()


class InsideFiles(Document, frozen=True, kw_only=True):
    """The files that `audit --inside` wrote."""

    written: tuple[Text, ...]
