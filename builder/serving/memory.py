"""Estimates whether a model fits into the memory of a GB10, before anything starts.

Unknown values stay unknown, and so does everything that depends on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from builder.common.document import Count, Document, Part, Text
from builder.errors import UsageError, did_you_mean
from builder.serving.checkpoint import (
    CONFIG,
    DRAFT,
    EMBEDDING,
    EXPERTS,
    HEAD,
    KV_DTYPES,
    VISION,
    KvNeed,
    ModelConfig,
    Unknown,
    checkpoint_tensors,
    decoded_config,
    kv_need,
    means_a_path,
    read_config,
    refuse_gguf,
    rows,
)
from builder.serving.models import Models
from builder.serving.options import MemoryRequest
from builder.serving.released import release_base
from builder.serving.serveflags import interface_of_wheels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.serving.models import Model
    from builder.serving.serveflags import ServeInterface


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
#: What is in use beside weights and KV cache while a server starts: activations, workspaces, CUDA
#: graphs.  A line through seven logs of GB10s (vLLM 0.19.2 to 0.27.1, 2,048 to 65,536 tokens of a
#: batch: 3.4 to 18.3 GiB); the largest difference is `OVERHEAD_ERROR`.
OVERHEAD = MemoryFigure(
    bytes=5 * GIB,
    source="seven server logs of GB10s, vLLM 0.19.2 to 0.27.1: 3.4 to 8.2 GiB at 2,048 to 4,096 "
    "--max-num-batched-tokens, 15 at 32,768, 18 at 65,536",
)
OVERHEAD_PER_TOKEN = 225 * 1024
OVERHEAD_ERROR = 3 * GIB
#: ``--max-num-batched-tokens`` that vLLM 0.22.1 to 0.33.0 choose by themselves on a GB10.
USUAL_BATCH = MemoryRequest.batched_tokens
#: How much more KV cache a release may take than `KvNeed` has, for layers whose state does not grow
#: with the context: at most 2.3 times, by 0.33.0 for nine models at 8,192 and 65,536 tokens.
STATES_TIMES = 3
#: More of it on each of several GB10s; one log (MiniMax-M2.7 in AWQ on two: 16.5 GiB in all).
OVERHEAD_BETWEEN_NODES = 11 * GIB
#: Free memory of a GB10 when a server starts: 102 to 116 GiB in reports.  The usual figure is for a
#: share that nobody chose; who chose one may have freed memory, so then only the most counts.
USUAL_FREE = 110 * GIB
MOST_FREE = 116 * GIB
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


def overhead(batched_tokens: int = USUAL_BATCH) -> MemoryFigure:
    """What is in use beside weights and KV cache, for the tokens of a batch."""
    size = OVERHEAD.bytes + OVERHEAD_PER_TOKEN * batched_tokens
    return MemoryFigure(bytes=size, source=OVERHEAD.source)


def verdict(
    weights: MemoryFigure | None, cache: KvCache | None, room: int | None, given: int | None = None
) -> Literal["yes", "no", "unknown"]:
    """Whether the KV cache fits into the room that is expected for it.

    The room may be larger or smaller by `OVERHEAD_ERROR`; in between it is unknown.  ``given`` are
    the bytes that the server shall take for it.
    """
    if room is None or weights is None:
        return "unknown"
    least, most = (
        room + error if given is None else min(room + error, given)
        for error in (-OVERHEAD_ERROR, OVERHEAD_ERROR)
    )
    if most < (cache.bytes if cache else 1):
        return "no"
    return "unknown" if cache is None or weights.at_least or least < cache.most else "yes"


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
    at_least: Annotated[
        bool, Meta(description="a release takes more for recurrent layers; ask `preflight`")
    ] = False

    @property
    def most(self) -> int:
        """The bytes that a release may take."""
        return self.bytes * (STATES_TIMES if self.at_least else 1)

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

    share: Annotated[float, Meta(description="asked for, or that of the flags")]
    least: Annotated[
        float | None, Meta(description="at which it surely fits; null: something is unknown")
    ]
    most: Annotated[float, Meta(description="leaves the system its memory")]


class MemoryEstimate(Document, frozen=True, kw_only=True):
    """Memory of one GB10 with a model, before it is started."""

    model: Text
    total: MemoryFigure
    weights: MemoryFigure | None
    kv_cache: KvCache | None
    overhead: Annotated[MemoryFigure, Meta(description="activations, workspaces and CUDA graphs")]
    overhead_error: Annotated[Count, Meta(description="bytes, more or less")]
    system: MemoryFigure
    fits: Literal["yes", "no", "unknown"]
    utilization: Utilization
    room_for_kv_cache: Annotated[
        int | None,
        Meta(description="bytes at utilization.share, below zero: missing; null: unknown"),
    ]
    room_at_most: Annotated[int | None, Meta(description="bytes at utilization.most")]
    flags: Annotated[tuple[Text, ...], Meta(description="of `vllm serve`")]
    ceiling: Ceiling | None
    held: Annotated[tuple[WeightsHeld, ...], Meta(description="from the headers of the files")] = ()
    unknown: Annotated[tuple[Text, ...], Meta(description="and why")] = ()
    not_counted: tuple[Text, ...] = ()


#: Bytes of a parameter by kind of layer: 4 bits and a scale of one byte for 16 values (NVFP4) or
#: for 32 values (MXFP4); of INT4 the scale of two bytes for 128 values of AWQ, GPTQ and AutoRound.
_PARAMETER_BYTES = {
    "nvfp4-linear": 0.5625, "nvfp4-moe": 0.5625, "w4a16-linear": 0.5625, "w4a16-moe": 0.5625,
    "mxfp4-moe": 0.53125, "mxfp8-linear": 1.03125, "mxfp8-moe": 1.03125, "fp8-linear": 1.0,
    "fp8-block": 1.0, "int4-linear": 0.515625, "int4-moe": 0.515625, "unquantized": 2.0,
}  # fmt: skip
#: Memory bandwidth of a GB10 (NVIDIA's data sheet of DGX Spark: 273 GB/s, LPDDR5X).
BANDWIDTH = 273_000_000_000


def expert_share(config: ModelConfig | None, groups: set[str]) -> tuple[int, int]:
    """The number of experts that a token uses, and the total.

    Raises:
        Unknown: a value is missing; the message names it.
    """
    if config is None:
        if EXPERTS not in groups:
            return 1, 1
        raise Unknown(f"no {CONFIG} gives the number of experts per token")
    used, total = config.routed_experts()
    if (total > 1) != (EXPERTS in groups):
        raise Unknown(f"{CONFIG} has {total} experts, which the names of the tensors contradict")
    return used, total


def bytes_read(group: str, size: int, share: tuple[int, int] | None, *, tied: bool) -> int | None:
    """Bytes that one token reads of a group; None: unknown."""
    if group in (VISION, DRAFT) or (group == EMBEDDING and not tied):
        return 0  # of an embedding one row is read, unless it is the output head too
    if group != EXPERTS:
        return size
    return None if share is None else size * share[0] // share[1]


def total(sizes: Iterable[int | None]) -> int | None:
    """The sum of sizes; None if one is unknown."""
    known = list(sizes)
    return None if None in known else sum(filter(None, known))


def ceiling(needed: Iterable[int | None], source: str) -> Ceiling | None:
    """The ceiling for the sizes that one token reads; None if one is unknown."""
    size = total(needed)
    words = f"273 GB/s over the weights that one token reads, {source}"
    return _ceiling(size, words) if size else None


def _ceiling(size: int, source: str) -> Ceiling:
    return Ceiling(
        bytes_per_token=size, tokens_per_second=round(BANDWIDTH / size, 1), source=source
    )


def weights_of_model(model: Model) -> tuple[MemoryFigure | None, Ceiling | None, list[str]]:
    """Weights and ceiling from a model's file, and the unknown values."""
    weights = limit = None
    unknown = []
    least = min((_PARAMETER_BYTES[kind] for kind in model.kinds()), default=None)
    if model.weight_bytes is not None:
        weights = MemoryFigure(bytes=model.weight_bytes.value, source=model.weight_bytes.source)
    elif model.parameters is not None and least is not None:
        weights = MemoryFigure(
            bytes=int(model.parameters.value * least), at_least=True,
            source=f"estimated: {model.parameters.value} parameters x {least} bytes, as if all "
            "layers were of its smallest kind",
        )  # fmt: skip
    else:
        unknown.append("weights: no source gives the bytes, or the parameters and kinds of layers")
    whole, active = model.parameters, model.active_parameters
    dense = whole is not None and active is not None and whole.value == active.value
    if model.token_bytes is not None:
        source = model.token_bytes.source
        limit = ceiling([model.token_bytes.value], f"by the model's file ({source})")
    elif dense and model.weight_bytes is not None:
        limit = _ceiling(
            model.weight_bytes.value,
            "273 GB/s over all weights of a dense model; vision layers count too, although a token "
            "does not read them",
        )
    elif model.active_parameters is not None and least is not None:
        size = int(model.active_parameters.value * least)
        limit = _ceiling(
            size,
            f"estimated: 273 GB/s over {model.active_parameters.value} active parameters x "
            f"{least} bytes; layers in 8 or 16 bits make it lower",
        )
    else:
        unknown.append("ceiling: no source gives the active parameters")
    return weights, limit, unknown


