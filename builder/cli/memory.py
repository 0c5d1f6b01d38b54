"""``spark-build memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import print_json
from builder.errors import Exit, SparkBuildError
from builder.serving.memory import GIB, SIXTEEN_BITS, memory_estimate, next_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.memory import MemoryEstimate, MemoryFigure, MemoryRequest


def memory_command(request: MemoryRequest, *, json: bool) -> None:
    """Print the estimate.

    Raises:
        SparkBuildError: the model does not fit.
    """
    made = memory_estimate(request)
    if json:
        print_json(made)
    else:
        print("\n".join(_lines(made)))
    if made.fits == "no":
        raise SparkBuildError(
            f"{made.model} does not fit into {made.total.bytes / GIB:.1f} GiB with "
            f"{made.system.bytes / GIB:.1f} GiB left for the system",
            Exit.VERIFY_FAILED,
            hint=next_step(made),
        )


def _lines(made: MemoryEstimate) -> Iterator[str]:
    yield f"{made.model} on one GB10 (an estimate; nothing was started)"
    yield _figure("memory", made.total)
    if made.weights:
        yield _figure("weights", made.weights)
    if cache := made.kv_cache:
        windows = f", {cache.sliding_layers} with a window" if cache.sliding_layers else ""
        state = f", state {cache.state_bytes} bytes" if cache.state_bytes else ""
        yield _row("KV cache", _gib(cache.bytes),
                   f"{cache.sequences} x {cache.context} tokens, {cache.dtype} ({cache.source}), "
                   f"{cache.full_layers} attention layers{windows}, "
                   f"{cache.bytes_per_token} bytes for each token{state}")  # fmt: skip
    yield _figure("activations", made.activations)
    yield _figure("CUDA graphs", made.cuda_graphs)
    yield _figure("system", made.system)
    if made.room_for_kv_cache is not None:
        yield _row("KV cache room", _gib(made.room_for_kv_cache),
                   f"at most, at --gpu-memory-utilization {made.utilization.most:.2f}")  # fmt: skip
    yield f"  fits              {made.fits}"
    if made.flags:
        yield f"  flags             {' '.join(made.flags)}"
    if made.ceiling:
        yield f"  ceiling           {made.ceiling.text}"
    yield from _held(made)
    for title, items in (("unknown", made.unknown), ("not counted", made.not_counted)):
        for item in items:
            yield f"{title}: {item}"


def _held(made: MemoryEstimate) -> Iterator[str]:
    if not made.held:
        return
    yield f"\n{'layers':<28}{'dtype':<10}{'tensors':>8}{'GiB':>10}{'read/token':>12}"
    for row in made.held:
        read = "unknown" if row.read is None else f"{row.read / GIB:.3f}"
        yield f"{row.group:<28}{row.dtype:<10}{row.tensors:>8}{row.bytes / GIB:>10.3f}{read:>12}"
    kept = [row for row in made.held if row.dtype in SIXTEEN_BITS]
    if kept:
        named = ", ".join(f"{row.group} {row.bytes / GIB:.3f} GiB" for row in kept)
        yield f"in 16 bits: {named}"


def _figure(name: str, figure: MemoryFigure) -> str:
    return _row(name, _gib(figure.bytes), figure.source, ">=" if figure.at_least else "")


def _row(name: str, size: str, note: str, sign: str = "") -> str:
    return f"  {name:<16}{sign:>2}{size:>12}  {note}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
