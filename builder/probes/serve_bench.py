"""Measures a running server: tokens a second and time to the first token, at concurrency 1 to 16.

Standard library only.  Each round sends as many requests at once as the concurrency says, 200
tokens each, temperature 0, and divides the tokens by the time until the last has ended; of three
rounds after a warm-up the median counts.  Over HTTP, streamed, tokens from the server's own usage.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from builder.probes import serve_client, verify_checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEVEL = "serve"
CONCURRENCY, PROMPT = serve_client.CONCURRENCY, serve_client.PROMPT
TOKENS, ROUNDS = serve_client.TOKENS, serve_client.ROUNDS
#: Ratios below this are slower, above its inverse faster: rounds of one server differ by a few
#: per cent.
NOTABLE = 0.97

Json = dict[str, Any]


def measure(
    url: str, model: str, tiny: bool, options: Json, concurrency: Sequence[int] = CONCURRENCY
) -> Iterator[Json]:
    """One row for each concurrency.

    Raises:
        ServeError: a request fails.
    """
    tokens, rounds = int(options.get("tokens", TOKENS)), int(options.get("rounds", ROUNDS))

    def one(number: int) -> Any:
        path, body = serve_client.request_of(model, tiny, number, tokens)
        return serve_client.stream(url, path, body, options["answer"])

    for row in serve_client.measure(one, concurrency, rounds):
        if row["failures"]:
            raise serve_client.ServeError(row["failures"][0])
        yield row


#: The two figures: the name of their check, and their key in a row.
SPEED, FIRST = "tokens/s", "first token, ms"
COLUMNS = {SPEED: "tokens_per_second", FIRST: "first_token_ms"}


def checks(url: str, model: str, tiny: bool, options: Json) -> list[Json]:
    """The bench as two checks with their figures."""
    expected = f"{TOKENS} tokens a request, concurrency {', '.join(map(str, CONCURRENCY))}"
    rows = []
    try:
        for row in measure(url, model, tiny, options):
            rows.append(row)
            speed, first = row["tokens_per_second"], row["first_token_ms"]
            count = row["concurrency"]
            verify_checks.say(
                f"  bench: {count:>2} at once: {speed:.1f} tokens/s, first after {first:.0f} ms"
            )
    except serve_client.ServeError as error:
        return [verify_checks.check(LEVEL, f"{model} {SPEED}", False, expected, str(error))]
    made = []
    for name, column in COLUMNS.items():
        figures = {f"at {row['concurrency']}": row[column] for row in rows}
        seen = ", ".join(f"{value:g} {key}" for key, value in figures.items())
        made.append(
            verify_checks.check(LEVEL, f"{model} {name}", True, expected, seen, figures=figures)
        )
    return made


def chat(url: str, model: str, timeout: float) -> tuple[list[str], str]:
    """The problem of an answer of the user's own model, and its beginning.

    Raises:
        ServeError: there is none.
    """
    body = {"model": model, "max_tokens": 64, "temperature": 0}
    body["messages"] = [{"role": "user", "content": PROMPT}]
    try:
        with serve_client.post(url, "/v1/chat/completions", body, timeout) as answer:
            message = json.load(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise serve_client.ServeError(f"no answer to a chat message: {error!r}") from None
    text = str(message.get("content") or message.get("reasoning_content") or "")
    if not text.strip():
        return ["an empty answer"], ""
    if re.fullmatch(r"(.)\1{15,}", text.strip(), re.DOTALL):
        return [f"one character over and over: {text.strip()[:16]}"], ""
    return [], " ".join(text.split())[:120]


# --- two measurements side by side -------------------------------------------------------------


def kernels_in(checks: Sequence[Json]) -> str:
    """The selected kernels of an evidence document, in a few words."""
    text = " ".join(str(c["seen"]) for c in checks if c["status"] == "pass")
    found = re.findall(r"Using (\S+) for NVFP4 GEMM|Using '(\w+)' NvFp4 MoE", text)
    names = dict.fromkeys((a or b).removeprefix("NvFp4LinearBackend.") for a, b in found)
    return ", ".join(names) or "unknown kernels"


def compare(own: Sequence[Json], other: Json, name: str) -> list[Json]:
    """This bench divided by another one, row by row; marks where this one is slower."""
    theirs = {c["name"]: c.get("figures") or {} for c in other.get("checks", [])}
    mine, yours = kernels_in(own), kernels_in(other.get("checks", []))
    expected = f"figures of {name} to divide by"
    made = []
    for check in own:
        label = check["name"]
        if check["status"] != "pass" or not label.endswith(tuple(COLUMNS)):
            continue
        figures = theirs.get(label, {})
        ratios = {
            key: round(value / figures[key], 3)
            for key, value in check["figures"].items()
            if figures.get(key)
        }
        if not ratios:
            reason = f"{name} holds no figures of '{label}'"
            made.append(verify_checks.not_run(LEVEL, f"{label}, compared", expected, reason))
            continue
        seen = verdict(ratios, mine, yours, more_is_better=label.endswith(SPEED))
        made.append(
            verify_checks.check(LEVEL, f"{label}, compared", True, expected, seen, figures=ratios)
        )
    if not made:
        reason = "no benchmark of this run finished"
        made.append(verify_checks.not_run(LEVEL, "bench, compared", expected, reason))
    return made


def verdict(ratios: dict[str, float], mine: str, yours: str, *, more_is_better: bool) -> str:
    """The ratios in words."""
    gains = {key: r if more_is_better else 1 / r if r else 0.0 for key, r in ratios.items()}
    slower = [key for key, gain in gains.items() if gain < NOTABLE]
    faster = [key for key, gain in gains.items() if gain > 1 / NOTABLE]
    parts = []
    if slower:
        parts.append(f"SLOWER than {yours} {', '.join(slower)}")
    if faster:
        parts.append(f"faster than {yours} {', '.join(faster)}")
    listed = ", ".join(f"{ratio:.2f}x {key}" for key, ratio in ratios.items())
    return f"{mine} is {' and '.join(parts) or f'as fast as {yours}'} ({listed})"