UTILIZATION, KV_BYTES, KV_DTYPE = (
    "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-dtype",
)  # fmt: skip


@dataclass
class _Parts:
    """The values from the checkpoint or from the model's file."""

    weights: MemoryFigure | None = None
    need: KvNeed | None = None
    context: int = 0
    ceiling: Ceiling | None = None
    #: the share that the model's file advises; None: of a folder, as little as it needs
    share: float | None = None
    weight_groups: tuple[WeightsHeld, ...] = ()
    unknown: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)


def memory_estimate(request: MemoryRequest) -> MemoryEstimate:
    """Estimate the memory of a checkpoint or a known model.

    Raises:
        SparkBuildError: the checkpoint, the model or the release cannot be read.
    """
    _asked_share(request)
    if request.kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise UsageError(
            f"--kv-cache-dtype {request.kv_cache_dtype} is not known on a GB10"
            f"{did_you_mean(request.kv_cache_dtype, KV_DTYPES)} "
            f"(known: auto, {', '.join(KV_DTYPES)})",
            hint="--kv-cache-dtype auto",
        )
    base = release_base(request.release) if request.release is not None else ""
    refuse_gguf(request.subject)
    folder = Path(request.subject)
    if folder.is_dir():
        parts = _from_folder(folder, request)
    elif means_a_path(request.subject):
        raise UsageError(
            f"{request.subject} is not a folder: name a checkpoint's folder or a model",
            hint="spark-build models list",
        )
    else:
        model = Models.discover(request.models).model(request.subject, or_folder=True)
        parts = _from_model(model)
        if model.config is None:
            _refuse_cache_options(request)
        else:
            _add_known_cache(parts, model.config.value, request)
    interface = interface_of_wheels(base) if base else None
    return _joined(request, parts, interface)


