"""The weights that one token reads, and the speed limit that follows for one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.serving.checkpoint import DRAFT, EMBEDDING, EXPERTS, VISION
from builder.serving.memorydocuments import Ceiling, MemoryFigure
from builder.serving.modelconfig import CONFIG, ModelConfig, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.serving.models import Model

#: Bytes of a parameter by kind of layer: 4 bits and a scale of one byte for 16 values (NVFP4) or
#: for 32 values (MXFP4).
_PARAMETER_BYTES = {
    "nvfp4-linear": 0.5625, "nvfp4-moe": 0.5625, "w4a16-linear": 0.5625, "w4a16-moe": 0.5625,
    "mxfp4-moe": 0.53125, "fp8-linear": 1.0, "fp8-block": 1.0, "unquantized": 2.0,
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
    weights = made = None
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
    if dense and model.weight_bytes is not None:
        made = _ceiling(
            model.weight_bytes.value,
            "273 GB/s over all weights of a dense model; vision layers count too, although a token "
            "does not read them",
        )
    elif model.active_parameters is not None and least is not None:
        size = int(model.active_parameters.value * least)
        made = _ceiling(
            size,
            f"estimated: 273 GB/s over {model.active_parameters.value} active parameters x "
            f"{least} bytes; layers in 8 or 16 bits make it lower",
        )
    else:
        unknown.append("ceiling: no source gives the active parameters")
    return weights, made, unknown
