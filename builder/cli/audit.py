"""``spark-build audit``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.common.console import counted, print_json
from builder.errors import Exit, SparkBuildError
from builder.serving.audit import SCRIPT, audit, write_inside
from builder.serving.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.serving.audit import (
        Audit,
        AuditRequest,
        Comparison,
        Difference,
        KeptLayers,
        Unmatched,
    )

_SOURCES = {
    "headers": "by the headers of its safetensors files",
    "model": "by its model file",
    "vllm": "as vLLM {vllm} loaded it",
}
#: Layers of which a token reads less than this share are counted, but not shown.
_SHOWN = 0.005
#: Modules that only one side has, with fewer bytes, are counted, but not shown.
_SMALL = 2**20
#: The most ranges of layers that are shown.
_PARTS = 8


def audit_command(request: AuditRequest, *, json: bool) -> None:
    """Print the audit.

    Raises:
        SparkBuildError: vLLM loaded layers in 16 bits that the checkpoint has quantised.
    """
    made = audit(request)
    if json:
        print_json(made)
    else:
        print("\n".join(_lines(made)))
    if made.compared and made.compared.lost:
        lost = made.compared.lost
        number = sum(one.modules for one in lost)
        named = ", ".join(one.name for one in lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise SparkBuildError(
            f"vLLM {made.vllm} has {counted(number, 'module')} in 16 bits that "
            f"{made.compared.checkpoint} has quantised: {named}; the server's log may show why",
            Exit.VERIFY_FAILED,
            hint="spark-build diagnose LOG",
        )


def inside_command(folder: Path, *, json: bool) -> None:
    """Write the files that audit a model inside vLLM, and print how to use them."""
    made = write_inside(folder)
    if json:
        print_json(made)
        return
    print("\n".join(made.written))
    volume = f"-v {shlex.quote(f'{folder.resolve()}:/audit')}"
    print(
        f"\nLoad a model, audit it, and end:\n"
        f"  docker run --rm --gpus all --ipc host {volume} \\\n"
        f"    -v ~/.cache/huggingface:/root/.cache/huggingface --entrypoint python3 IMAGE \\\n"
        f"    /audit/{SCRIPT} MODEL [FLAGS] > audit.json\n"
        f"Or while a server starts, which writes {folder / 'audit.json'}; add to its docker run:\n"
        f"  {volume} -e PYTHONPATH=/audit\n"
        f"Then: spark-build audit audit.json"
    )


def _lines(made: Audit) -> Iterator[str]:
    rank = f", rank {made.rank} of {made.world_size}" if made.world_size > 1 else ""
    yield f"{made.model}, {_SOURCES[made.source].format(vllm=made.vllm)}{rank}"
    if made.bytes is not None:
        more = f", and {made.buffers / GIB:.3f} GiB of buffers" if made.buffers else ""
        least = "at least " if made.at_least else ""
        yield f"weights: {least}{made.bytes / GIB:.3f} GiB{more}"
    yield from _methods(made)
    yield from _kept(made.kept)
    if made.ceiling:
        yield ""
        yield f"ceiling: {made.ceiling.text}"
    if made.compared:
        yield ""
        yield from _compared(made.compared)
    for item in made.unknown:
        yield f"unknown: {item}"


def _methods(made: Audit) -> Iterator[str]:
    if made.source == "model":
        for row in made.methods:
            yield f"  {row.name:<16} {row.source}"
        return
    names = [f"{row.name}, {row.kernel}" if row.kernel else row.name for row in made.methods]
    width = max(map(len, names))
    title = "kind" if made.source == "headers" else "method and kernel"
    yield f"\n{title:<{width}}{'modules':>9}{'GiB':>10}{'read/token':>12}  dtypes"
    for row, name in zip(made.methods, names, strict=True):
        dtypes = ", ".join(f"{dtype} {_gib(size)}" for dtype, size in row.dtypes.items())
        yield (f"{name:<{width}}{row.modules:>9}{_gib(row.bytes):>10}{_gib(row.read):>12}"
               f"  {dtypes}")  # fmt: skip


def _kept(kept: Sequence[KeptLayers]) -> Iterator[str]:
    if not kept:
        return
    total = [row.share for row in kept]
    share = None if None in total else sum(filter(None, total))
    words = "" if share is None else f": {share:.0%} of what a token reads"
    yield f"\nnot quantised{words}"
    shown = [row for row in kept if (row.share or 0) >= _SHOWN or row.share is None]
    width = max((len(row.name) for row in shown), default=0)
    for row in shown:
        part = "unknown" if row.share is None else f"{row.share:.1%}"
        layers = f"  layers {_short(row.layers)}" if row.layers else ""
        yield f"  {row.name:<{width}}{row.modules:>6}{_gib(row.bytes):>10} GiB{part:>9}{layers}"
    if rest := [row for row in kept if row not in shown]:
        size = sum(row.bytes for row in rest)
        yield f"  {len(rest)} other names, {_gib(size)} GiB, each below {_SHOWN:.1%} or not read"


def _compared(made: Comparison) -> Iterator[str]:
    yield f"against {made.checkpoint}: {made.same} of vLLM's modules are as in the checkpoint"
    for one in made.differences:
        kinds = f"{one.checkpoint} in the checkpoint, {one.loaded} in vLLM"
        yield f"  {one.what}: {_extent(one)}; {kinds}"
    yield from _unmatched("only in the checkpoint", made.only_checkpoint)
    yield from _unmatched("only in vLLM", made.only_loaded)


def _unmatched(title: str, found: Sequence[Unmatched]) -> Iterator[str]:
    large = [one for one in found if one.bytes >= _SMALL]
    for one in large:
        yield f"  {title}: {_extent(one)}"
    if len(found) > len(large):
        yield f"  {title}: {len(found) - len(large)} other names of less than 1 MiB each"


def _extent(one: Difference | Unmatched) -> str:
    layers = f", layers {_short(one.layers)}" if one.layers else ""
    return f"{one.name}{layers}: {counted(one.modules, 'module')}, {_gib(one.bytes)} GiB"


def _short(layers: str) -> str:
    """Layer numbers on one line; the JSON lists all of them."""
    parts = layers.split(", ")
    return layers if len(parts) <= _PARTS else f"{', '.join(parts[:3])}, ... {parts[-1]}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.3f}"
