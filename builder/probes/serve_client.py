"""Talks to a vLLM server over HTTP, and measures it.  Standard library only."""

from __future__ import annotations

import http.client
import json
import math
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The measurement: requests at once, tokens of each, rounds of which the median counts.
CONCURRENCY = (1, 2, 4, 8, 16)
TOKENS, ROUNDS = 200, 3
PROMPT = "Explain how a heat pump moves heat from a cold place to a warm one, step by step."
#: No proxy: the server is local or on the same network.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: Bytes of a line and of an answer, at most: an event has some hundred, an answer one for a token.
LARGEST_LINE, LARGEST_ANSWER = 1 << 20, 64 << 20
#: Seconds for a whole streamed answer, and tokens that a server may count.
WHOLE, MOST_TOKENS = 3600.0, 1_000_000_000
#: Characters of a server's message that are shown.
_SHOWN = 300
Json = dict[str, Any]


class ServeError(Exception):
    """The server did not answer correctly; ``status`` is that of an HTTP error."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Timing(NamedTuple):
    """One streamed answer; times in seconds."""

    tokens: int
    first: float
    total: float
    prompt: int = 0


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(url: str) -> bool:
    """Whether the server reports that it is ready."""
    try:
        with OPENER.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def post(url: str, path: str, body: Json, timeout: float, key: str = "") -> Any:
    """The open answer to a request.

    Raises:
        ServeError: no answer, or an HTTP error, with the server's message.
    """
    return ask(url, path, timeout, json.dumps(body).encode(), key)


def ask(url: str, path: str, timeout: float, data: bytes | None = None, key: str = "") -> Any:
    """The open answer to a request; ``key`` is sent to this server only.

    Raises:
        ServeError: no answer, or an HTTP error, with the server's message without the key.
    """
    headers = {"Content-Type": "application/json"} if data is not None else {}
    request = urllib.request.Request(f"{url}{path}", data=data, headers=headers)
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        return OPENER.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        words = " ".join(error.read(2000).decode("utf-8", "replace").split())
        words = words.replace(key, "***") if key else words
        raise ServeError(f"{path} answered {error.code}: {words[:300]}", error.code) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServeError(f"{path} did not answer: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """The reason of a connection error, without Python's numbers and names."""
    reason = getattr(error, "reason", error)  # urllib wraps that of the system
    return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def complete(url: str, model: str, prompt: list[int], tokens: int, timeout: float) -> Json:
    """One completion with the log probability of each token.

    Raises:
        ServeError: it fails, or is not JSON.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body.update(logprobs=1, ignore_eos=True)
    try:
        with post(url, "/v1/completions", body, timeout) as answer:
            value: Json = read_json(answer, "the completion")
    except (ValueError, OSError) as error:
        raise ServeError(f"the completion was cut off: {reason_of(error)}") from None
    return value


def read_json(answer: Any, what: str) -> Any:
    """The JSON of an answer.

    Raises:
        ServeError: it is too large, or nested too deeply.
        ValueError: it is not JSON.
    """
    data = answer.read(LARGEST_LINE * 8 + 1)
    if len(data) > LARGEST_LINE * 8:
        raise ServeError(f"{what} is larger than {LARGEST_LINE * 8 >> 20} MiB")
    try:
        return json.loads(data)
    except RecursionError:
        raise ServeError(f"{what} is nested too deeply") from None


def judge(answer: Json, tokens: int) -> tuple[list[str], str]:
    """The problem of a completion, and a summary of it."""
    try:
        choice = answer["choices"][0]
        probabilities = choice["logprobs"]["token_logprobs"]
        words = choice["logprobs"]["tokens"]
        count = int(answer["usage"]["completion_tokens"])
    except (LookupError, TypeError, ValueError) as error:
        return [f"no completion with log probabilities in it ({error!r})"], ""
    problems = []
    if count != tokens or len(probabilities) != tokens:
        problems.append(f"{count} tokens and {len(probabilities)} probabilities, not {tokens}")
    wrong = [p for p in probabilities if not isinstance(p, (int, float)) or not math.isfinite(p)]
    if wrong:
        problems.append(f"{len(wrong)} of {len(probabilities)} log probabilities are {wrong[0]}")
    elif any(p > 1e-6 for p in probabilities):
        problems.append(f"a log probability of {max(probabilities):g} is above 0")
    if words and set(words) == {"t0"}:
        problems.append("token 0 every time (what people see as !!!!!): the logits are not numbers")
    seen = f"{count} tokens: {' '.join(map(str, words[:8]))}"
    return problems, seen


def stream(url: str, path: str, body: Json, timeout: float, key: str = "") -> Timing:
    """One streamed answer, timed.

    Raises:
        ServeError: the request fails, or the answer is empty, does not end, or reports an error.
    """
    start = time.monotonic()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, tokens, prompt, parts = None, 0, 0, 0
    try:
        with post(url, path, body, timeout, key) as answer:
            for event in events(answer, start + WHOLE):
                parts += bool(event.get("choices"))
                if parts and first is None:
                    first = time.monotonic() - start
                if parts > 2 * body["max_tokens"] + 100:
                    raise ServeError(f"the stream has far more than {body['max_tokens']} tokens")
                if event.get("usage"):
                    tokens = _count(event["usage"]["completion_tokens"])
                    prompt = _count(event["usage"].get("prompt_tokens") or 0)
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        raise ServeError(f"the stream was cut off: {reason_of(error)}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise ServeError(
            f"the stream is not one of chat completions: {error!r:.{_SHOWN}}"
        ) from None
    if first is None:
        raise ServeError("the stream had no token")
    if not tokens:
        raise ServeError("the stream had no usage.completion_tokens: tokens cannot be counted")
    return Timing(tokens, max(first, 1e-9), time.monotonic() - start, prompt)


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= MOST_TOKENS:
        raise ServeError(f"the stream counts {str(value)[:_SHOWN]} tokens")
    return number


def events(answer: Any, end: float = math.inf) -> Iterator[Json]:
    """The JSON of each server-sent event, up to ``[DONE]``.

    Raises:
        ServeError: the stream has an error, no end, or none before ``end`` (monotonic seconds).
        ValueError: an event is not JSON.
    """
    size = 0
    while raw := answer.readline(LARGEST_LINE + 1):
        size += len(raw)
        if len(raw) > LARGEST_LINE:
            raise ServeError(f"a line of the stream is longer than {LARGEST_LINE >> 20} MiB")
        if size > LARGEST_ANSWER:
            raise ServeError(f"the stream is larger than {LARGEST_ANSWER >> 20} MiB")
        if time.monotonic() > end:
            raise ServeError(f"the stream did not end in {WHOLE:.0f} s")
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        text = line[5:].strip()
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except RecursionError:
            raise ServeError("an event of the stream is nested too deeply") from None
        if isinstance(event, dict) and event.get("error"):
            raise ServeError(f"the server reported in the stream: {_reported(event['error'])}")
        yield event
    raise ServeError("the stream was cut off: it ended without [DONE]")


def _reported(error: Any) -> str:
    """The message of an error in a stream."""
    message = error.get("message") or error if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_SHOWN]


def request_of(model: str, tiny: bool, number: int, tokens: int) -> tuple[str, Json]:
    """Path and body of one request; each prompt starts differently, to avoid the prefix cache."""
    body: Json = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if tiny:
        body["prompt"] = [1, *((number * 37 + i * 11) % 2000 + 10 for i in range(64))]
        return "/v1/completions", body
    body["messages"] = [{"role": "user", "content": f"({number}) {PROMPT}"}]
    return "/v1/chat/completions", body


def at_once(
    one: Callable[[int], Timing], numbers: Sequence[int], limit: float = WHOLE + 60
) -> tuple[list[Timing], list[str]]:
    """Send requests at the same time; return the answers, and the errors of the others.

    An interruption does not wait for them, and nothing waits longer than ``limit`` seconds.
    """
    ended: dict[int, Timing | str] = {}

    def ask(number: int) -> None:
        try:
            ended[number] = one(number)
        except ServeError as error:
            ended[number] = str(error)
        except Exception as error:
            ended[number] = repr(error)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in numbers]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:  # the machine has no more threads
        for number in numbers:
            ended.setdefault(number, str(error))
    end = time.monotonic() + limit
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    late = f"no whole answer in {limit:.0f} s"
    results = [ended.get(number, late) for number in numbers]
    timings = [one for one in results if not isinstance(one, str)]
    return timings, [one for one in results if isinstance(one, str)]


def within(limit: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises, unless it takes longer than ``limit`` seconds.

    Raises:
        ServeError: the call takes longer; it goes on in a thread that no exit waits for.
    """
    ended: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if not ended:
        raise ServeError(f"no whole answer in {limit:.0f} s")
    value, error = ended[0]
    if error is not None:
        raise error
    return value


def measure(
    one: Callable[[int], Timing], concurrency: Sequence[int], rounds: int
) -> Iterator[Json]:
    """One row for each concurrency; the first round of each is the warm-up and does not count.

    Raises:
        ServeError: no request of a warm-up, or of the rounds after it, was answered.
    """
    numbers = iter(range(1 << 30))
    for count in concurrency:
        speeds: list[float] = []
        firsts: list[float] = []
        failures: list[str] = []
        for turn in range(rounds + 1):
            start = time.monotonic()
            timings, failed = at_once(one, [next(numbers) for _ in range(count)])
            took = time.monotonic() - start
            if not timings and (not turn or not firsts):
                raise ServeError(failed[0])
            failures += failed
            if turn:
                speeds.append(sum(t.tokens for t in timings) / took)
                firsts += [t.first for t in timings]
        yield {
            "concurrency": count,
            "tokens_per_second": round(statistics.median(speeds), 2),
            "first_token_ms": round(statistics.median(firsts) * 1000, 2),
            "failures": failures,
        }
