"""``spark-build preflight``."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import command
from builder.common.console import print_json, tell
from builder.common.hints import reason
from builder.common.options import Json, Option
from builder.errors import UsageError
from builder.serving.options import Given

if TYPE_CHECKING:
    from builder.proof.wholemodel import LayerRow
    from builder.serving.preflight import Choice, ModelMatrix, Preflight

GIB = 2**30


@command(
    "preflight",
    "spark-build preflight ./checkpoint --release 0.33.0",
    "spark-build preflight ./checkpoint --release 0.33.0 --layers b12x-full",
    "spark-build preflight ./checkpoint --release 0.33.0 --moe-backend marlin",
    "spark-build preflight openai/gpt-oss-120b --release 0.24.0",
    "spark-build preflight compose.yaml --checkpoint ./checkpoint",
    "spark-build preflight ./checkpoint --releases all --layers b12x-full",
    detail="The release's own code parses the flags and builds the whole model on a simulated "
    "GB10, from config.json alone. It names the kernel of each layer. Exit 5: the release "
    "refuses the model; with --releases, all of them do.",
    unknown=True,
)
def preflight(
    given: Given,
    html: Annotated[Path | None, Option("Write a page for people to this file.", "FILE")] = None,
    *,
    no_server: Annotated[
        bool,
        Option(
            "End the process that imported the release with this command; else it waits ten "
            "minutes for the next question."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Ask a release, or several, and print the answer; exit 5 if the model starts on none."""
    from builder import settings
    from builder.common.pypi import PackageIndex, vllm_releases
    from builder.serving import preflight as asking
    from builder.serving.preflightfile import request_of

    if no_server:
        settings.choose(settings.SERVER_IDLE, "0")
    if given.releases is None:
        document = asking.preflight(request_of(given))
        _write_page(document, html)
        print_json(document) if json else tell("\n".join(_lines(document)))
        asking.refuse_if_it_does_not_start(document)
        return
    if given.profiles:
        raise UsageError("--profiles is for one release; with --releases, name them by --layers")
    request = request_of(given)
    listed = None if given.releases.strip() == "all" else given.releases
    answers = asking.preflight_on(request, vllm_releases(PackageIndex(), listed))
    _write_page(answers, html)
    print_json(answers) if json else tell("\n".join(_matrix(answers)))
    asking.refuse_if_it_starts_nowhere(answers)


def _write_page(document: "Preflight | ModelMatrix", file: Path | None) -> None:
    """Write the page of ``--html``.

    Raises:
        UsageError: the file cannot be written.
    """
    if file is None:
        return
    from builder.common.files import write_atomically
    from builder.serving.preflightfile import preflight_page

    try:
        write_atomically(file, preflight_page(document).encode())
    except OSError as error:
        raise UsageError(f"cannot write {file}: {reason(error)}") from None


def _lines(document: "Preflight") -> Iterator[str]:
    vllm = document.packages.get("vllm", "")
    patched = f" with {', '.join(document.patched)}" if document.patched else ", unpatched"
    yield f"{document.model} on vLLM {vllm}{patched}"
    for name, value in document.environment.items():
        yield f"  {name}={value}".replace("\n", "\\n")  # an image's own
    yield f"  {shlex.join(['vllm', 'serve', document.served, *document.flags])}"
    yield ""
    yield from _verdict(document)
    yield from _table(document.layers)
    yield from _memory(document)
    yield from _loading(document)
    for text in document.warnings:
        yield from _wrapped(f"warning of vLLM: {text}")
    for trouble in document.troubles:
        yield from _wrapped(
            f"known trouble with {trouble.kernel}: {trouble.text} ({trouble.source})"
        )
    for cure in document.cures:
        yield f"  it starts {cure.change}"
    for text in document.passed_over:
        yield from _wrapped(f"attention backend not taken: {text}")
    if document.choices:
        yield ""
        yield "the same model on this release"
        yield from choice_lines(document.choices)
    yield from _simulated(document.simulated)
    if document.cached:
        yield "  cached: what the same release answered before to the same question"


def _loading(document: "Preflight") -> Iterator[str]:
    """What the release's own loader said of the checkpoint's tensors."""
    from builder.serving.loading import loading_words

    for words in loading_words(document.loading):
        yield from _wrapped(f"loading    {words}")


def _verdict(document: "Preflight") -> Iterator[str]:
    """Whether it starts, and what that rests on."""
    words = _WORDS[document.starts]
    yield (
        f"{words}: {_seen(document)}"
        if document.starts == "yes"
        else f"{words}{': ' + document.reason if document.reason else ''}"
    )
    if document.configuration and not document.assumed:
        yield from _wrapped("its configuration is that of our data: it could not be downloaded")
    if document.assumed:
        yield from _wrapped(f"assumed: {document.assumed}")
    if document.starts == "not known":
        yield f"  with it {_would(document)}"
    if document.refusal is not None and (document.assumed or not document.reason):
        from builder.proof.wholemodel import sentence

        yield from _wrapped(f"{document.refusal.type}: {sentence(document.refusal)}")
        if document.refusal.where:
            yield f"  raised by {document.refusal.where}"


#: How an answer is printed.
_WORDS = {
    "yes": "starts", "no": "DOES NOT START", "not known": "NOT KNOWN", "not run": "NOT RUN",
}  # fmt: skip
_IN_A_ROW = {"yes": "starts", "no": "REFUSES", "not known": "assumed", "not run": "not run"}


