"""Estimates whether a model fits into the memory of a GB10, before anything starts.

Unknown values stay unknown, and so does everything that depends on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from builder.errors import UsageError, did_you_mean
from builder.serving.checkpoint import HEAD, checkpoint_tensors, means_a_path, rows
from builder.serving.interface import interface_of
from builder.serving.memorydocuments import (
    ACTIVATIONS,
    GRAPHS,
    LARGEST_FRACTION,
    SYSTEM,
    TOTAL,
    USUAL_FRACTION,
    Ceiling,
    KvCache,
    MemoryEstimate,
    MemoryFigure,
    Utilization,
    WeightsHeld,
)
from builder.serving.modelconfig import (
    CONFIG,
    KV_DTYPES,
    KvNeed,
    ModelConfig,
    Unknown,
    kv_need,
    read_config,
)
from builder.serving.models import Models
from builder.serving.release import release_base
from builder.serving.weights import bytes_read, ceiling, expert_share, weights_of_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.serving.interface import ServeInterface
    from builder.serving.models import Model

UTILIZATION, KV_BYTES, KV_DTYPE = (
    "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-dtype",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What to estimate."""

    subject: str
    context: int | None = None
    sequences: int = 1
    kv_cache_dtype: str = "auto"
    release: str | None = None
    models: Sequence[Path] = ()


@dataclass
class _Found:
    """The values from the checkpoint or from the model's file."""

    weights: MemoryFigure | None = None
    need: KvNeed | None = None
    context: int = 0
    ceiling: Ceiling | None = None
    #: the share of the memory that the model's file advises
    share: float = USUAL_FRACTION
    held: tuple[WeightsHeld, ...] = ()
    unknown: list[str] = field(default_factory=list)
    not_counted: list[str] = field(default_factory=list)


def memory_estimate(request: MemoryRequest) -> MemoryEstimate:
    """Estimate the memory of a checkpoint or a known model.

    Raises:
        SparkBuildError: the checkpoint, the model or the release cannot be read.
    """
    if request.kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise UsageError(
            f"--kv-cache-dtype {request.kv_cache_dtype} is not known on a GB10"
            f"{did_you_mean(request.kv_cache_dtype, KV_DTYPES)} "
            f"(known: auto, {', '.join(KV_DTYPES)})",
            hint="--kv-cache-dtype auto",
        )
    base = release_base(request.release) if request.release is not None else ""
    folder = Path(request.subject)
    if folder.is_dir():
        found = _from_folder(folder, request)
    elif means_a_path(request.subject):
        raise UsageError(
            f"{request.subject} is not a folder: name a checkpoint's folder or a model",
            hint="spark-build models list",
        )
    else:
        model = Models.discover(request.models).model(request.subject, or_folder=True)
        _refuse_cache_options(request)
        found = _from_model(model)
    interface = interface_of(base) if base else None
    return _joined(request, found, interface)


def _refuse_cache_options(request: MemoryRequest) -> None:
    """Refuse options about the KV cache if there is no checkpoint.

    Raises:
        UsageError: it was asked for.
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
    found = _from_model(model) if checkpoint is None else _from_folder(checkpoint, request)
    return _joined(request, found, None)


def _joined(
    request: MemoryRequest, found: _Found, interface: ServeInterface | None
) -> MemoryEstimate:
    cache = None
    if found.need is not None:
        cache = KvCache(
            dtype=found.need.dtype, source=found.need.source, context=found.context,
            sequences=request.sequences, full_layers=found.need.full,
            sliding_layers=found.need.sliding, recurrent_layers=found.need.recurrent,
            state_bytes=found.need.state, bytes_per_token=found.need.bytes_per_token,
            bytes=found.need.bytes * request.sequences,
        )  # fmt: skip
    most = LARGEST_FRACTION
    overhead = ACTIVATIONS.bytes + GRAPHS.bytes
    least = room = None
    fits: Literal["yes", "no", "unknown"] = "unknown"
    if found.weights is not None:
        fixed = found.weights.bytes + overhead
        room = int(most * TOTAL.bytes) - fixed
        least = math.ceil((fixed + (cache.reserved if cache else 0)) * 100 / TOTAL.bytes) / 100
        if least > most:
            fits = "no"
        elif cache:  # of a folder, so the weights are exact
            fits = "yes"
    if cache is None:
        least = None
    flags, refused = _flags(cache, found.share if least is None else least, fits, interface)
    return MemoryEstimate(
        model=request.subject, total=TOTAL, weights=found.weights, kv_cache=cache,
        activations=ACTIVATIONS, cuda_graphs=GRAPHS, system=SYSTEM, fits=fits,
        utilization=Utilization(least=least, most=most),
        room_for_kv_cache=room, flags=flags, ceiling=found.ceiling, held=found.held,
        unknown=(*found.unknown, *refused), not_counted=tuple(found.not_counted),
    )  # fmt: skip


def next_step(made: MemoryEstimate) -> str:
    """The hint for a model that does not fit."""
    cache, room = made.kv_cache, made.room_for_kv_cache
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
) -> tuple[tuple[str, ...], list[str]]:
    """Flags of ``vllm serve`` that the release knows, and why it refuses the others."""
    if fits == "no":
        return (), []
    wanted = [(UTILIZATION, f"{share:.2f}")]
    if cache is not None:
        wanted.append(("--max-model-len", str(cache.context)))
        wanted.append(("--max-num-seqs", str(cache.sequences)))
        wanted.append((KV_BYTES, str(cache.reserved)))
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


def _from_folder(folder: Path, request: MemoryRequest) -> _Found:
    found = _Found()
    tensors = checkpoint_tensors(folder)
    config = read_config(folder)
    layers = config.text.num_hidden_layers if config else None
    summed = list(rows(tensors, layers))
    found.weights = MemoryFigure(
        bytes=sum(size for *_, size in summed), source="headers of its safetensors files"
    )
    groups = {group for group, *_ in summed}
    share = None
    try:
        share = expert_share(config, groups)
    except Unknown as why:
        found.unknown.append(f"ceiling: {why}")
    found.held = tuple(
        WeightsHeld(
            group=group, dtype=dtype, tensors=number, bytes=size,
            read=bytes_read(group, size, share, tied=HEAD not in groups),
        )
        for group, dtype, number, size in summed
    )  # fmt: skip
    found.ceiling = ceiling((row.read for row in found.held), "by the headers")
    if config is None:
        found.unknown.append(f"KV cache: {folder} has no {CONFIG}")
        return found
    longest = config.text.max_position_embeddings
    if request.context and longest and request.context > longest:
        raise UsageError(
            f"--context {request.context}: the model's own maximum is {longest} ({CONFIG})",
            hint=f"--context {longest}",
        )
    context = request.context or longest
    _add_cache(found, config, request, context)
    return found


def _add_cache(
    found: _Found, config: ModelConfig, request: MemoryRequest, context: int | None
) -> None:
    if not context:
        found.unknown.append(f"KV cache: {CONFIG} has no max_position_embeddings; set --context")
        return
    try:
        found.need = kv_need(config, request.kv_cache_dtype, context)
    except Unknown as why:
        found.unknown.append(f"KV cache: {why}")
        return
    found.context = context
    if found.need.recurrent:
        found.not_counted.append("states that prefix caching keeps of earlier requests")


def _from_model(model: Model) -> _Found:
    found = _Found()
    found.unknown.append("KV cache: a model's file has no layers and heads; name a local folder")
    found.weights, found.ceiling, unknown = weights_of_model(model)
    found.unknown += unknown
    if model.gpu_memory_utilization is not None:
        found.share = float(model.gpu_memory_utilization.value)
    return found
