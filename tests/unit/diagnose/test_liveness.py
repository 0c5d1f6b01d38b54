"""What shows that a server lives after a failure: an answered request, and no answered check."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from builder.diagnose.logs import ERRORS, REPEATS
from builder.diagnose.verdict import Diagnosis, diagnose, diagnoses, verdict

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.caller import Call

START = """\
(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.31.0
(EngineCore pid=9) INFO 06-01 10:00:01 [core.py:1] Initializing a V1 LLM engine (v0.31.0) with x
"""
UP = "(APIServer pid=1) INFO:     Application startup complete.\n"
ENGINE = "(EngineCore pid=9) ERROR 06-01 10:05:00 [core.py:9] "
OTHER = "ValueError: the wombat of model.layers.3 is loose"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def answer(request: str, status: str = "200 OK", head: str = "(APIServer pid=1) ") -> str:
    return f'{head}INFO:     10.0.0.1:51 - "{request} HTTP/1.1" {status}\n'


CHAT = answer("POST /v1/chat/completions")
CHECKS = [
    answer("GET /health"),
    answer("GET /v1/models"),
    answer("GET /metrics"),
    answer("GET /ping"),
    answer("GET /v1/models", head=""),
    answer("GET /health", head="") + answer("GET /v1/models", head=""),
    answer("POST /tokenize"),
    answer("POST /v1/messages/count_tokens"),
    "(APIServer pid=1) INFO:     Waiting for application startup.\n" + UP,
]


def statistics(tokens: float, running: int, prompt: float = 0.0, at: str = "10:06:00") -> str:
    return (
        f"(APIServer pid=1) INFO 06-01 {at} [loggers.py:2] Engine 000: Avg prompt throughput: "
        f"{prompt} tokens/s, Avg generation throughput: {tokens} tokens/s, Running: {running} "
        "reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
    )


def read(text: str) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()))


def traced(error: str) -> str:
    frame = '  File "/x/site-packages/vllm/v1/core.py", line 3, in step'
    return "".join(
        f"{ENGINE}{line}\n" for line in ("Traceback (most recent call last):", frame, error)
    )


# --------------------------------------------------------------------------------- after a failure


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("times", [1, 4, 40])
@pytest.mark.parametrize("error", [traced(OTHER), f"{ENGINE}{MEMORY}\n", f"{ENGINE}hop failed\n"])
def test_an_answered_check_shows_no_life(check: str, times: int, error: str) -> None:
    for before in ("", START, START + UP, START + UP + CHAT):
        result = read(before + error + check * times)
        assert result.failed, before
        assert any(f.severity == "error" for f in result.findings), before


@pytest.mark.parametrize(
    "life",
    [
        CHAT,
        answer("POST /v1/completions"),
        answer("POST /v1/responses"),
        answer("POST /v1/messages"),
        answer("POST /v1/embeddings"),
        answer("POST /generate"),
        answer("GET /health_generate"),
        statistics(9.5, 0),
        statistics(9.5, 3) + statistics(2.5, 2),
        statistics(9.5, 3) + statistics(9.5, 3),
        "Decode batch. #running-req: 1, gen throughput (token/s): 20.50, #queue-req: 0\n",
    ],
)
def test_an_answered_request_shows_life(life: str) -> None:
    assert read(START + UP + traced(OTHER) + life).verdict.state == "ready"
    assert read(START + UP + life + traced(OTHER)).verdict.state == "failed"


@pytest.mark.parametrize(
    "line",
    [
        statistics(0.0, 1),
        statistics(0.0, 0),
        statistics(9.5, 1),  # of the seconds before the failure
        answer("POST /v1/chat/completions", "500 Internal Server Error"),
        answer("POST /v1/chat/completions", "400 Bad Request"),
        "Decode batch. #running-req: 1, #token: 9, gen throughput (token/s): 0.00, #queue-req: 0\n",
    ],
)
def test_what_ends_no_request_shows_no_life(line: str) -> None:
    assert read(START + UP + CHAT + traced(OTHER) + line).verdict.state == "failed"


def test_another_start_shows_life_after_its_failure_alone() -> None:
    went_on = "(EngineCore pid=9) INFO 06-01 10:05:01 [core.py:9] taking another loader\n"
    assert read(START + traced(OTHER) + went_on + UP).verdict.state == "ready"
    assert read(START + traced(OTHER) + UP).verdict.state == "failed"
    assert read(START + UP + traced(OTHER) + went_on * 4 + UP).verdict.state == "failed"
    assert read(START + UP + traced(OTHER) + START + UP).verdict.state == "ready"


@pytest.mark.parametrize("copies", [2, 5])
def test_a_copy_of_a_log_is_no_life(copies: int) -> None:
    """The requests before the second failure are not after it."""
    for log in (CHAT + traced(OTHER), CHAT + f"{ENGINE}hop failed\n", UP + CHAT + traced(OTHER)):
        assert read(log * copies).failed


@pytest.mark.parametrize("count", [1, REPEATS + 1, 30, ERRORS + 9])
def test_the_last_of_many_statistics_counts(count: int) -> None:
    """Lines that differ only in digits are passed over, and the last one is read."""
    generating, idle = statistics(25.0, 2), statistics(0.0, 0)
    log = START + UP + generating * count + traced(OTHER)
    assert read(log + idle * count).verdict.state == "failed"
    assert read(log + CHAT * count).verdict.state == "ready"
    assert read(log + generating * (count + 1)).verdict.state == "ready"


def test_the_requests_of_one_server_are_no_life_of_another() -> None:
    dead = "".join(f"vllm-1  | {x}\n" for x in (START + UP + CHAT + traced(OTHER)).splitlines())
    other = "".join(f"vllm-2  | {x}\n" for x in (START + UP + CHAT * 30).splitlines())
    states = {r.file: r.verdict.state for r in diagnoses(io.BytesIO((dead + other).encode()))}
    assert states == {"vllm-1": "failed", "vllm-2": "ready"}


# ------------------------------------------------------------------------------ without a failure


def test_the_error_of_the_command_says_that_it_is_not_known(call: Call, tmp_path: Path) -> None:
    (tmp_path / "work" / "a.log").write_text(CHECKS[0] * 3)
    done = call("diagnose", "a.log")
    assert (done.code, "nothing shows that the server generates" in done.err) == (5, True)


def test_without_a_request_it_is_not_known_whether_a_server_generates() -> None:
    for check in CHECKS[:4]:
        result = read(check * 3)
        assert (result.verdict.state, result.failed) == ("unclear", True)
        assert "whether it generates is not known" in result.verdict.sentence
        result = read(START + UP + check)
        assert result.verdict.state == "ready"
        assert "whether it generates is not known" in result.verdict.sentence
    assert "not known" not in read(START + UP + CHECKS[0] + CHAT).verdict.sentence
    assert read(statistics(0.0, 0) * 2).verdict.state == "unclear"


REFUSED = answer("POST /v1/chat/completions", "400 Bad Request")
TEMPLATE = (
    "(APIServer pid=1) ERROR 06-01 10:06:00 [serving.py:3] ValueError: As of transformers v4.44, "
    "default chat template is no longer allowed\n"
)


@pytest.mark.parametrize("before", ["", START + UP])
@pytest.mark.parametrize("after", ["", answer("GET /health") * 3])
@pytest.mark.parametrize("error", ["", TEMPLATE])
def test_requests_that_are_all_refused_are_a_warning(before: str, after: str, error: str) -> None:
    result = read(before + (error + REFUSED) * 3 + after)
    (found,) = result.findings
    assert (found.severity, found.mechanism) == ("warning", "request")
    assert result.verdict.sentence.startswith("Every request was refused (3 requests, ")
    assert "The server failed" not in result.verdict.sentence
    assert read(before + error + REFUSED + CHAT).verdict.state == "ready"


def test_a_request_without_a_key_says_nothing_of_the_server() -> None:
    result = read(START + UP + answer("POST /v1/chat/completions", "401 Unauthorized"))
    assert (result.verdict.state, result.findings) == ("ready", ())


def test_requests_that_all_fail_in_the_server_are_a_failure() -> None:
    bad = answer("POST /v1/chat/completions", "500 Internal Server Error")
    result = read(START + UP + CHAT + bad * 3 + answer("GET /health"))
    assert [(f.severity, f.component) for f in result.findings] == [("error", "every request")]
    assert result.verdict.state == "failed"
    (found,) = read(START + UP + CHAT + bad).findings
    assert found.severity == "warning"
    assert read(START + UP + bad * 3 + CHAT).findings == ()


# -------------------------------------------------------------------------------------------- hangs

WAIT = (
    "(EngineCore pid=9) INFO 06-01 10:07:00 [shm_broadcast.py:7] No available shared memory "
    "broadcast block found in 60 seconds.\n"
)
WATCHDOG = (
    "[rank1]:[E601 10:11:12.7 ProcessGroupNCCL.cpp:6] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000)\n"
)
STUCK = statistics(0.0, 2)


@pytest.mark.parametrize("poll", ["", *CHECKS[:4], CHAT])
@pytest.mark.parametrize(
    ("line", "component"),
    [
        (WAIT, "a rank of the engine"),
        (STUCK, "the engine"),
        (WATCHDOG, "a collective operation (NCCL)"),
    ],
)
def test_a_hang_is_a_finding_whatever_is_answered(line: str, component: str, poll: str) -> None:
    """Not even a chat ends it: the line of a stream is written before its first token."""
    if line == WATCHDOG and poll == CHAT:
        return
    for times in (3, 12, 40):
        result = read(START + UP + CHAT + (line + poll) * times)
        (found,) = [f for f in result.findings if f.severity == "error"]
        assert (found.mechanism, found.component) == ("hang", component)
        assert result.verdict.state == "failed"
        assert not found.follows


def test_a_hang_that_ended_is_none() -> None:
    for hang in (WAIT * 5, STUCK * 5):
        assert read(START + UP + hang + statistics(20.0, 0)).verdict.state == "ready"
    assert read(START + WAIT * 12 + UP).verdict.state == "ready"  # a compilation
    assert read(START + WAIT * 12 + UP + WAIT * 3).verdict.state == "failed"


def test_a_wait_or_two_of_a_server_that_was_up_leave_it_open() -> None:
    result = read(START + UP + CHAT + WAIT + answer("GET /v1/models"))
    assert (result.verdict.state, result.findings) == ("unclear", ())
    assert "Whether it still generates is not known." in result.verdict.sentence
    assert read(START + UP + WAIT + statistics(20.0, 0)).verdict.state == "ready"
    assert read(START + UP + WAIT * 2 + CHAT).verdict.state == "ready"


def test_a_wait_that_follows_from_a_failure_is_no_finding_of_its_own() -> None:
    result = read(START + UP + f"{ENGINE}{MEMORY}\n" + WAIT * 5)
    assert [f.mechanism for f in result.findings] == ["memory"]
    result = read(START + UP + WAIT * 3 + WATCHDOG)
    assert [f.component for f in result.findings] == ["a collective operation (NCCL)"]


# -------------------------------------------------------------------------------- sources of a log


@pytest.mark.parametrize("prefix", ["vllm-b-1  | ", "[pod/b] ", "[pod/b/server] ", "b-1 | "])
@pytest.mark.parametrize(
    "error",
    [
        OTHER,
        f"RuntimeError: Assertion error (/x/layout.hpp:60): Unknown SF transformation\n{OTHER}",
        "KeyError: 'layers.0.ffn.experts.w13_scale'",
        "vllm: error: unrecognized arguments: --wombat",
        "Hunk #1 FAILED at 12.",
    ],
)
def test_a_source_with_an_error_is_a_server_however_short(prefix: str, error: str) -> None:
    good = prefix.replace("b", "a", 1) if "vllm" not in prefix else "vllm-a-1  | "
    lines = [f"{good}{line}\n" for line in (START + UP + CHAT * 20).splitlines()]
    lines[12:12] = [f"{prefix}{line}\n" for line in error.splitlines()]
    for poll in ("", f"{prefix}{answer('GET /v1/models', head='')}"):
        results = diagnoses(io.BytesIO(("".join(lines) + poll).encode()))
        assert sorted(r.verdict.state for r in results) == ["failed", "ready"]
        assert verdict(results).state == "failed"


def test_a_server_of_several_of_which_nothing_is_known_counts() -> None:
    lines = [f"a-1 | {line}\n" for line in (START + UP + CHAT).splitlines()]
    lines += [f"b-1 | {line}\n" for line in (TEMPLATE + REFUSED).splitlines()]
    assert verdict(diagnoses(io.BytesIO("".join(lines).encode()))).state == "unclear"


@pytest.mark.parametrize("name", ["webui-1", "open-webui-1", "app-db-1", "nginx", "redis-1"])
def test_the_error_of_another_service_is_none_of_a_server(name: str) -> None:
    lines = [f"vllm-1 | {line}\n" for line in (START + UP + CHAT).splitlines()]
    lines.append(f"{name} | ConnectionRefusedError: [Errno 111] Connection refused\n")
    (result,) = diagnoses(io.BytesIO("".join(lines).encode()))
    assert result.verdict.state == "ready"
