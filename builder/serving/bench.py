"""Measures a running server with an OpenAI-compatible API: decode at several loads, and prefill."""

from __future__ import annotations

import http.client
import re
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from builder.applier.files import DOCUMENT, open_regular, read_regular
from builder.common.console import console, counted
from builder.common.document import Count, Document, Part, Text, read
from builder.common.hints import instead, os_hint, reason, shortened
from builder.diagnose.logs import open_log, texts
from builder.diagnose.matching import Selection
from builder.diagnose.verdict import diagnose
from builder.errors import RemoteError, UsageError, did_you_mean
from builder.probes import serve_client
from builder.probes.serve_client import ServeError
from builder.settings import API_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.diagnose.verdict import Diagnosis
    from builder.probes.serve_client import Timing


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
        return read(msgspec.json.decode(read_regular(path, DOCUMENT)), Bench)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
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


#: Seconds for a query about the server, and for each read of an answer: a long prompt takes
#: minutes before its first token.
ASK, ANSWER = 10.0, 600.0
#: Seconds for a whole answer to a query.
ASK_WHOLE = 60.0
#: The most threads, one for each request: vLLM runs 256 sequences by default.
_MOST = 1024
#: HTTP statuses for a missing or wrong key.
_NO_KEY = (401, 403)
#: Models that a message lists.
_LISTED = 10
_CHAT = "/v1/chat/completions"


class BenchRequest(NamedTuple):
    """What to measure, and what to compare it with."""

    url: str
    model: str
    settings: BenchSettings
    log: Path | None = None
    against: Path | None = None


class Measured(NamedTuple):
    """A bench, and the reasons why requests failed, with their counts."""

    bench: Bench
    failures: dict[str, int]


def settings_of(tokens: int, concurrency: str, prefill: int) -> BenchSettings:
    """The settings of a bench, from the command line.

    Raises:
        UsageError: ``concurrency`` is not a list of numbers.
    """
    words = [word.strip() for word in concurrency.split(",")]
    if not all(w.isascii() and w.isdigit() and 1 <= int(w) <= _MOST for w in words):
        raise UsageError(
            f"--concurrency {concurrency!r} is not a list of numbers from 1 to {_MOST}",
            hint="--concurrency 1,2,4,8,16",
        )
    counts = tuple(dict.fromkeys(map(int, words)))
    rounds = serve_client.ROUNDS
    return BenchSettings(tokens=tokens, rounds=rounds, concurrency=counts, prefill=prefill)


def bench(request: BenchRequest) -> Measured:
    """Measure a server.

    Raises:
        UsageError: an input cannot be read, or does not fit this server.
        RemoteError: the server does not answer, or its answer is malformed.
    """
    url = _root(request.url)
    server = _Server(url, _key())
    log = _read_log(request.log) if request.log else None
    other = read_bench(request.against) if request.against else None
    try:
        model = _model(server, request.model)
        vllm = _release(server)
        if log and vllm and log.vllm and log.vllm != vllm:
            raise UsageError(
                f"--log {request.log} is from vLLM {log.vllm}, but the server at {url} runs {vllm}",
                hint="docker logs NAME > server.log 2>&1",
            )
        if other and request.against:
            refuse_unlike(other, request.against, model, request.settings)
        failures: dict[str, int] = {}
        prefill = _prefill_or_none(server, model, request.settings.prefill, failures)
        rows = _rows(server, model, request.settings, failures)
        results = Bench(
            url=url,
            model=model,
            vllm=vllm,
            settings=request.settings,
            kernels=log.dispatch if log else (),
            rows=rows,
            prefill=prefill,
            unmeasured=_unmeasured(request.settings, rows, prefill),
        )
        if not rows and prefill is None:
            raise ServeError(next(iter(failures)))
    except ServeError as error:
        if error.status in _NO_KEY:
            why, hint = "the server needs its API key", f"export {API_KEY.name}=KEY"
        else:
            why, hint = "the server's log may show why", f"curl {url}/v1/models"
        raise RemoteError(f"{url}: {error}; {why}", hint=hint) from None
    if other and request.against:
        results = replace(results, against=compared(results, other, request.against))
    return Measured(results, failures)


class _Server(NamedTuple):
    """The address and key for requests."""

    url: str
    key: str

    def get(self, path: str) -> Any:
        """Request a JSON answer.

        Raises:
            ServeError: there is no such answer.
        """
        try:
            return serve_client.within(ASK_WHOLE, lambda: self._get(path))
        except ValueError:
            raise ServeError(f"{path} did not answer with JSON") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServeError(f"{path}: {serve_client.reason_of(error)}") from None

    def _get(self, path: str) -> Any:
        with serve_client.ask(self.url, path, ASK, key=self.key) as answer:
            return serve_client.read_json(answer, f"the answer to {path}")

    def stream(self, path: str, body: dict[str, Any]) -> Timing:
        """Request an answer, and time it.

        Raises:
            ServeError: the request fails, or the answer is empty.
        """
        return serve_client.stream(self.url, path, body, ANSWER, self.key)