def _would(document: "Preflight") -> str:
    """What an answer of another configuration says."""
    return "the release refuses:" if document.refusal is not None else _seen(document)


def _seen(document: "Preflight") -> str:
    """What "starts" rests on."""
    sized = document.memory is not None and document.memory.block_tokens
    built = "the release built the model on a simulated GB10"
    return f"{built} and sized its KV cache" if sized else built


def _simulated(parts: tuple[str, ...]) -> Iterator[str]:
    """The variables that were left out, and how many parts were simulated."""
    from builder.proof.variables import LEFT_OUT

    for part in parts:
        if part.startswith(LEFT_OUT):
            yield from _wrapped(part)
    if parts:
        yield f"  simulated: {len(parts)} parts (--json lists them)"


def _table(rows: tuple["LayerRow", ...]) -> Iterator[str]:
    """A row for each kind of layer, and one for the rest."""
    from builder.serving.preflight import layers_to_show

    shown = layers_to_show(rows)
    if not shown:
        return
    yield f"{'layers':<42}{'kernel':<42}{'GiB':>7}"
    for row in shown:
        kernel = row.attention or ", ".join(row.kernels) or row.quantisation or "-"
        name = f"{row.count} x {row.pattern}" if row.count > 1 else row.pattern
        size = f"{row.bytes / GIB:.2f}" if row.bytes * 200 > GIB else ""
        if len(name) > 41:  # its end tells more than its beginning
            name = f"...{name[-38:]}"
        yield f"{name:<42}{kernel:<42}{size:>7}"
    rest = [row for row in rows if row not in shown]
    if rest:
        others = sum(row.bytes for row in rest) / GIB
        yield f"{f'{sum(r.count for r in rest)} others':<84}{others:>7.2f}"
    yield ""


def _matrix(document: "ModelMatrix") -> Iterator[str]:
    layers = f" with --layers {','.join(document.layers)}" if document.layers else ""
    yield f"{document.model} on {len(document.rows)} releases of vLLM{layers}"
    yield f"  {shlex.join(['vllm', 'serve', document.model, *document.flags])}"
    if document.assumed:
        yield from _wrapped(f"its configuration is not here; assumed: {document.assumed}")
    yield ""
    yield from choice_lines(document.rows)
    if document.starting:
        yield f"it starts on {', '.join(document.starting)}"


def choice_lines(choices: Sequence["Choice"]) -> Iterator[str]:
    """A table of answers: a row of kernels, or the reason why there are none."""
    width = max(len(choice.name) for choice in choices) + 2
    yield f"{'':<{width}}{'':<9}{'linear, experts, attention, KV cache'}"
    for choice in choices:
        word = _IN_A_ROW[choice.starts]
        text = choice.why or "; ".join(
            ", ".join(part) or "-"
            for part in (choice.linear, choice.experts, choice.attention, (choice.cache,))
        )
        if choice.troubles:
            text += f" (known trouble: {', '.join(choice.troubles)})"
        wrapped = textwrap.wrap(text, 100 - width - 9, break_on_hyphens=False)
        yield f"{choice.name:<{width}}{word:<9}{(wrapped or [''])[0]}"
        yield from (" " * (width + 9) + line for line in wrapped[1:])
    yield ""


def _memory(document: "Preflight") -> Iterator[str]:
    from builder.serving.preflight import gibibytes, surely_too_large

    memory, settings = document.memory, document.settings
    if memory is None:
        return
    several = settings.get("tensor_parallel_size") or 1
    of = f", of one of {several} nodes" if several != 1 else ""
    yield f"  weights    {gibibytes(memory.weight_bytes)}{of}"
    if memory.cache_bytes < 0:
        yield (
            f"  DOES NOT FIT into {memory.fraction:.2f} of {gibibytes(memory.total_bytes)}: "
            f"{gibibytes(-memory.cache_bytes)} too much"
        )
    else:
        yield (
            f"  KV cache   {gibibytes(memory.cache_bytes)} at --gpu-memory-utilization "
            f"{memory.fraction:.2f} of {gibibytes(memory.total_bytes)}"
            f" ({settings.get('kv_cache_dtype')})"
        )
    yield from _wrapped(
        f"assumed    {gibibytes(memory.overhead_bytes)} for activations and graphs (logs of GB10s "
        f"differ by up to {gibibytes(memory.overhead_error)}), {gibibytes(memory.free_bytes)} free "
        "at the start"
    )
    if memory.refusal and not surely_too_large(memory):
        yield "             it may fit: the difference is within the error of the estimate"
    if memory.sparks:
        yield f"  machines   the weights need at least {memory.sparks} GB10s"
    if memory.not_asked:
        yield from _wrapped(f"context    not known whether it fits: {memory.not_asked}")
    if memory.request_bytes:
        fit = f"; {memory.concurrency:.2f} of them fit" if memory.concurrency else ""
        yield (
            f"  context    one request of {memory.context} tokens takes "
            f"{gibibytes(memory.request_bytes)}{fit}"
        )
    if any(memory.longest.values()):
        most = ", ".join(f"{users} x {tokens}" for users, tokens in memory.longest.items())
        yield f"             at most {most} tokens"
    if memory.ceiling:
        yield f"  ceiling    {memory.ceiling} tokens/s for one request: 273 GB/s over its weights"
    if memory.expected:
        low, high = memory.expected
        yield f"  expected   {low} to {high} tokens/s: the share that ten models on GB10s reached"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent="  ", subsequent_indent="    ",
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
