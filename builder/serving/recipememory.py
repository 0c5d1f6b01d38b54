"""Estimates whether a recipe fits into the memory that its flags give vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packaging.specifiers import SpecifierSet

from builder.serving.documents import RecipeMemory, Setting
from builder.serving.memory import (
    KV_BYTES,
    KV_DTYPE,
    UTILIZATION,
    MemoryRequest,
    estimate_of,
    next_step,
)
from builder.serving.memorydocuments import ACTIVATIONS, GIB, GRAPHS, LARGEST_FRACTION, TOTAL
from builder.serving.modelconfig import KV_DTYPES
from builder.serving.reciperequest import SET

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.serving.memorydocuments import MemoryEstimate
    from builder.serving.modelconfig import ModelConfig
    from builder.serving.models import Model

CONTEXT, SEQUENCES = "--max-model-len", "--max-num-seqs"
#: vLLM's default share of the memory, by release (vllm/config/cache.py).
_DEFAULTS = ((">=0.20.0rc0", 0.92), ("<0.20.0rc0", 0.9))
#: Suffixes of numbers as vLLM reads them (vllm/utils/argparse_utils.py, human_readable_int).
_UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
#: Options of `memory` as flags of a recipe.
_OPTIONS = {"--context": CONTEXT, "--sequences": SEQUENCES, KV_DTYPE: KV_DTYPE}


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs of the estimate for one Spark."""

    model: Model
    checkpoint: Path | None
    vllm: str
    flags: Mapping[str, Setting]
    config: ModelConfig | None


@dataclass(frozen=True)
class MemoryJudged:
    """The result of the estimate."""

    memory: RecipeMemory
    #: replaces the recipe's own
    flag: Setting | None = None
    notes: tuple[str, ...] = ()


def judge(inputs: MemoryInputs) -> MemoryJudged:
    """Estimate whether it fits; with a larger share of the memory if only that is missing.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    made = _estimate(inputs)
    share, source = _share(inputs)
    least, fits, room = made.utilization.least, *_fits(inputs, made, share)
    flag = None
    mine = inputs.flags.get(UTILIZATION)
    free = (mine is None or mine.origin != SET) and KV_BYTES not in inputs.flags
    if fits == "no" and free and least is not None and share < least <= LARGEST_FRACTION:
        source = f"memory: {_need(made)} do not fit at {share:g} ({source})"
        flag = Setting(name=UTILIZATION, value=f"{least:.2f}", origin=source)
        share = least
        fits, room = _fits(inputs, made, share)
    memory = RecipeMemory(
        checkpoint=str(inputs.checkpoint or ""), utilization=share, source=source,
        weights=made.weights, kv_cache=made.kv_cache, room=room, fits=fits,
    )  # fmt: skip
    return MemoryJudged(memory, flag, (_why(inputs, made, memory),) if fits == "no" else ())


def _estimate(inputs: MemoryInputs) -> MemoryEstimate:
    context = number_of(inputs.flags, CONTEXT)
    longest = inputs.config.text.max_position_embeddings if inputs.config else None
    if context and longest:
        context = min(context, longest)
    dtype = inputs.flags[KV_DTYPE].value if KV_DTYPE in inputs.flags else "auto"
    known = dtype == "auto" or dtype in KV_DTYPES
    request = MemoryRequest(
        subject=str(inputs.checkpoint or inputs.model.name),
        context=context,
        sequences=number_of(inputs.flags, SEQUENCES) or 1,
        kv_cache_dtype=dtype if known and dtype else "auto",
    )
    return estimate_of(inputs.model, inputs.checkpoint if known else None, request)


def number_of(flags: Mapping[str, Setting], name: str) -> int | None:
    """A number as vLLM reads it; None if the flag is absent or lets vLLM choose."""
    text = (flags[name].value or "").strip() if name in flags else ""
    unit = _UNITS.get(text[-1:], 0)
    try:
        number = int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _share(inputs: MemoryInputs) -> tuple[float, str]:
    """The share of the memory that vLLM uses, and the source."""
    default = next(v for versions, v in _DEFAULTS if SpecifierSet(versions).contains(
        inputs.vllm, prereleases=True
    ))  # fmt: skip
    given = inputs.flags.get(UTILIZATION)
    if given is None:
        return default, f"vLLM {inputs.vllm} by itself"
    return float(given.value or default), given.origin


def _fits(
    inputs: MemoryInputs, made: MemoryEstimate, share: float
) -> tuple[Literal["yes", "no", "unknown"], int | None]:
    """Whether it fits, and the bytes that are left for the KV cache."""
    if made.weights is None:
        return "unknown", None
    room = int(share * TOTAL.bytes) - made.weights.bytes - ACTIVATIONS.bytes - GRAPHS.bytes
    needed = made.kv_cache.reserved if made.kv_cache else 1
    if (
        given := number_of(inputs.flags, KV_BYTES)
    ) is not None:  # vLLM then does not look at the share
        most = int(LARGEST_FRACTION * TOTAL.bytes) - int(share * TOTAL.bytes) + room
        needed = made.kv_cache.bytes if made.kv_cache else 1
        room = min(given, most)
    if room < needed:
        return "no", room
    return ("yes" if made.kv_cache else "unknown"), room


def _need(made: MemoryEstimate) -> str:
    parts = [f"weights of {_gib(made.weights.bytes)}"] if made.weights else []
    if cache := made.kv_cache:
        parts.append(
            f"{cache.sequences} x {cache.context} tokens of KV cache ({_gib(cache.reserved)})"
        )
    return " and ".join(parts)


def _why(inputs: MemoryInputs, made: MemoryEstimate, memory: RecipeMemory) -> str:
    room = _gib(memory.room) if memory.room and memory.room > 0 else "nothing"
    given = f"{UTILIZATION} {memory.utilization:g}"
    if KV_BYTES in inputs.flags:
        given = f"{KV_BYTES} {inputs.flags[KV_BYTES].value}"
    least = made.utilization.least
    if least is not None and least <= LARGEST_FRACTION:
        step = f"--set {UTILIZATION[2:]}={least:.2f}"
        if KV_BYTES in inputs.flags and made.kv_cache:
            step = f"--set {KV_BYTES[2:]}={made.kv_cache.reserved}"
    else:
        step = _step(next_step(made))
    return (
        f"it does not fit: {_need(made)}, and {given} leaves {room} for the KV cache, besides "
        f"{_gib(ACTIVATIONS.bytes + GRAPHS.bytes)} for activations and CUDA graphs; {step}"
    )


def _step(step: str) -> str:
    name, _, value = step.partition(" ")
    if name in _OPTIONS:
        return f"--set {_OPTIONS[name][2:]}={value}"
    return "use a smaller checkpoint (spark-build audit DIR names its layers in 16 bits)"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
