"""Streams that no server should send are timed, or refused in words."""

from __future__ import annotations

import io
import json
import os
import random
from typing import TYPE_CHECKING

import pytest

from builder.probes import serve_client
from builder.probes.serve_client import ServeError, events, stream
from tests.unit.chance import CASES
from tests.unit.serving.test_lint_fuzz import bounded

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = int(os.environ.get("SPARK_BUILD_TEST_SEED", "20261123"))
GOOD = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 44}},
    )
)
DONE = b"data: [DONE]\n\n"
PIECES = [
    b"data: ", b"data:", b"\n", b"\r\n", b"[DONE]", b"{", b"}", b"[", b"]", b'"', b"null", b"1e999",
    b"-1", b"NaN", b'"choices": 5', b'"usage": []', b'"error": {"message": "dead"}', b'"error": 1',
    b"\xff\xfe", b"\0", b"event: error\n", b": ping\n", b"9" * 5000, b"[" * 5000, b"x" * 70_000,
]  # fmt: skip


def timed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> serve_client.Timing:
    """The timing of a stream of these bytes."""
    monkeypatch.setattr(serve_client, "post", lambda *_: io.BytesIO(data))
    return stream("http://127.0.0.1", "/v1/x", {"max_tokens": 5}, 1.0)


def test_a_good_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(monkeypatch, GOOD + DONE)
    assert (found.tokens, found.prompt) == (5, 44)


def test_changed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(SEED)
    refused = 0
    with bounded():
        for _ in range(100 * CASES):
            data = bytearray(GOOD + DONE)
            for _ in range(numbers.randint(1, 5)):
                at = numbers.randrange(len(data) + 1)
                to = min(len(data), at + numbers.choice((0, 1, 5, 40)))
                data[at:to] = numbers.choice((b"", numbers.choice(PIECES), bytes(data[:at])))
            said, found = "", None
            try:
                found = timed(monkeypatch, bytes(data))
            except ServeError as error:
                refused += 1
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{error!r} of {bytes(data)!r}") from error
            assert found is None or 0 < found.tokens <= serve_client.MOST_TOKENS, bytes(data)
            assert bool(said) is (found is None), bytes(data)
            assert len(said) < 500, bytes(data)
    assert refused > 10 * CASES


class Endless(io.RawIOBase):
    """A stream that repeats a piece for ever."""

    def __init__(self, piece: bytes) -> None:
        super().__init__()
        self.piece = piece
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = (self.piece * (len(buffer) // len(self.piece) + 1))[: len(buffer)]
        buffer[:] = data
        self.given += len(data)
        return len(data)


@pytest.mark.parametrize(
    ("piece", "said"),
    [(b"x", "longer than 1 MiB"), (b": ping\n", "larger than 2 MiB"), (b"\n", "larger than 2 MiB")],
)
def test_an_endless_stream_is_read_in_part(
    monkeypatch: pytest.MonkeyPatch, piece: bytes, said: str
) -> None:
    monkeypatch.setattr(serve_client, "LARGEST_ANSWER", 2 << 20)
    endless = Endless(piece)
    with pytest.raises(ServeError, match=said):
        list(events(io.BufferedReader(endless)))
    assert endless.given < 4 << 20


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: serve_client.read_json(Endless(b" "), "it"), "it is larger than 8 MiB"),
        (lambda: serve_client.read_json(io.BytesIO(b"[" * 90_000), "it"), "nested too deeply"),
    ],
)
def test_an_answer_is_bounded(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ServeError, match=said):
        call()
