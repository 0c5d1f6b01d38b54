"""``bench`` against a small server that behaves well, or badly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from builder.probes import serve_client
from builder.serving import bench
from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.caller import Call

LOG = """(APIServer pid=1) INFO 11-20 10:00:00 [utils.py:1] vLLM server version 0.33.0
(EngineCore pid=2) INFO 11-20 10:00:01 [x.py:1] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
"""
SMALL = ("--concurrency", "1,3", "--tokens", 5, "--prefill", 40)


class Server(LoopbackServer):
    """A chat server under orders."""

    def __init__(self) -> None:
        self.models = ["me/mine"]
        self.version: str | None = "0.33.0"
        self.usage: dict[str, int] | None = {"completion_tokens": 5, "prompt_tokens": 44}
        self.asked: list[dict[str, Any]] = []
        #: which requests fail, by their number from 1 on
        self.failing: range | set[int] = set()
        self.stream = True
        #: what an answer is, in place of a stream; the last part is sent again without end
        self.parts: list[bytes] = []
        self.repeat = False
        #: from this request on
        self.from_request = 1
        self.models_answer = b""
        #: what requests must bring, and what they brought
        self.key = ""
        self.keys: list[str | None] = []
        #: where it sends questions on to
        self.elsewhere = ""
        self.hangs = threading.Event()
        self.release = threading.Event()
        self.listen(_Handler)


class _Handler(LoopbackHandler):
    owner: Server

    def do_GET(self) -> None:
        if not self._may():
            return
        if self.owner.elsewhere:
            self.send_response(302)
            self.send_header("Location", f"{self.owner.elsewhere}{self.path}")
            self.end_headers()
            return
        if self.path == "/v1/models" and self.owner.models_answer:
            self._send([self.owner.models_answer])
        elif self.path == "/v1/models":
            self._json({"data": [{"id": name} for name in self.owner.models]})
        elif self.path == "/version" and self.owner.version:
            self._json({"version": self.owner.version})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner.asked.append(body)
        if not self._may():
            return
        if owner.hangs.is_set():
            owner.release.wait(30)
            return
        if len(owner.asked) in owner.failing:
            self.send_error(500, "engine is dead")
            return
        self.send_response(200)
        self.end_headers()
        if owner.parts and len(owner.asked) >= owner.from_request:
            self._parts()
            return
        if not owner.stream:
            self.wfile.write(b"data: [1]\n\n")
            return
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "x"}}]}]
        events += [{"choices": [], "usage": owner.usage}] if owner.usage else []
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, parts: list[bytes]) -> None:
        self.send_response(200)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

    def _parts(self) -> None:
        with contextlib.suppress(OSError):
            for part in self.owner.parts:
                self.wfile.write(part)
            while self.owner.repeat:
                self.wfile.write(self.owner.parts[-1])

    def _may(self) -> bool:
        given = self.headers.get("Authorization")
        self.owner.keys.append(given)
        if not self.owner.key or given == f"Bearer {self.owner.key}":
            return True
        self.send_response(401)
        self.end_headers()
        self.wfile.write(f"wrong key: {given}".encode())
        return False

    def _json(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made
        made.release.set()


def test_what_a_server_does(server: Server, call: Call) -> None:
    Path("server.log").write_text(LOG, "utf-8")
    result = call("bench", f"{server.url}/v1/", *SMALL, "--log", "server.log", "--json")
    assert result.code == 0, result.err
    made = result.json
    assert (made["url"], made["model"], made["vllm"]) == (server.url, "me/mine", "0.33.0")
    assert made["kernels"][0]["kernel"] == "MarlinNvFp4LinearKernel"
    assert [row["concurrency"] for row in made["rows"]] == [1, 3]
    assert all(row["tokens_per_second"] > 0 and row["failed"] == 0 for row in made["rows"])
    assert made["prefill"]["prompt_tokens"] == 44
    assert len(server.asked) == (1 + 3) * 4 + 2, "prefill twice; a warm-up and three rounds"
    assert {body["temperature"] for body in server.asked} == {0}
    assert [body["max_tokens"] for body in server.asked] == [1, 1] + [5] * 16
    prompts = {body["messages"][0]["content"] for body in server.asked}
    assert len(prompts) == len(server.asked), "no prompt is in a cache"
    assert call("bench", server.url, *SMALL).code == 0
    prompts = {body["messages"][0]["content"] for body in server.asked}
    assert len(prompts) == len(server.asked), "nor that of an earlier bench"


def test_it_is_kept_drawn_and_compared(server: Server, call: Call) -> None:
    assert call("bench", server.url, *SMALL, "-o", "a.json").code == 0
    kept = json.loads(Path("a.json").read_text("utf-8"))
    for row in [*kept["rows"], kept["prefill"]]:
        row.update(tokens_per_second=1.0, first_token_ms=1.0)
    Path("a.json").write_text(json.dumps(kept), "utf-8")
    words = ("bench", server.url, *SMALL, "--against", "a.json")
    result = call(*words, "--plot", "a.svg", "--json")
    assert result.code == 0, result.err
    ratios = {one["what"]: one["tokens_per_second"] for one in result.json["against"]["ratios"]}
    figures = {str(r["concurrency"]): r["tokens_per_second"] for r in result.json["rows"]}
    figures["prefill"] = result.json["prefill"]["tokens_per_second"]
    assert ratios == pytest.approx(figures, rel=1e-3), "divided by 1"
    drawing = ElementTree.fromstring(Path("a.svg").read_text("utf-8"))
    kinds = [one.get("class") for one in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds == ["paper", "own", "other", "own", "other"]
    assert "ratio: tokens/s divided by those of a.json (vLLM 0.33.0" in call(*words).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", 6), "tokens 5, not 6"),
        (("--concurrency", "1,2"), "concurrency 1,3, not 1,2"),
        (("--prefill", 0), "prefill 40, not 0"),
        (("--model", "other"), "model me/mine, not other"),
    ],
)
def test_unlike_benches_are_refused_before_anything_is_asked(
    server: Server, call: Call, words: tuple[object, ...], said: str
) -> None:
    assert call("bench", server.url, *SMALL, "-o", "a.json").code == 0
    server.models.append("other")
    server.asked.clear()
    own = ("--model", "me/mine", *SMALL, *words)
    result = call("bench", server.url, *own, "--against", "a.json")
    assert result.code == 2
    assert said in result.err
    assert not server.asked


def test_a_server_that_is_down(server: Server, call: Call) -> None:
    server.__exit__()
    result = call("bench", server.url, "-o", "a.json")
    assert result.code == 8
    assert server.url in result.err
    assert not Path("a.json").exists()


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (None, "usage.completion_tokens"),
        ({"completion_tokens": 5}, "usage.prompt_tokens"),
    ],
)
def test_an_answer_without_usage(
    server: Server, call: Call, usage: dict[str, int] | None, said: str
) -> None:
    server.usage = usage
    result = call("bench", server.url, *SMALL)
    assert result.code == 8
    assert said in result.err


def test_failed_requests_are_counted_and_said(server: Server, call: Call) -> None:
    server.failing = {8, 12, 13}  # of three at once: one in the warm-up, two in rounds
    result = call("bench", server.url, *SMALL, "--json")
    assert result.code == 8
    assert [row["failed"] for row in result.json["rows"]] == [0, 3]
    assert "3 requests failed" in result.json["error"]["message"]
    assert "engine is dead" in result.json["error"]["message"]


@pytest.mark.parametrize("failing", [range(1, 99), range(3, 99), range(10, 99)])
def test_a_load_that_nothing_answers(server: Server, call: Call, failing: range) -> None:
    server.failing = failing
    result = call("bench", server.url, *SMALL)
    assert result.code == 8
    assert "answered 500" in result.err


def test_a_stream_of_something_else(server: Server, call: Call) -> None:
    server.stream = False
    result = call("bench", server.url, *SMALL)
    assert result.code == 8
    assert "not one of chat completions" in result.err


def test_a_server_that_hangs(server: Server, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ANSWER", 0.05)
    server.hangs.set()
    result = call("bench", server.url, *SMALL)
    assert result.code == 8
    assert "timed out" in result.err


def test_an_interruption_does_not_wait_for_answers(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hangs.set()
    pid = os.getpid()
    before = set(threading.enumerate())

    class Answered(list[Any]):
        def append(self, value: Any) -> None:
            super().append(value)
            os.kill(pid, signal.SIGINT)

    server.asked = Answered()
    result = call("bench", server.url, *SMALL, "-o", "a.json")
    assert result.code == 130
    assert not server.release.is_set(), "the server still hangs"
    left = set(threading.enumerate()) - before
    assert all(one.daemon for one in left), "the end of the process does not wait either"
    assert not Path("a.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("localhost:8000",), "is not the address of a server"),
        (("http://localhost:port",), "is not the address of a server"),
        (("http://me:secret@localhost",), "is not the address of a server"),
        (("URL", "--concurrency", "1,0"), "is not a list of numbers"),
        (("URL", "--concurrency", "x"), "is not a list of numbers"),
        (("URL", "--model", "me/mina"), "did you mean 'me/mine'"),
        (("URL", "--log", "none.log"), "cannot read none.log"),
        (
            ("URL", "--log", "empty.log"),
            "shows the selected kernels; the log is needed from its start",
        ),
        (("URL", "--log", "old.log"), "is from vLLM 0.30.0"),
        (("URL", "--against", "none.json"), "--against none.json cannot be read: No such file"),
        (("URL", "-o", "a.json", "--plot", "./a.json"), "-o and --plot name the same file"),
        (("URL", "-o", "old.log", "--log", "old.log"), "--log and -o name the same file"),
        (("URL", "--plot", "b", "--against", "b"), "--against and --plot name the same file"),
        (("URL", "--prefill", "1000001"), "--prefill"),
        (("URL", "--against", "empty.log"), "is not a bench: Object missing required field"),
        (("URL", "--against", "old.log"), "old.log is not a bench: it is not valid JSON"),
        (("URL", "-o", "none/a.json"), "a folder that does not exist"),
        (("URL", "--plot", "."), "is a folder"),
    ],
)
def test_bad_input(server: Server, call: Call, words: tuple[str, ...], said: str) -> None:
    Path("empty.log").write_text("{}\n", "utf-8")
    Path("old.log").write_text(LOG.replace("0.33.0", "0.30.0"), "utf-8")
    result = call("bench", *(server.url if word == "URL" else word for word in words))
    assert result.code == 2
    assert said in " ".join(result.err.split())
    assert not server.asked


def test_answers_that_are_shorter_than_asked(server: Server, call: Call) -> None:
    assert "fewer" not in call("bench", server.url, *SMALL).err
    server.usage = {"completion_tokens": 1, "prompt_tokens": 44}
    result = call("bench", server.url, *SMALL, "--json")
    assert result.code == 0
    assert "16 answers had fewer tokens than --tokens 5, the shortest 1: " in result.err
    assert sum(row["short"] for row in result.json["rows"]) == 16


def test_the_key_of_a_server(server: Server, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "sk-secret"
    refused = call("bench", server.url, *SMALL)
    assert (refused.code, server.keys) == (8, [None])
    assert "try: export SPARK_BUILD_API_KEY=KEY" in refused.err
    monkeypatch.setenv("SPARK_BUILD_API_KEY", "sk-other")
    refused = call("bench", server.url, *SMALL)
    assert (refused.code, "wrong key: Bearer ***" in refused.err) == (8, True)
    monkeypatch.setenv("SPARK_BUILD_API_KEY", "sk-secret\n")
    server.keys.clear()
    done = call("bench", server.url, *SMALL, "-o", "a.json", "--plot", "a.svg", "--json")
    assert done.code == 0
    assert set(server.keys) == {"Bearer sk-secret"}
    kept = Path("a.json").read_text("utf-8") + Path("a.svg").read_text("utf-8")
    assert "secret" not in done.out + done.err + refused.err + kept


@pytest.mark.parametrize("key", ["two\nlines", "k\xe4y"])
def test_a_key_that_no_request_can_bring(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SPARK_BUILD_API_KEY", key)
    result = call("bench", server.url, *SMALL)
    assert (result.code, server.keys) == (2, [])
    assert "SPARK_BUILD_API_KEY has characters" in result.err
    assert key not in result.err


def test_the_key_is_not_given_to_another_server(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_BUILD_API_KEY", "sk-secret")
    with Server() as other:
        other.elsewhere = server.url
        call("bench", other.url, *SMALL)
        assert set(other.keys) == {"Bearer sk-secret"}
    assert server.keys
    assert set(server.keys) == {None}


def test_a_connection_that_is_refused_is_said_in_words(server: Server, call: Call) -> None:
    server.__exit__()
    err = call("bench", server.url).err
    why = "Connection refused; the server's log may show why\n"
    assert f"{server.url}: /v1/models did not answer: {why}" in err


def test_several_models_and_another_server_than_vllm(server: Server, call: Call) -> None:
    server.models, server.version = ["a", "b"], None
    assert "several models" in call("bench", server.url, *SMALL).err
    result = call("bench", server.url, "--model", "b", *SMALL, "--json")
    assert (result.json["model"], result.json["vllm"]) == ("b", "")
    server.models = []
    assert call("bench", server.url).code == 8


CHUNK = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'


@pytest.mark.parametrize(
    ("parts", "repeat", "said"),
    [
        ([b"data: " + b"x" * 100_000], True, "a line of the stream is longer than 1 MiB"),
        ([b": ping\n" * 10_000], True, "the stream is larger than 2 MiB"),
        ([CHUNK * 100], True, "the stream has far more than"),
        ([CHUNK], False, "the stream was cut off: it ended without [DONE]"),
        ([CHUNK, b'data: {"choices": [{"del'], False, "the stream was cut off"),
        (
            [CHUNK, b'data: {"error": {"message": "EngineDeadError: out\\nof memory"}}\n\n'],
            False,
            "the server reported in the stream: EngineDeadError: out of memory",
        ),
        ([b'data: {"error": "no"}\n\n'], False, "the server reported in the stream: no"),
        ([b"data: " + b"[" * 100_000 + b"\n"], False, "nested too deeply"),
        ([b'data: {"choices": [1], "usage": {"completion_tokens": 1e999}}\n'], False, "cut off"),
        ([b'data: {"choices": [1], "usage": {"completion_tokens": -1}}\n'], False, "counts -1"),
    ],
)
@pytest.mark.parametrize("from_request", [1, 7])
def test_an_answer_without_end_or_with_an_error(
    server: Server,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    parts: list[bytes],
    repeat: bool,
    said: str,
    from_request: int,
) -> None:
    """From request 1 on nothing is measured; from 7 on, what was measured before is kept."""
    monkeypatch.setattr(serve_client, "LARGEST_ANSWER", 2 << 20)
    server.parts, server.repeat, server.from_request = parts, repeat, from_request
    result = call("bench", server.url, *SMALL, "-o", "a.json")
    assert result.code == 8
    assert said in " ".join(result.err.split())
    if from_request == 1:
        assert not Path("a.json").exists()
        return
    assert "prefill of 44 tokens" in result.err
    assert "3 at once: every request failed, and no larger load is measured" in result.err
    assert "not measured: 3" in result.out
    kept = json.loads(Path("a.json").read_text("utf-8"))
    assert [row["concurrency"] for row in kept["rows"]] == [1]
    assert kept["unmeasured"] == ["3"]


def test_a_prefill_that_fails_leaves_the_rest(server: Server, call: Call) -> None:
    server.failing = {1}
    result = call("bench", server.url, *SMALL, "-o", "a.json")
    assert result.code == 8
    assert "prefill is not measured: a prompt of 40 words" in " ".join(result.err.split())
    kept = json.loads(Path("a.json").read_text("utf-8"))
    assert [row["concurrency"] for row in kept["rows"]] == [1, 3]
    assert kept["unmeasured"] == ["prefill"]


def test_a_stream_that_drips(server: Server, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_client, "WHOLE", 0.0)
    server.parts, server.repeat = [b": ping\n"], True
    result = call("bench", server.url, *SMALL)
    assert (result.code, "the stream did not end in 0 s" in result.err) == (8, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"x" * (9 << 20), "larger than 8 MiB"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"data": [' + b'{"id": "::error::x"},' * 3000 + b'{"id": "a"}]}', "and 1014 more"),
        (b'{"data": 5}', "lists no model"),
    ],
)
def test_an_answer_about_models_is_bounded(
    server: Server, call: Call, answer: bytes, said: str
) -> None:
    server.models_answer = answer
    result = call("bench", server.url, *SMALL)
    assert result.code in (2, 8)
    assert said in " ".join(result.err.split())
    assert len(result.err) < 5000