def _asked_share(request: MemoryRequest) -> float | None:
    """The share that was asked for.

    Raises:
        UsageError: vLLM refuses it.
    """
    text = request.utilization
    if text is None:
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(
            fraction_refusal(text) or f"{UTILIZATION} {text!r} is not a number",
            hint=f"{UTILIZATION} {USUAL_FRACTION}",
        )
    return share


def _refuse_cache_options(request: MemoryRequest) -> None:
    """Refuse options about the KV cache if there is no checkpoint.

    Raises:
        UsageError: such an option is given.
    """
    given = {
        "--context": request.context is not None,
        "--sequences": request.sequences != MemoryRequest.sequences,
        KV_DTYPE: request.kv_cache_dtype != MemoryRequest.kv_cache_dtype,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise UsageError(
            f"{name} needs the checkpoint's folder: the model's file of {request.subject} does not "
            "list layers and heads, so its KV cache is unknown",
            hint=f"leave {name} out",
        )


def estimate_of(model: Model, checkpoint: Path | None, request: MemoryRequest) -> MemoryEstimate:
    """The estimate of a model, from its checkpoint if there is one.

    Raises:
        UsageError: the checkpoint cannot be read, or the context is beyond the model's.
    """
    parts = _from_model(model) if checkpoint is None else _from_folder(checkpoint, request)
    return _joined(request, parts, None)


def _joined(
    request: MemoryRequest, parts: _Parts, interface: ServeInterface | None
) -> MemoryEstimate:
    cache = None
    if parts.need is not None:
        cache = KvCache(
            dtype=parts.need.dtype, source=parts.need.source, context=parts.context,
            sequences=request.sequences, full_layers=parts.need.full,
            sliding_layers=parts.need.sliding, recurrent_layers=parts.need.recurrent,
            state_bytes=parts.need.state, bytes_per_token=parts.need.bytes_per_token,
            bytes=parts.need.bytes * request.sequences, at_least=bool(parts.need.recurrent),
        )  # fmt: skip
    most = LARGEST_FRACTION
    beside = overhead(request.batched_tokens)
    least = room = None
    if parts.weights is not None:
        fixed = parts.weights.bytes + beside.bytes
        room = int(most * TOTAL.bytes) - fixed
        needed = fixed + OVERHEAD_ERROR + (max(cache.reserved, cache.most) if cache else 0)
        least = math.ceil(needed * 100 / TOTAL.bytes) / 100
    if cache is None or (parts.weights is not None and parts.weights.at_least):
        least = None
    share = _asked_share(request) or _share(parts, least, most)
    own_room = None if room is None else room - int(most * TOTAL.bytes) + int(share * TOTAL.bytes)
    fits = verdict(parts.weights, cache, own_room)
    if fits == "unknown" and cache and own_room is not None:
        parts.unknown.append(_between(cache, own_room))
    is_whole = cache is not None and not cache.at_least
    pinned = is_whole and request.utilization is None and parts.share is None
    flags, refused = _flags(cache, share, fits, interface, pinned=pinned)
    return MemoryEstimate(
        model=request.subject, total=TOTAL, weights=parts.weights, kv_cache=cache,
        overhead=beside, overhead_error=OVERHEAD_ERROR, system=SYSTEM, fits=fits,
        utilization=Utilization(share=share, least=least, most=most),
        room_for_kv_cache=own_room, room_at_most=room, flags=flags, ceiling=parts.ceiling,
        held=parts.weight_groups, unknown=(*parts.unknown, *refused),
        not_counted=tuple(parts.not_counted),
    )  # fmt: skip


def _between(cache: KvCache, room: int) -> str:
    """Why it is not known whether a KV cache of known size fits."""
    most = f" to {cache.most / GIB:.2f}" if cache.at_least else ""
    return (
        f"fits: the KV cache needs {cache.bytes / GIB:.2f}{most} GiB, and about "
        f"{room / GIB:.2f} GiB is left for it, give or take {OVERHEAD_ERROR // GIB} GiB; ask the "
        "release: spark-build preflight"
    )


def _share(parts: _Parts, least: float | None, most: float) -> float:
    """The share of the flags: what the model's file advises, and at least what is needed."""
    if parts.share is None:
        return USUAL_FRACTION if least is None else min(least, most)
    return max(parts.share, min(least or 0, most))


def next_step(estimate: MemoryEstimate) -> str:
    """The hint for a model that does not fit."""
    cache, room = estimate.kv_cache, estimate.room_at_most
    room = None if room is None else room - estimate.overhead_error
    least, most = estimate.utilization.least, estimate.utilization.most
    if estimate.utilization.share < (least or 0) <= most:
        return f"{UTILIZATION} {least:.2f}"
    if cache is not None and room is not None and room > 0:
        if KV_DTYPES.get(cache.dtype) != 1 and cache.reserved // 2 <= room:
            return f"{KV_DTYPE} fp8"
        each = cache.bytes_per_token * cache.sequences
        tokens = cache.context + (room - cache.reserved) * 100 // 105 // each if each else 0
        if tokens >= 1024:
            return f"--context {tokens // 1024 * 1024}"
        if cache.sequences > 1:
            return "--sequences 1"
    return "use a smaller checkpoint; the table above lists its layers in 16 bits"


def _flags(
    cache: KvCache | None,
    share: float,
    fits: str,
    interface: ServeInterface | None,
    *,
    pinned: bool,
) -> tuple[tuple[str, ...], list[str]]:
    """Flags of ``vllm serve`` that the release knows, and why it refuses the others.

    vLLM does not look at the share if the bytes of the KV cache are given (``pinned``).
    """
    if fits == "no":
        return (), []
    wanted = [(UTILIZATION, f"{share:.2f}")]
    if cache is not None:
        wanted.append(("--max-model-len", str(cache.context)))
        wanted.append(("--max-num-seqs", str(cache.sequences)))
        wanted += [(KV_BYTES, str(cache.reserved))] if pinned else []
        if cache.dtype in KV_DTYPES and KV_DTYPES[cache.dtype] == 1:
            wanted.append((KV_DTYPE, cache.dtype))
    words: list[str] = []
    refused = []
    for name, value in wanted:
        why = interface.refusal(name, value) if interface else ""
        if why:
            refused.append(why)
        else:
            words += (name, value)
    return tuple(words), refused


def _from_folder(folder: Path, request: MemoryRequest) -> _Parts:
    parts = _Parts()
    tensors = checkpoint_tensors(folder)
    config = read_config(folder)
    layers = config.text.num_hidden_layers if config else None
    summed = list(rows(tensors, layers))
    parts.weights = MemoryFigure(
        bytes=sum(size for *_, size in summed), source="headers of its safetensors files"
    )
    groups = {group for group, *_ in summed}
    share = None
    try:
        share = expert_share(config, groups)
    except Unknown as why:
        parts.unknown.append(f"ceiling: {why}")
    parts.weight_groups = tuple(
        WeightsHeld(
            group=group, dtype=dtype, tensors=number, bytes=size,
            read=bytes_read(group, size, share, tied=HEAD not in groups),
        )
        for group, dtype, number, size in summed
    )  # fmt: skip
    parts.ceiling = ceiling((row.read for row in parts.weight_groups), "by the headers")
    if config is None:
        parts.unknown.append(f"KV cache: {folder} has no {CONFIG}")
        return parts
    _add_cache(parts, config, request, _context(config, request))
    return parts


def _add_known_cache(parts: _Parts, raw: Mapping[str, Any], request: MemoryRequest) -> None:
    """The KV cache by the configuration in a model's file."""
    parts.unknown = [text for text in parts.unknown if text != _NO_LAYERS]
    config = decoded_config(raw)
    _add_cache(parts, config, request, _context(config, request))


def _context(config: ModelConfig, request: MemoryRequest) -> int | None:
    """The tokens of a sequence.

    Raises:
        UsageError: the model cannot have as many.
    """
    longest = config.text.max_position_embeddings
    if request.context and longest and request.context > longest:
        raise UsageError(
            f"--context {request.context}: the model's own maximum is {longest} ({CONFIG})",
            hint=f"--context {longest}",
        )
    return request.context or longest


def _add_cache(
    parts: _Parts, config: ModelConfig, request: MemoryRequest, context: int | None
) -> None:
    if not context:
        parts.unknown.append(f"KV cache: {CONFIG} has no max_position_embeddings; set --context")
        return
    try:
        parts.need = kv_need(config, request.kv_cache_dtype, context)
    except Unknown as why:
        parts.unknown.append(f"KV cache: {why}")
        return
    parts.context = context
    if parts.need.recurrent:
        parts.not_counted.append("states that prefix caching keeps of earlier requests")


_NO_LAYERS = "KV cache: this model's file has no layers and heads; name a local folder"


def _from_model(model: Model) -> _Parts:
    parts = _Parts()
    parts.share = USUAL_FRACTION
    parts.unknown.append(_NO_LAYERS)
    parts.weights, parts.ceiling, unknown = weights_of_model(model)
    parts.unknown += unknown
    if model.gpu_memory_utilization is not None:
        parts.share = float(model.gpu_memory_utilization.value)
    return parts
