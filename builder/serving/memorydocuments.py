"""The memory of a GB10 with a model: the document, and constants for all models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from builder.common.document import Count, Document, Part, Text

GIB = 2**30
#: dtypes of layers that are not quantised
SIXTEEN_BITS = ("BF16", "F16")


class MemoryFigure(Part, frozen=True, kw_only=True):
    """A share of the memory, with its source."""

    bytes: Count
    at_least: Annotated[bool, Meta(description="the true figure may be larger")] = False
    source: Text


TOTAL = MemoryFigure(
    bytes=int(121.69 * GIB),
    source="what vLLM reports on a GB10 (its message: Free memory on device cuda:0)",
)
ACTIVATIONS = MemoryFigure(
    bytes=5 * GIB,
    source="public server logs of GB10s, 2026-05: 3.4 to 4.8 GiB beside weights and KV cache, with "
    "the default --max-num-batched-tokens",
)
GRAPHS = MemoryFigure(
    bytes=2 * GIB,
    source="public server logs of GB10s, 2026-05 and 2026-06: 0.03 to 1.73 GiB",
)
SYSTEM = MemoryFigure(
    bytes=12 * GIB,
    source="vllm-project/recipes #632: vLLM's default share, 0.92, runs out at startup; 0.90 is in "
    "NVIDIA's deployment guide for DGX Spark; reports of frozen GB10s: leave 10 GB or more",
)
#: The share of the memory above which the system has too little left.
LARGEST_FRACTION = math.floor((TOTAL.bytes - SYSTEM.bytes) * 100 / TOTAL.bytes) / 100
#: The share that a GB10 can give, where nothing else is known of a model: vllm-project/recipes #632
#: started with it, and not with vLLM's default.
USUAL_FRACTION = 0.85


def fraction_refusal(text: str) -> str:
    """Why vLLM refuses a share of the memory; empty if it accepts it, or it is not a number.

    Valid values are above 0 and at most 1 (vllm/config/cache.py).
    """
    try:
        possible = 0 < float(text) <= 1
    except ValueError:
        return ""
    return "" if possible else f"--gpu-memory-utilization takes a fraction of 1, not {text}"


class WeightsHeld(Part, frozen=True, kw_only=True):
    """The tensors of one kind of layer that have one dtype."""

    group: Text
    dtype: Annotated[Text, Meta(description="the file's name of the dtype; NVFP4 is mostly U8")]
    tensors: Count
    bytes: Count
    read: Annotated[Count | None, Meta(description="bytes read for each token; null: unknown")]


class KvCache(Part, frozen=True, kw_only=True):
    """The KV cache of sequences of the given length."""

    dtype: Text
    source: Text
    context: Count
    sequences: Count
    full_layers: Count
    sliding_layers: Count
    recurrent_layers: Annotated[Count, Meta(description="Mamba and linear attention")]
    state_bytes: Annotated[Count, Meta(description="of the recurrent layers, for one sequence")]
    bytes_per_token: Annotated[
        Count, Meta(description="in layers that store the whole context, for one sequence")
    ]
    bytes: Count

    @property
    def reserved(self) -> int:
        """The bytes to reserve: vLLM rounds up to blocks and keeps one empty.

        The margin of 5 % and 256 MiB is our choice.
        """
        mebi = 2**20
        return (self.bytes * 105 // 100 // mebi + 257) * mebi


class Ceiling(Part, frozen=True, kw_only=True):
    """The upper limit of tokens per second for one stream, for any kernel."""

    bytes_per_token: Annotated[Count, Meta(description="weights; without the KV cache")]
    tokens_per_second: Annotated[float, Meta(ge=0)]
    source: Text

    @property
    def text(self) -> str:
        """The ceiling as text."""
        return (
            f"{self.tokens_per_second} tokens/s for one stream "
            f"({self.source}: {self.bytes_per_token / 1e9:.2f} GB)"
        )


class Utilization(Part, frozen=True, kw_only=True):
    """Values of ``--gpu-memory-utilization``."""

    least: Annotated[float | None, Meta(description="null: something is unknown")]
    most: Annotated[float, Meta(description="leaves the system its memory")]


class MemoryEstimate(Document, frozen=True, kw_only=True):
    """Memory of one GB10 with a model, before it is started."""

    model: Text
    total: MemoryFigure
    weights: MemoryFigure | None
    kv_cache: KvCache | None
    activations: MemoryFigure
    cuda_graphs: MemoryFigure
    system: MemoryFigure
    fits: Literal["yes", "no", "unknown"]
    utilization: Utilization
    room_for_kv_cache: Annotated[
        int | None, Meta(description="bytes at most, below zero: missing; null: unknown")
    ]
    flags: Annotated[tuple[Text, ...], Meta(description="of `vllm serve`")]
    ceiling: Ceiling | None
    held: Annotated[tuple[WeightsHeld, ...], Meta(description="from the headers of the files")] = ()
    unknown: Annotated[tuple[Text, ...], Meta(description="and why")] = ()
    not_counted: tuple[Text, ...] = ()