def _key() -> str:
    """The server's key, from the environment: other users can see command lines.

    Raises:
        UsageError: it cannot be sent in an HTTP header.
    """
    key = API_KEY.value.strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"{API_KEY.name} has characters that an API key cannot have, such as line breaks",
            hint=f"export {API_KEY.name}=KEY",
        )
    return key


def _root(url: str) -> str:
    """The server's address without ``/v1``."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        good = good and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"{url!r} is not the address of a server", hint=instead(url, "http://localhost:8000")
        )
    return url.rstrip("/").removesuffix("/v1")


def _waits(path: Path) -> bool:
    """Whether it is a pipe on the disk, into which nobody may write; a shell's has a number."""
    return path.is_fifo() and path.parts[1:2] not in (("dev",), ("proc",))


def _read_log(path: Path) -> Diagnosis:
    try:
        with open_regular(path) if _waits(path) else open_log(path) as stream:
            (diagnosis, *_) = [diagnose(text) for _name, text in texts(stream, str(path))]
    except OSError as error:
        hint = os_hint(error, "docker logs NAME > server.log 2>&1")
        raise UsageError(f"cannot read {path}: {error.strerror or error}", hint=hint) from None
    if not diagnosis.dispatch:
        raise UsageError(
            f"no line of {path} shows the selected kernels; the log is needed from its start",
            hint=f"spark-build diagnose {shlex.quote(str(path))}",
        )
    return diagnosis


def _model(server: _Server, wanted: str) -> str:
    """The model's name on the server."""
    answer = server.get("/v1/models")
    try:
        names = [str(one["id"]) for one in answer["data"]][:_MOST]
    except (LookupError, TypeError):
        names = []
    if not names:
        raise ServeError("/v1/models lists no model")
    if not wanted and len(names) == 1:
        return names[0]
    if wanted in names:
        return wanted
    problem = f"no model {wanted!r}{did_you_mean(wanted, names)}" if wanted else "several models"
    some = [shortened(name) for name in names[:_LISTED]]
    more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
    raise UsageError(
        f"{server.url} has {problem}: {', '.join(some)}{more}",
        hint=f"--model {shlex.quote(some[0])}",
    )


def _release(server: _Server) -> str:
    """The server's vLLM version; empty for other servers."""
    try:
        answer = server.get("/version")
    except ServeError:
        return ""
    version = str(answer.get("version", "")) if isinstance(answer, dict) else ""
    return version if re.fullmatch(r"[\w.+!-]{1,100}", version) else ""


def _rows(
    server: _Server, model: str, settings: BenchSettings, failures: dict[str, int]
) -> tuple[BenchRow, ...]:
    """Measure decoding at each load, up to one that nothing answers; count failures by reason."""
    rows: list[BenchRow] = []
    short: list[int] = []
    before = 0
    first = time.time_ns()

    def one(number: int) -> Timing:
        path, body = serve_client.request_of(model, False, first + number, settings.tokens)
        timing = server.stream(path, body)
        if timing.tokens < settings.tokens:
            short.append(timing.tokens)
        return timing

    try:
        for measured_row in serve_client.measure(one, settings.concurrency, settings.rounds):
            for reason in measured_row["failures"]:
                failures[reason] = failures.get(reason, 0) + 1
            row = BenchRow(
                concurrency=measured_row["concurrency"],
                tokens_per_second=measured_row["tokens_per_second"],
                first_token_ms=measured_row["first_token_ms"],
                failed=len(measured_row["failures"]),
                short=len(short) - before,
            )
            before = len(short)
            console.say(f"{row.concurrency} at once: {row.tokens_per_second:.1f} tokens/s")
            rows.append(row)
    except ServeError as error:
        count = settings.concurrency[len(rows)]
        failures[str(error)] = failures.get(str(error), 0) + count
        console.warn(f"{count} at once: every request failed, and no larger load is measured")
    if short:
        console.warn(
            f"{counted(len(short), 'answer')} had fewer tokens than --tokens {settings.tokens}, "
            f"the shortest {min(short)}: the figures are for shorter answers"
        )
    return tuple(rows)


def _unmeasured(
    settings: BenchSettings, rows: tuple[BenchRow, ...], prefill: PrefillRow | None
) -> tuple[str, ...]:
    """What a server that fails leaves out of a bench."""
    missing = ["prefill"] if settings.prefill and prefill is None else []
    return (*missing, *map(str, settings.concurrency[len(rows) :]))


