"""``spark-build memory`` and ``audit``: what a checkpoint's files hold."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import command
from builder.common.console import counted, print_json, tell
from builder.common.options import Argument, Json, ModelFolders, Option
from builder.errors import Exit, SparkBuildError
from builder.serving.options import MemoryRequest

if TYPE_CHECKING:
    from builder.serving.audit import Audit, Comparison, Difference, KeptLayers, Unmatched
    from builder.serving.memory import MemoryEstimate, MemoryFigure

GIB = 2**30
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


@command(
    "memory",
    "spark-build memory nemotron-3-super",
    "spark-build memory ./checkpoint --context 131072 --sequences 4",
    "spark-build memory ./checkpoint --release 0.33.0 --json",
    detail="Only config.json and the headers of the safetensors files are read. Exit 5: the model "
    "does not fit.",
)
def memory(request: MemoryRequest, *, json: Json = False) -> None:
    """Print the estimate; exit 5 if the model does not fit."""
    from builder.serving.memory import memory_estimate, next_step

    estimate = memory_estimate(request)
    if json:
        print_json(estimate)
    else:
        tell("\n".join(_memory_lines(estimate)))
    if estimate.fits == "no":
        raise SparkBuildError(
            f"{estimate.model} does not fit into {estimate.utilization.share:.2f} of "
            f"{estimate.total.bytes / GIB:.1f} GiB",
            Exit.VERIFY_FAILED,
            hint=next_step(estimate),
        )


def _memory_lines(estimate: "MemoryEstimate") -> Iterator[str]:
    yield f"{estimate.model} on one GB10 (an estimate; nothing was started)"
    yield _figure("memory", estimate.total)
    if estimate.weights:
        yield _figure("weights", estimate.weights)
    if cache := estimate.kv_cache:
        windows = f", {cache.sliding_layers} with a window" if cache.sliding_layers else ""
        state = f", state {cache.state_bytes} bytes" if cache.state_bytes else ""
        least = ">=" if cache.at_least else ""
        yield _row("KV cache", _gibibytes(cache.bytes),
                   f"{cache.sequences} x {cache.context} tokens, {cache.dtype} ({cache.source}), "
                   f"{cache.full_layers} attention layers{windows}, "
                   f"{cache.bytes_per_token} bytes for each token{state}", least)  # fmt: skip
    yield _row("overhead", _gibibytes(estimate.overhead.bytes),
               f"activations, workspaces, CUDA graphs: +-{estimate.overhead_error // GIB} GiB "
               f"({estimate.overhead.source})")  # fmt: skip
    yield _figure("system", estimate.system)
    if estimate.room_for_kv_cache is not None:
        share, most = estimate.utilization.share, estimate.utilization.most
        at_most = f"{_gibibytes(estimate.room_at_most or 0)} at most, at {most:.2f}"
        yield _row("KV cache room", _gibibytes(estimate.room_for_kv_cache),
                   f"at --gpu-memory-utilization {share:.2f}; {at_most}")  # fmt: skip
    yield f"  fits              {estimate.fits}"
    if estimate.flags:
        yield f"  flags             {' '.join(estimate.flags)}"
    if estimate.ceiling:
        yield f"  ceiling           {estimate.ceiling.text}"
    yield from _held(estimate)
    for title, items in (("unknown", estimate.unknown), ("not counted", estimate.not_counted)):
        for item in items:
            yield f"{title}: {item}"


def _held(estimate: "MemoryEstimate") -> Iterator[str]:
    if not estimate.held:
        return
    yield f"\n{'layers':<28}{'dtype':<10}{'tensors':>8}{'GiB':>10}{'read/token':>12}"
    for row in estimate.held:
        read = "unknown" if row.read is None else f"{row.read / GIB:.3f}"
        yield f"{row.group:<28}{row.dtype:<10}{row.tensors:>8}{row.bytes / GIB:>10.3f}{read:>12}"
    from builder.serving.memory import SIXTEEN_BITS

    unquantised = [row for row in estimate.held if row.dtype in SIXTEEN_BITS]
    if unquantised:
        named = ", ".join(f"{row.group} {row.bytes / GIB:.3f} GiB" for row in unquantised)
        yield f"in 16 bits: {named}"


def _figure(name: str, figure: "MemoryFigure") -> str:
    return _row(name, _gibibytes(figure.bytes), figure.source, ">=" if figure.at_least else "")


def _row(name: str, size: str, note: str, sign: str = "") -> str:
    return f"  {name:<16}{sign:>2}{size:>12}  {note}"


def _gibibytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


@command(
    "audit",
    "spark-build audit ./checkpoint",
    "spark-build audit nemotron-3-super",
    "spark-build audit --inside audit",
    "spark-build audit audit/audit.json --against ./checkpoint",
    detail="Reads the headers of a checkpoint, or the modules that vLLM has loaded. Unquantised "
    "modules often limit the speed. Exit 5: vLLM loaded layers in 16 bits that --against has "
    "quantised.",
)
def audit(
    subject: Annotated[
        str | None,
        Argument(
            "A folder with a checkpoint; a file that spark_build_audit.py wrote; or a model's "
            "name, or its id on Hugging Face.",
            "DIR_OR_FILE_OR_MODEL",
            complete="models",
        ),
    ] = None,
    inside: Annotated[
        Path | None,
        Option(
            "Write the files that audit a model inside vLLM, in an image or an environment.",
            "DIR",
        ),
    ] = None,
    against: Annotated[
        Path | None, Option("The checkpoint to compare a loaded model with.", "DIR")
    ] = None,
    models: ModelFolders = (),
    *,
    json: Json = False,
) -> None:
    """Print the audit, or write the files that make one inside vLLM."""
    from builder.serving.audit import audit as audited
    from builder.serving.audit import audit_request

    if inside is not None and subject is None and against is None:
        _write_inside(inside, json=json)
        return
    result = audited(audit_request(subject, inside, against, models))
    if json:
        print_json(result)
    else:
        tell("\n".join(_audit_lines(result)))
    if result.compared and result.compared.lost:
        lost = result.compared.lost
        number = sum(one.modules for one in lost)
        named = ", ".join(one.name for one in lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise SparkBuildError(
            f"vLLM {result.vllm} has {counted(number, 'module')} in 16 bits that "
            f"{result.compared.checkpoint} has quantised: {named}; the server's log may show why",
            Exit.VERIFY_FAILED,
            hint="spark-build diagnose LOG",
        )


def _write_inside(folder: Path, *, json: bool) -> None:
    """Write the files that audit a model inside vLLM, and print how to use them."""
    from builder.serving.audit import SCRIPT, write_inside

    document = write_inside(folder)
    if json:
        print_json(document)
        return
    tell("\n".join(document.written))
    volume = f"-v {shlex.quote(f'{folder.resolve()}:/audit')}"
    tell(
        f"\nLoad a model, audit it, and end:\n"
        f"  docker run --rm --gpus all --ipc host {volume} \\\n"
        f"    -v ~/.cache/huggingface:/root/.cache/huggingface --entrypoint python3 IMAGE \\\n"
        f"    /audit/{SCRIPT} MODEL [FLAGS] > audit.json\n"
        f"Or while a server starts, which writes {folder / 'audit.json'}; add to its docker run:\n"
        f"  {volume} -e PYTHONPATH=/audit\n"
        f"Then: spark-build audit audit.json"
    )


def _audit_lines(result: "Audit") -> Iterator[str]:
    rank = f", rank {result.rank} of {result.world_size}" if result.world_size > 1 else ""
    yield f"{result.model}, {_SOURCES[result.source].format(vllm=result.vllm)}{rank}"
    if result.bytes is not None:
        more = f", and {result.buffers / GIB:.3f} GiB of buffers" if result.buffers else ""
        least = "at least " if result.at_least else ""
        yield f"weights: {least}{result.bytes / GIB:.3f} GiB{more}"
    yield from _methods(result)
    yield from _kept(result.kept)
    if result.ceiling:
        yield ""
        yield f"ceiling: {result.ceiling.text}"
    if result.compared:
        yield ""
        yield from _compared(result.compared)
    for item in result.unknown:
        yield f"unknown: {item}"


def _methods(result: "Audit") -> Iterator[str]:
    if result.source == "model":
        for row in result.methods:
            yield f"  {row.name:<16} {row.source}"
        return
    names = [f"{row.name}, {row.kernel}" if row.kernel else row.name for row in result.methods]
    title = "kind" if result.source == "headers" else "method and kernel"
    if not names:
        yield "no modules: no tensor was found"
        return
    width = max(map(len, names))
    yield f"\n{title:<{width}}{'modules':>9}{'GiB':>10}{'read/token':>12}  dtypes"
    for row, name in zip(result.methods, names, strict=True):
        dtypes = ", ".join(f"{dtype} {_gib(size)}" for dtype, size in row.dtypes.items())
        yield (f"{name:<{width}}{row.modules:>9}{_gib(row.bytes):>10}{_gib(row.read):>12}"
               f"  {dtypes}")  # fmt: skip


def _kept(unquantised: Sequence["KeptLayers"]) -> Iterator[str]:
    if not unquantised:
        return
    total = [row.share for row in unquantised]
    share = None if None in total else sum(filter(None, total))
    words = "" if share is None else f": {share:.0%} of what a token reads"
    yield f"\nnot quantised{words}"
    shown = [row for row in unquantised if (row.share or 0) >= _SHOWN or row.share is None]
    width = max((len(row.name) for row in shown), default=0)
    for row in shown:
        part = "unknown" if row.share is None else f"{row.share:.1%}"
        layers = f"  layers {_short(row.layers)}" if row.layers else ""
        yield f"  {row.name:<{width}}{row.modules:>6}{_gib(row.bytes):>10} GiB{part:>9}{layers}"
    if rest := [row for row in unquantised if row not in shown]:
        size = sum(row.bytes for row in rest)
        yield f"  {len(rest)} other names, {_gib(size)} GiB, each below {_SHOWN:.1%} or not read"


def _compared(comparison: "Comparison") -> Iterator[str]:
    same = f"{comparison.same} of vLLM's modules are as in the checkpoint"
    yield f"against {comparison.checkpoint}: {same}"
    for one in comparison.differences:
        kinds = f"{one.checkpoint} in the checkpoint, {one.loaded} in vLLM"
        yield f"  {one.what}: {_extent(one)}; {kinds}"
    yield from _unmatched("only in the checkpoint", comparison.only_checkpoint)
    yield from _unmatched("only in vLLM", comparison.only_loaded)


def _unmatched(title: str, unmatched: Sequence["Unmatched"]) -> Iterator[str]:
    large = [one for one in unmatched if one.bytes >= _SMALL]
    for one in large:
        yield f"  {title}: {_extent(one)}"
    if len(unmatched) > len(large):
        yield f"  {title}: {len(unmatched) - len(large)} other names of less than 1 MiB each"


def _extent(one: "Difference | Unmatched") -> str:
    layers = f", layers {_short(one.layers)}" if one.layers else ""
    return f"{one.name}{layers}: {counted(one.modules, 'module')}, {_gib(one.bytes)} GiB"


def _short(layers: str) -> str:
    """Layer numbers on one line; the JSON lists all of them."""
    parts = layers.split(", ")
    return layers if len(parts) <= _PARTS else f"{', '.join(parts[:3])}, ... {parts[-1]}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.3f}"
