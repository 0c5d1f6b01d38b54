"""The result of ``bench``: printed, stored, and compared with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from builder.common.document import Count, Document, Part, Text, read
from builder.common.hints import reason
from builder.diagnose.scan import Selection
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Above = Annotated[int, Meta(ge=1)]
Figure = Annotated[float, Meta(ge=0)]


class BenchSettings(Part, frozen=True, kw_only=True):
    """The settings; only benches with the same settings can be compared."""

    tokens: Annotated[Above, Meta(description="tokens of each answer")]
    rounds: Annotated[Above, Meta(description="rounds of which the median counts")]
    concurrency: Annotated[tuple[Above, ...], Meta(min_length=1)]
    prefill: Annotated[Count, Meta(description="words of the long prompt; 0 for no such run")]


class BenchRow(Part, frozen=True, kw_only=True):
    """The figures for one number of parallel requests."""

    concurrency: Above
    tokens_per_second: Annotated[Figure, Meta(description="of all requests together")]
    first_token_ms: Figure
    failed: Annotated[Count, Meta(description="requests that failed, with the warm-up")]
    short: Annotated[
        Count, Meta(description="answers with fewer tokens than settings.tokens, with the warm-up")
    ] = 0


class PrefillRow(Part, frozen=True, kw_only=True):
    """The figures for one long prompt and one generated token."""

    prompt_tokens: Above
    tokens_per_second: Figure
    first_token_ms: Figure


class Ratio(Part, frozen=True, kw_only=True):
    """This bench divided by the other."""

    what: Annotated[Text, Meta(description="prefill, or a number of requests at once")]
    tokens_per_second: Figure
    first_token_ms: Figure


class Against(Part, frozen=True, kw_only=True):
    """The bench that this one was compared with."""

    file: Text
    vllm: str
    kernels: tuple[Text, ...]
    ratios: tuple[Ratio, ...]


class Bench(Document, frozen=True, kw_only=True):
    """The figures of a server."""

    url: Text
    model: Text
    vllm: Annotated[str, Meta(description="from the server; empty if it does not report one")]
    settings: BenchSettings
    kernels: Annotated[
        tuple[Selection, ...], Meta(description="the selected kernels, from its log")
    ] = ()
    rows: tuple[BenchRow, ...]
    prefill: PrefillRow | None = None
    unmeasured: Annotated[
        tuple[Text, ...],
        Meta(description="prefill, and numbers of requests at once, that were not measured"),
    ] = ()
    against: Against | None = None

    def names(self) -> tuple[str, ...]:
        """The selected kernels."""
        return tuple(dict.fromkeys(one.kernel for one in self.kernels))

    def figures(self) -> Iterator[tuple[str, BenchRow | PrefillRow]]:
        """Each measurement with its name."""
        for row in self.rows:
            yield str(row.concurrency), row
        if self.prefill:
            yield "prefill", self.prefill


def read_bench(path: Path) -> Bench:
    """Read a stored bench.

    Raises:
        UsageError: it is not a bench.
    """
    try:
        return read(msgspec.json.decode(path.read_bytes()), Bench)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:
        problem = f"is not a bench: {reason(error)}"
    raise UsageError(f"--against {path} {problem} (-o writes one)", hint="leave --against out")


def refuse_unlike(other: Bench, path: Path, model: str, settings: BenchSettings) -> None:
    """Refuse a comparison of two different things.

    Raises:
        UsageError: model or settings differ; the message names the differences.
    """
    wanted = {"model": model, **msgspec.structs.asdict(settings)}
    theirs = {"model": other.model, **msgspec.structs.asdict(other.settings)}
    unlike = [
        f"{key} {_words(theirs[key])}, not {_words(wanted[key])}"
        for key in wanted
        if wanted[key] != theirs[key]
    ]
    if unlike:
        own = other.settings
        raise UsageError(
            f"--against {path} cannot be compared: it has {'; '.join(unlike)}",
            hint=f"--model {other.model} --tokens {own.tokens} "
            f"--concurrency {_words(own.concurrency)} --prefill {own.prefill}",
        )


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def compared(own: Bench, other: Bench, path: Path) -> Against:
    """The ratios for the loads that both measured."""
    theirs = dict(other.figures())
    ratios = []
    for what, row in own.figures():
        past = theirs.get(what)
        if past and past.tokens_per_second and past.first_token_ms:
            ratios.append(
                Ratio(
                    what=what,
                    tokens_per_second=round(row.tokens_per_second / past.tokens_per_second, 3),
                    first_token_ms=round(row.first_token_ms / past.first_token_ms, 3),
                )
            )
    return Against(file=str(path), vllm=other.vllm, kernels=other.names(), ratios=tuple(ratios))
