"""Attempts of a server, several servers in one log, and texts of other programs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from builder.diagnose.logs import Reader
from builder.diagnose.matching import scan
from builder.diagnose.verdict import diagnose, diagnoses

if TYPE_CHECKING:
    from pathlib import Path

    from builder.diagnose.verdict import Diagnosis
    from tests.unit.caller import Call

START = """\
(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.31.0
(EngineCore pid=9) INFO 06-01 10:00:01 [core.py:1] Initializing a V1 LLM engine (v0.31.0) with x
"""
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
FOLLOWS = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}\n"
)


def crash(error: str) -> str:
    head = "(EngineCore pid=9) ERROR 06-01 10:00:02 [core.py:9] "
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/lib/python3.12/site-packages/vllm/v1/core.py", line 3, in step',
        "    hop(1)",
        error,
    ]
    return "".join(f"{head}{line}\n" for line in lines) + FOLLOWS


def read(text: str, vllm: str | None = None) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()), vllm)


def each(text: str) -> list[Diagnosis]:
    return diagnoses(io.BytesIO(text.encode()))


def errors(result: Diagnosis) -> list[str]:
    return [f.quote for f in result.findings if f.severity == "error"]


# ----------------------------------------------------------------------------------------- attempts

KNOWN = "RuntimeError: CUDA error: an illegal memory access was encountered"
OTHER = "ValueError: the wombat of model.layers.3 is loose"


@pytest.mark.parametrize("error", [KNOWN, OTHER])
@pytest.mark.parametrize("ready", ["", READY])
def test_the_ninth_attempt_is_read_as_the_first(error: str, ready: str) -> None:
    result = read((START + ready + crash(error)) * 9)
    assert result.verdict.state == "failed"
    assert result.verdict.sentence.startswith("Attempt 9 of 9; 8 before it failed too. ")
    assert errors(result) == [error]
    lines = (START + ready + crash(error)).count("\n")
    assert result.findings[0].line > 8 * lines
    assert (result.attempts, result.failed_attempts) == (9, 8)


def test_the_last_attempt_counts_not_the_first() -> None:
    result = read((START + crash(OTHER)) * 3 + START + crash(KNOWN))
    assert errors(result) == [KNOWN]


def test_an_attempt_that_just_began_shows_the_failure_before_it() -> None:
    result = read((START + crash(OTHER)) * 9 + START)
    assert result.verdict.state == "failed"
    assert "Attempt 10 of 10 was not ready when the log ends" in result.verdict.sentence
    assert errors(result) == [OTHER]


def test_a_server_that_runs_after_failures_says_so() -> None:
    result = read((START + crash(OTHER)) * 9 + START + READY)
    assert result.verdict.state == "ready"
    assert "in attempt 10; 9 before it failed: 1 warning" in result.verdict.sentence
    (found,) = result.findings
    assert (found.id, found.severity, found.quote) == ("restarted", "warning", OTHER)


def test_what_was_set_before_the_first_start_holds_for_every_attempt() -> None:
    log = "export VLLM_MXFP4_BACKEND=1\n" + (START + crash(OTHER)) * 4
    (scanned,) = scan(Reader(io.BytesIO(log.encode())), []).all()
    assert list(scanned.preamble) == [("VLLM_MXFP4_BACKEND", "1")]


def test_a_container_that_compose_restarts_begins_anew() -> None:
    log = "vllm-1  | vllm: error: unrecognized arguments: --wombat\nvllm-1 exited with code 2\n"
    result = read(log * 9)
    assert result.attempts == 9
    assert errors(result) == ["vllm: error: unrecognized arguments: --wombat"]


def test_data_parallel_engines_are_one_attempt() -> None:
    engine = (
        "(EngineCore_DP{} pid=9) INFO 06-01 10:00:01 [core.py:1] Initializing a V1 LLM engine\n"
    )
    result = read(START + "".join(engine.format(rank) for rank in range(4)) + READY)
    assert (result.attempts, result.verdict.state) == (1, "ready")


def test_the_memory_of_many_attempts_is_that_of_two() -> None:
    one = scan(Reader(io.BytesIO(((START + crash(OTHER)) * 2).encode())), [])
    many = scan(Reader(io.BytesIO(((START + crash(OTHER)) * 400).encode())), [])
    assert many.all()[0].attempts == 400
    for kept, wanted in zip(many.all(), one.all(), strict=True):
        assert len(kept.last.failures.events) == len(wanted.last.failures.events)
        assert len(kept.last.failures.exceptions) == len(wanted.last.failures.exceptions)


def test_failures_beyond_the_number_that_is_kept_are_not_missed() -> None:
    """A busy server's errors of requests must not crowd out its crash."""
    noise = "".join(f"ValueError: request {'ab' * n} is odd\n" for n in range(1, 400))
    result = read(START + READY + noise + crash(KNOWN))
    assert KNOWN in errors(result)


SERVED = '(APIServer pid=1) INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
MODELS = '(APIServer pid=1) INFO:     10.0.0.1:5 - "GET /v1/models HTTP/1.1" 200 OK\n'
DEAD = (
    f"(EngineCore pid=9) {OTHER}\n"
    "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered it.\n"
)


def composed(text: str) -> str:
    return "".join(f"vllm-1  | {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "end",
    [
        "vllm-1 exited with code 137\n",
        "vllm-1 exited with code 1\n",
        composed(crash(KNOWN) + SERVED * 4),
        composed(DEAD + MODELS * 4),
    ],
)
def test_a_dead_server_is_never_well(end: str) -> None:
    """Not even if its API process still answers, or only compose says that it ended."""
    result = read(composed(START + READY) + end)
    assert result.verdict.state == "failed"
    again = read(composed(START + READY) + end + composed(START + READY))
    assert again.verdict.state == "ready"


def test_a_page_about_failures_is_no_failure() -> None:
    page = (
        "# Help\n\nIf vLLM says `CUDA out of memory`, lower it.\nWhen No CUDA GPUs are available\n"
    )
    assert read(page).findings == ()


# ------------------------------------------------------------------------------------------ servers


def prefixed(prefix: str, text: str) -> list[str]:
    return [f"{prefix}{line}\n" for line in text.splitlines()]


def interleaved(first: list[str], second: list[str]) -> str:
    rest = first[len(second) :] + second[len(first) :]
    return "".join(a + b for a, b in zip(first, second, strict=False)) + "".join(rest)


PREFIXES = [
    ("vllm-a-1  | ", "vllm-b-1  | "),
    ("[pod/a/server] ", "[pod/b/server] "),
    ("(ServeReplica pid=7, ip=10.0.0.1) ", "(ServeReplica pid=8, ip=10.0.0.2) "),
]


@pytest.mark.parametrize("pair", PREFIXES)
def test_each_prefix_is_a_server(pair: tuple[str, str]) -> None:
    good = prefixed(pair[0], START + READY)
    bad = prefixed(pair[1], START + crash(OTHER))
    log = interleaved(good, bad) + "".join(prefixed(pair[0], READY))
    states = sorted(r.verdict.state for r in each(log))
    assert states == ["failed", "ready"]
    assert read(log).verdict.state == "failed"
    both = interleaved(good, prefixed(pair[1], START + READY))
    assert [r.verdict.state for r in each(both)] == ["ready", "ready"]


def test_two_servers_of_a_log_and_the_exit_code(call: Call, tmp_path: Path) -> None:
    good, bad = prefixed("a-1  | ", START + READY), prefixed("b-1  | ", START + crash(OTHER))
    path = tmp_path / "work" / "both.log"
    path.write_text(interleaved(good, bad))
    done = call("diagnose", "both.log")
    assert done.code == 5
    assert "1 of 2 logs show a failure" in " ".join(done.out.split())
    path.write_text(interleaved(good, prefixed("b-1  | ", START)))
    done = call("diagnose", "both.log")
    assert (done.code, "did not become ready" in done.err) == (5, True)


@pytest.mark.parametrize("end", ["app-1 exited with code 139", "app-1 exited with code 137"])
def test_the_line_about_the_end_begins_no_attempt(end: str) -> None:
    log = (
        "INFO 11-20 10:00:00 [api_server.py:1896] vLLM API server version 0.24.0\n"
        "INFO:     Application startup complete.\n"
        f"INFO 11-20 10:01:00 [launcher.py:99] Shutting down FastAPI HTTP server.\n{end}\n"
    )
    result = read(log)
    assert result.attempts == 1
    assert result.verdict.state == "failed"
    assert not result.verdict.sentence.startswith("Attempt")


def test_other_services_of_compose_are_no_servers() -> None:
    log = interleaved(
        prefixed("vllm-1   | ", START + READY),
        prefixed("webui-1  | ", "Traceback (most recent call last):\nKeyError: 'theme'\n"),
    )
    assert [r.verdict.state for r in each(log)] == ["ready"]


def test_nodes_of_ray_are_parts_of_one_server() -> None:
    worker = "(RayWorkerWrapper pid=7, ip=10.0.0.2) "
    chosen = "INFO 06-01 10:00:02 [x.py:1] Using MarlinNvFp4LinearKernel for NVFP4 GEMM\n"
    (result,) = each(START + "".join(prefixed(worker, chosen)) + READY)
    assert [s.kernel for s in result.dispatch] == ["MarlinNvFp4LinearKernel"]
    (result,) = each(START + "".join(prefixed(worker, crash(OTHER))))
    assert errors(result) == [OTHER]


def test_rows_of_a_table_are_no_server() -> None:
    table = "flashinfer-python | 0.6.1\ntorch | 2.11\n"
    assert len(each(START + table + crash(OTHER))) == 1


# ------------------------------------------------------------------------- failures told first-hand


def test_a_check_in_a_kernel_is_first_hand() -> None:
    result = read(START + crash("torch.AcceleratorError: CUDA error: device-side assert triggered"))
    (found,) = [f for f in result.findings if f.severity == "error"]
    assert (found.mechanism, found.follows) == ("gpu-fault", False)
    assert "CUDA_LAUNCH_BLOCKING" in found.fix


@pytest.mark.parametrize(
    ("code", "kind"), [("-9", "killed"), ("-15", "killed"), ("-11", "gpu-fault")]
)
def test_the_signal_of_a_process_is_told(code: str, kind: str) -> None:
    line = (
        "RuntimeError: Engine core initialization failed. Failed core proc(s): "
        f"{{'EngineCore': {code}}}\n"
    )
    (found,) = read(START + line).findings
    assert (found.mechanism, found.follows) == (kind, False)
    assert code != "-9" or ("signal 9" in found.message and "memory" in found.message)


def test_an_exception_before_the_signal_is_the_root() -> None:
    log = START + crash(OTHER).replace("{}", "{'EngineCore': -6}")
    assert errors(read(log))[0] == OTHER


HANDLER = "(APIServer pid=1) ERROR 06-01 10:00:05 [serving_chat.py:9] "
REQUEST = (
    f"{HANDLER}Traceback (most recent call last):\n"
    f'{HANDLER}  File "/x/vllm/entrypoints/openai/serving_chat.py", line 3, in f\n'
    f"{HANDLER}    render()\n"
    f"{HANDLER}{{error}}\n"
)
REQUEST_ERRORS = [
    "jinja2.exceptions.TemplateError: Conversation roles must alternate",
    "ValueError: This model's maximum context length is 4096 tokens. However, you requested 9000",
    "ValueError: LoRA rank 64 is greater than max_lora_rank 16.",
]


@pytest.mark.parametrize("error", REQUEST_ERRORS)
def test_an_error_of_a_request_is_not_one_of_the_server(error: str) -> None:
    result = read(START + READY + REQUEST.format(error=error))
    (found,) = result.findings
    assert (result.verdict.state, found.severity, found.mechanism) == (
        "ready",
        "warning",
        "request",
    )
    assert found.message.startswith("A request failed. ")
    alone = read(REQUEST.format(error=error))
    assert "A request failed, line 4" in alone.verdict.sentence
    assert alone.failed
    # at the start, the same error is the server's
    assert read(START + REQUEST.format(error=error)).verdict.state == "failed"


def test_the_text_of_a_pydantic_error_is_quoted() -> None:
    log = """\
Traceback (most recent call last):
  File "/x/vllm/config/model.py", line 3, in f
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, the wombat is too wide [type=value_error, input_value=ArgsKwargs((), {'model': 'm'})]
    For further information visit https://errors.example.invalid/value_error
"""
    assert errors(read(log)) == ["Value error, the wombat is too wide"]


def test_a_server_that_did_not_become_ready_fails(call: Call, tmp_path: Path) -> None:
    (tmp_path / "work" / "a.log").write_text(
        "(EngineCore pid=9) INFO 06-01 10:00:00 [core.py:1] loading weights\n"
    )
    done = call("diagnose", "a.log")
    assert (done.code, "did not become ready" in done.err) == (5, True)


# -------------------------------------------------------------------------------------------- forms

PLAIN = (
    'Traceback (most recent call last):\n  File "/x/vllm/a.py", line 3, in f\n    hop(1)\n' + OTHER
)


@pytest.mark.parametrize(
    "prefix",
    [
        "ERROR 06-01 10:00:00 engine.py:389] ",
        "7pz3x9n1i4e6ud[error]",
        "2026-06-01 10:00:00.123 | ERROR    | engine:start:12 - ",
        "engine.py           :116  2026-06-01 10:00:00,123 ",
        "(vllm-task, pid=123) ",
        "(VllmWorker TP0 pid=437) ERROR 06-01 10:00:00 [multiproc_executor.py:559] ",
        "[default0]:",
        "[ERROR] ",
        "1780000000123 ",
        "2026/06/01 10:00:00 ",
    ],
)
def test_prefixes_of_platforms_and_old_releases(prefix: str) -> None:
    log = "".join(f"{prefix}{line}\n" for line in PLAIN.splitlines())
    (found,) = read(log).findings
    assert (found.quote, found.frame) == (OTHER, "vllm/a.py, line 3, in f")


def test_a_log_with_the_newest_line_first_is_turned() -> None:
    lines = (START + READY + crash(OTHER)).splitlines()
    stamped = [f"2026-06-01T10:00:{n:02d}.000Z {line}" for n, line in enumerate(lines)]
    result = read("\n".join(reversed(stamped)) + "\n")
    assert result.verdict.state == "failed"
    (found,) = [f for f in result.findings if f.severity == "error"]
    assert (found.quote, found.frame) == (OTHER, "vllm/v1/core.py, line 3, in step")
    shown = "\n".join(reversed(stamped)).splitlines()[found.line - 1]
    assert OTHER in shown
    assert read("\n".join(stamped) + "\n").findings[0].quote == OTHER


# ----------------------------------------------------------------------------------- other programs

OTHERS = {
    "pytest": "===== test session starts =====\ncollected 3 items\n"
    "E   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    "FAILED tests/test_a.py::test_b - torch.OutOfMemoryError: CUDA out of memory\n",
    "a training": "***** Running training *****\n  Num examples = 9\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
    "a build": "gcc -c -o wombat.o wombat.c\nwombat.c: In function 'main':\n"
    "wombat.c:3:5: error: 'x' undeclared\nmake: *** [Makefile:10: wombat.o] Error 1\n",
    "llama.cpp": "llama_model_loader: loaded\nllama_model_load: error loading model: no wombat\n",
    "a Java program": 'Exception in thread "main" java.lang.NullPointerException: no wombat\n'
    "\tat org.example.Wombat.run(Wombat.java:12)\n",
    "a Node program": "TypeError: no wombat\n    at hop (/app/wombat.js:3:9)\n",
    "a Go program": "panic: no wombat\n\ngoroutine 1 [running]:\n\t/app/wombat.go:3 +0x1d\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_log_of_another_program_gets_no_advice(name: str, call: Call, tmp_path: Path) -> None:
    result = read(OTHERS[name])
    assert (result.is_log, result.findings) == (False, ())
    assert f"This is the log of {name}, " in result.verdict.sentence
    (tmp_path / "work" / "a.log").write_text(OTHERS[name])
    assert call("diagnose", "a.log").code == 2


UNIT = """\
Nov 23 10:00:01 host systemd[1]: Starting nginx.service - A high performance web server...
Nov 23 10:00:01 host nginx[812]: nginx: [emerg] bind() to 0.0.0.0:80 failed (98: in use)
Nov 23 10:00:01 host systemd[1]: nginx.service: Control process exited, status=1/FAILURE
Nov 23 10:00:01 host systemd[1]: nginx.service: Failed with result 'exit-code'.
Nov 23 10:00:01 host systemd[1]: Failed to start nginx.service - A high performance web server.
"""
SERVICES = (
    *(UNIT[at:] for at, mark in enumerate("\n" + UNIT) if mark == "\n" and UNIT[at:]),
    *(f"{line}\n" for line in UNIT.splitlines()[1:]),
    "Nov 23 10:00:01 host kernel: Out of memory: Killed process 812 (mysqld) total-vm:9kB\n",
    "mysql.service: Main process exited, code=killed, status=9/KILL\n",
    "redis[1]: 1:M 01 Jan 10:00:00.000 # Can't open the append-only file: Permission denied\n",
    "Failed to start postgresql@16-main.service - PostgreSQL Cluster 16-main.\n",
)


@pytest.mark.parametrize(
    "after", ["", '"POST /v1/completions HTTP/1.1" 500 Internal Server Error\n']
)
def test_a_failed_health_check_at_the_end_is_no_healthy_server(
    after: str, call: Call, tmp_path: Path
) -> None:
    check = 'INFO:     10.0.0.1:33 - "GET /health HTTP/1.1" '
    bad = f"{START}{READY}{check}503 Service Unavailable\n{after}"
    assert read(bad).verdict.state == "stopped"
    assert read(f"{bad}{check}200 OK\n").verdict.state == "ready"
    (tmp_path / "work" / "a.log").write_text(bad)
    called = call("diagnose", "a.log")
    assert called.code == 5
    assert "did not become ready" not in called.err


@pytest.mark.parametrize("log", SERVICES)
def test_few_lines_of_a_system_service_are_no_server(log: str) -> None:
    result = read(log)
    assert (result.is_log, result.findings) == (False, ())


@pytest.mark.parametrize(
    "line",
    [
        "vllm.service: Main process exited, code=killed, status=9/KILL",
        "qwen.service: Failed with result 'oom-kill'.",
        "Out of memory: Killed process 812 (VLLM::EngineCor) total-vm:9kB",
        "Out of memory: Killed process 812 (python3) total-vm:9kB",
    ],
)
def test_a_line_about_the_unit_of_a_server_is_read(line: str) -> None:
    journal = "Nov 23 10:00:00 host sshd[9]: Accepted publickey for spark\n"
    failed = UNIT.splitlines()[3]
    assert errors(read(f"{journal}Nov 23 10:00:01 host systemd[1]: {line}\n{failed}\n"))


def test_the_tests_of_an_engine_are_no_server() -> None:
    log = OTHERS["pytest"] + "vllm/v1/engine/core.py:12: RuntimeError\n"
    assert not read(log).is_log


def test_a_kernel_that_an_engine_compiles_is_no_foreign_build() -> None:
    log = (
        "ninja: Entering directory `/root/.cache/flashinfer'\n"
        "[1/2] /usr/local/cuda/bin/nvcc -c wombat.cu -o wombat.cuda.o\n"
        'wombat.cu(12): error: identifier "wombat" is undefined\n'
    )
    assert read(log).findings[0].mechanism == "compiler"


def test_a_traceback_of_an_unrelated_program_is_no_server() -> None:
    log = (
        "2026-06-01 10:00:00 starting the shop\n"
        "Traceback (most recent call last):\n"
        '  File "/srv/shop/till.py", line 3, in pay\n'
        "    coins(1)\n"
        "KeyError: 'penny'\n"
    )
    assert not read(log).is_log
    assert read(log.replace("/srv/shop", "/x/vllm")).is_log


# ------------------------------------------------------------------------------------------- memory


def test_memory_registration_is_judged_by_its_errno() -> None:
    line = "spark:1:2 [0] NCCL WARN Call to {} failed with error {}\n"
    for call in ("ibv_reg_mr_iova2", "ibv_create_cq"):
        (found,) = read(line.format(call, "Cannot allocate memory")).findings
        assert "kho=off" in found.fix
        assert "6.17.0-1032" in found.fix
        (found,) = read(line.format(call, "Invalid argument")).findings
        assert "memlock" not in found.fix
        assert "That is not the memory lock limit" in found.message


DRIVER = (
    "Sep 14 23:16:52 spark kernel: NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory "
    "[NV_ERR_NO_MEMORY] (0x51) returned from wombat\n"
)


def test_a_kernels_journal_is_read() -> None:
    assert (read(DRIVER).verdict.state, read(DRIVER).findings[0].severity) == ("unclear", "warning")
    (found,) = read(DRIVER * 40).findings
    assert (found.severity, found.mechanism) == ("error", "memory")
    assert "40 lines" in found.message
    # at a healthy start it means nothing
    assert read(START + DRIVER * 2 + READY).findings == ()


# --------------------------------------------------------------------------------------------- b12x

CUTLASS = (
    "(EngineCore pid=9) INFO 06-01 10:00:02 [x.py:1] "
    "Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM\n"
)


@pytest.mark.parametrize(
    ("vllm", "fix"),
    [
        ("0.33.0", "--linear-backend flashinfer_b12x"),
        ("0.24.0", "spark-build image -l b12x-full"),
        ("0.22.1", "VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x"),
    ],
)
def test_a_default_log_says_that_b12x_is_not_in_use(vllm: str, fix: str) -> None:
    result = read(START.replace("0.31.0", vllm) + CUTLASS + READY)
    (found,) = result.findings
    assert (found.id, found.severity) == ("b12x-not-requested", "info")
    assert fix in found.fix
    assert result.verdict.sentence.endswith("nothing wrong was found; b12x is not in use.")
    assert read(START + CUTLASS + crash(OTHER)).findings[0].quote == OTHER


@pytest.mark.parametrize(
    "text",
    [
        "INFO 07-02 10:00:00 [logger.py:66] Generated response chatcmpl-1: output: '" + "!" * 80,
        "INFO 07-02 10:00:00 [logger.py:66] Generated response cmpl-1: output: '!!!!!!', x: None",
        "!!!!!",
    ],
)
def test_exclamation_marks_are_recognised(text: str) -> None:
    assert [f.id for f in read(text + "\n").findings] == ["exclamation-output"]


def test_a_prompt_is_still_no_part_of_the_log() -> None:
    log = (
        "INFO 07-02 10:00:00 [logger.py:66] Generated response chatcmpl-1: output: '!!!!!!!! I saw "
        "CUDA out of memory'\n"
    )
    assert read(START + READY + log).findings == ()