def _prefill_or_none(
    server: _Server, model: str, length: int, failures: dict[str, int]
) -> PrefillRow | None:
    """Measure a long prompt; a failure is counted, and said."""
    try:
        return _prefill(server, model, length)
    except ServeError as error:
        failures[str(error)] = 1
        console.warn(f"prefill is not measured: {error}")
        return None


def _prefill(server: _Server, model: str, length: int) -> PrefillRow | None:
    """Measure a long prompt, after a warm-up; all prompts of a bench begin differently."""
    if not length:
        return None

    def one(number: int) -> Timing:
        words = serve_client.PROMPT.split()
        content = f"({number} long) " + " ".join(words[i % len(words)] for i in range(length))
        body = {"model": model, "max_tokens": 1, "temperature": 0}
        body["messages"] = [{"role": "user", "content": content}]
        return server.stream(_CHAT, body)

    def timed() -> Timing:
        timings, failed = serve_client.at_once(one, [time.time_ns()])
        if failed:
            raise ServeError(f"a prompt of {length} words (--prefill): {failed[0]}")
        if not timings[0].prompt:
            raise ServeError("the stream had no usage.prompt_tokens: prefill cannot be measured")
        return timings[0]

    timed()
    last = timed()
    row = PrefillRow(
        prompt_tokens=last.prompt,
        tokens_per_second=round(last.prompt / last.first, 2),
        first_token_ms=round(last.first * 1000, 2),
    )
    console.say(f"prefill of {row.prompt_tokens} tokens: {row.tokens_per_second:.1f} tokens/s")
    return row


def lines(results: Bench) -> Iterator[str]:
    """A bench as text."""
    yield f"{' '.join(results.model.split())} at {results.url}" + (
        f", vLLM {results.vllm}" if results.vllm else ""
    )
    if results.kernels:
        yield f"selected: {', '.join(results.names())}"
    yield ""
    ratios = {one.what: one for one in results.against.ratios} if results.against else {}
    yield f"{'at once':>8}  {'tokens/s':>9}  {'first token':>11}" + ("  ratio" if ratios else "")
    for what, row in results.figures():
        ratio = f"  {ratios[what].tokens_per_second:.2f}x" if what in ratios else ""
        failed = f"  {row.failed} failed" if isinstance(row, BenchRow) and row.failed else ""
        long = f"  {row.prompt_tokens} tokens" if isinstance(row, PrefillRow) else ""
        yield (
            f"{what:>8}  {row.tokens_per_second:>9.1f}  {row.first_token_ms:>8.0f} ms"
            f"{ratio}{failed}{long}"
        )
    if results.unmeasured:
        yield f"\nnot measured: {', '.join(results.unmeasured)}"
    if results.against:
        known = ", ".join(results.against.kernels) or "unknown kernels"
        release = f"vLLM {results.against.vllm}" if results.against.vllm else "unknown release"
        yield f"\nratio: tokens/s divided by those of {results.against.file} ({release}, {known})"


_WIDTH, _LEFT, _TRACK, _HEAD, _ROW = 400, 90, 230, 62, 26
_STYLE = """
.paper { fill: #ffffff }
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.h { font-size: 16px; font-weight: 700 }
.own { fill: #0a5cb8 }
.other { fill: #9da7b1 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 }
  text { fill: #e6edf3 }
  .own { fill: #6cb0ff }
}
"""


def plot(results: Bench, other: Bench | None = None) -> str:
    """Tokens a second at each load; the same numbers give the same file."""
    theirs = {row.concurrency: row.tokens_per_second for row in other.rows} if other else {}
    most = max([*theirs.values(), *(row.tokens_per_second for row in results.rows), 1e-9])
    bars: list[str] = []
    top = float(_HEAD)
    for row in results.rows:
        bars.append(f'<text x="8" y="{top + 15:.0f}">{row.concurrency} at once</text>')
        for kind, value in (("own", row.tokens_per_second), ("other", theirs.get(row.concurrency))):
            if value is not None:
                bars += _bar(kind, value, value / most, top)
                top += _ROW
        top += 6
    release = f"vLLM {results.vllm}" if results.vllm else ""
    below = ", ".join(part for part in (release, *results.names()) if part)
    title = escape(f"{results.model}: tokens/s")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top:.0f}" '
        f'viewBox="0 0 {_WIDTH} {top:.0f}" role="img">\n<title>{title}</title>\n'
        f'<style>{_STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="h" x="8" y="22">{title}</text>\n'
        f'<text x="8" y="44">{escape(below)}</text>\n' + "\n".join(bars) + "\n</svg>\n"
    )


def _bar(kind: str, value: float, share: float, top: float) -> Iterator[str]:
    width = share * _TRACK
    yield (
        f'<rect class="{kind}" x="{_LEFT}" y="{top:.0f}" width="{width:.1f}" height="{_ROW - 6}"/>'
    )
    yield f'<text x="{_LEFT + width + 6:.1f}" y="{top + 15:.0f}">{value:.1f}</text>'
