"""What killed a server that no entry of the catalogue explains: the root, its line, its frame."""

from __future__ import annotations

import io
import textwrap

import pytest

from builder.diagnose import failures
from builder.diagnose.logs import Reader
from builder.diagnose.matching import scan
from builder.diagnose.servers import ENDING, ends
from builder.diagnose.verdict import UNKNOWN, Diagnosis, diagnose


def read(text: str) -> Diagnosis:
    return diagnose(io.BytesIO(textwrap.dedent(text).lstrip("\n").encode()))


def root(text: str) -> str:
    """The line that is told as the cause."""
    result = read(text)
    assert result.verdict.state == "failed", result.verdict
    found = [f for f in result.findings if f.severity == "error"]
    assert found, result.findings
    return found[0].quote


CAUSE = "The above exception was the direct cause of the following exception"
WAITS = "(EngineCore pid=2) INFO 06-01 10:00:00 [s.py:1] No available shared memory broadcast block"
START = """\
(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.31.0
(EngineCore pid=9) INFO 06-01 10:00:01 [core.py:1] Initializing a V1 LLM engine (v0.31.0) with x
"""
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
SERVED = '(APIServer pid=1) INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'


def traced(error: str, *, who: str = "(EngineCore pid=9) ") -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/venv/lib/python3.12/site-packages/vllm/worker.py", line 31, in work',
        "    self.step(",
        "    ^^^^^^^^^^",
        '  File "/opt/venv/lib/python3.12/site-packages/torch/_ops.py", line 8, in __call__',
        "    return self._op(*args)",
        error,
    ]
    return "".join(f"{who}{line}\n" for line in lines)


def test_an_exception_is_quoted_with_its_line_frame_and_search_phrase() -> None:
    result = read(START + traced("ZonkError: the flux 0x7f12ab of /tmp/a is 12345 too high"))
    (found,) = result.findings
    assert (found.id, found.severity, found.line) == (UNKNOWN, "error", 9)
    assert found.quote == "ZonkError: the flux 0x7f12ab of /tmp/a is 12345 too high"
    assert found.frame == "vllm/worker.py, line 31, in work"
    assert found.process == "EngineCore 9"
    assert found.before.startswith("Initializing a V1 LLM engine")
    assert found.search == "vllm ZonkError the flux of is too high"
    assert "Not in the catalogue" in found.message


def test_the_root_of_a_chain_is_reported() -> None:
    chain = (
        traced("OSError: the shard is torn")
        + "(EngineCore pid=9) \n"
        + f"(EngineCore pid=9) {CAUSE}:\n"
        + "(EngineCore pid=9) \n"
        + traced("LoadError: cannot load")
        + traced("RuntimeError: Engine core initialization failed. See root cause above.", who="")
    )
    result = read(START + chain)
    (found,) = result.findings
    assert found.quote == "OSError: the shard is torn"
    assert found.became == ("LoadError: cannot load",)


def test_a_lookup_that_failed_first_is_not_the_root() -> None:
    log = (
        traced("KeyError: 'zonk'")
        + "(EngineCore pid=9) During handling of the above exception, another exception occurred:\n"
        + traced("ValueError: architecture zonk is not known")
    )
    assert root(log) == "ValueError: architecture zonk is not known"


def test_interleaved_lines_of_two_workers_are_separated() -> None:
    first = traced("AError: one", who="(Worker_TP0 pid=3) ").splitlines()
    second = traced("BError: two", who="(Worker_TP1 pid=4) ").splitlines()
    log = "\n".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert [f.quote for f in read(log).findings] == ["AError: one", "BError: two"]


def test_the_same_failure_of_every_rank_is_reported_once() -> None:
    log = "".join(traced("AError: rank is gone", who=f"(Worker_TP{n} pid=3) ") for n in range(4))
    assert len(read(log).findings) == 1


def test_an_exception_group_ends_at_the_inner_exception() -> None:
    log = """
      + Exception Group Traceback (most recent call last):
      |   File "/app/main.py", line 3, in main
      |     async with TaskGroup() as group:
      | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
      +-+---------------- 1 ----------------
        | Traceback (most recent call last):
        |   File "/app/vllm/x.py", line 4, in f
        |     raise PlugError("no mains")
        | PlugError: no mains
        +------------------------------------
    """
    assert root(log) == "| PlugError: no mains"


def test_ray_names_the_inner_exception() -> None:
    log = """
    ray.exceptions.RayTaskError(ValueError): ray::RayWorkerWrapper.execute() (pid=7, ip=10.0.0.2)
      File "/opt/vllm/worker.py", line 12, in execute
        raise ValueError("the bus is late")
    ValueError: the bus is late
    """
    quotes = [f.quote for f in read(log).findings]
    assert "ValueError: the bus is late" in quotes


@pytest.mark.parametrize(
    "line",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "Fatal Python error: Segmentation fault",
        "*** SIGSEGV received at time=1719 on cpu 3 ***",
        "Segmentation fault (core dumped)",
        "double free or corruption (!prev)",
        "NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.",
        "[12345.678901] NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python3, MMU Fault",
        "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB, anon-rss:2kB",
        "Jun  1 10:00:00 spark kernel: Memory cgroup out of memory: Killed process 7 (python3)",
        'kernel.cu(12): error: identifier "wombat" is undefined',
        "wombat.cpp:3:10: fatal error: wombat.h: No such file or directory",
        "ptxas fatal   : Unresolved extern function 'wombat'",
        "nvcc fatal   : Unsupported gpu architecture 'compute_999'",
        "python3: error while loading shared libraries: libwombat.so.3: cannot open shared object",
        "python3: symbol lookup error: a.so: undefined symbol: _ZN6wombat",
        "a.out: wombat.cc:12: int main(): Assertion `n > 0' failed.",
        "thread 'main' panicked at src/main.rs:10:5:",
        "panic: runtime error: index out of range [3] with length 2",
        'docker: Error response from daemon: could not select device driver "" with capabilities',
        "bash: line 1: vllm: command not found",
        "vllm: error: unrecognized arguments: --wombat",
        "exec /usr/bin/python3: exec format error",
        "Warning  BackOff  CrashLoopBackOff restarting failed container",
        "torch.AcceleratorError: CUDA error: the wombat is loose",
        "RuntimeError: CUDA driver error: wombat",
        "CUDA error: wombat at /build/x.cu:12",
        "cudaErrorWombat: something",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasWombat",
        "spark:77:99 [0] NCCL WARN Call to connect to 10.0.0.2 failed : No wombat",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        "vllm.service: Main process exited, code=killed, status=9/KILL",
        "container exited with code 137",
        "Killed",
        "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD",
        "ERROR 06-01 10:00:00 [x.py:1] the wombat ate the model",
    ],
)
def test_every_form_of_failure(line: str) -> None:
    assert line[-20:] in root(line + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "INFO 06-01 10:00:00 [x.py:1] no errors were found",
        "WARNING 06-01 10:00:00 [x.py:1] ImportError: wombat is missing, going on without",
        "[Autotuner]: Skipping tactic 3, due to failure: RuntimeError: CUDA error: out of memory",
        "Sep 14 23:16:52 spark kernel: NVRM: nvCheckOkFailedNoLog: Check failed: [NV_ERR_NO_MEM]",
        "[rank0]:[W807 21:51:35.7 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not",
        "INFO 06-01 10:00:00 [x.py:1] Received request cmpl-1: prompt: 'CUDA out of memory'",
        f"{WAITS} found in 60 seconds.",
    ],
)
def test_lines_that_only_look_like_a_failure(line: str) -> None:
    found = read(START + line + "\n" + READY).findings
    assert not [f for f in found if f.severity == "error"]
    assert read(line + "\n").verdict.state == "unclear"


def test_ignored_exceptions_are_not_a_failure() -> None:
    ignored = "Exception ignored in: <function Wombat.__del__ at 0x7f>\n" + traced(
        "XError: y", who=""
    )
    assert read(START + ignored + READY).verdict.state == "ready"
    assert read(START + ignored).verdict.state == "stopped"


def test_errors_that_the_server_survived_are_not_a_failure() -> None:
    request = traced("ValueError: the prompt is empty", who="(APIServer pid=1) ")
    assert read(START + READY + request + SERVED).verdict.state == "ready"
    # without an answer after it, nobody knows
    assert read(START + READY + request).verdict.state == "failed"


def test_a_failed_start_before_a_successful_one_is_ignored() -> None:
    assert read(START + traced("AError: b") + START + READY).verdict.state == "ready"
    assert read(START + READY + START + traced("AError: b")).verdict.state == "failed"


def test_a_crash_of_a_running_server_is_a_failure() -> None:
    dead = traced("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    log = START + READY + SERVED + traced("WombatError: gone") + dead
    assert root(log) == "WombatError: gone"


def test_a_secondary_failure_points_to_the_other_process() -> None:
    (found,) = read("RuntimeError: Engine core initialization failed. See above.").findings
    assert "not in this log" in found.message
    assert "other process, rank or node" in found.fix


@pytest.mark.parametrize(("times", "state"), [(1, "unclear"), (2, "unclear"), (3, "failed")])
def test_a_wait_is_a_hang_when_it_is_repeated(times: int, state: str) -> None:
    assert read(f"{WAITS} found in 60 seconds.\n" * times).verdict.state == state


def test_a_wait_that_ended_is_not_a_hang() -> None:
    assert read(f"{WAITS} found in 60 seconds.\n" * 5 + READY).verdict.state == "ready"


def test_a_compiler_error_is_the_root_of_the_exception_that_wraps_it() -> None:
    log = (
        "FAILED: [code=1] wombat.cuda.o\n"
        '/src/wombat.cuh(11): error: static assertion failed with "bad tile"\n'
        "ninja: build stopped: subcommand failed.\n"
        + traced("RuntimeError: Ninja build failed.", who="")
    )
    assert root(log).startswith("/src/wombat.cuh(11): error: static assertion")


def test_ready_stopped_unclear_and_empty() -> None:
    assert read(START + READY).verdict.state == "ready"
    assert "nothing wrong was found" in read(START + READY).verdict.sentence
    stopped = read(START)
    assert stopped.verdict.state == "stopped"
    assert stopped.failed
    assert "did not become ready" in stopped.verdict.sentence
    assert not read("a line of no server\n").failed
    piece = "INFO 06-01 10:00:00 [x.py:1] a line\n"
    assert "did not become ready" in read(piece).verdict.sentence
    assert "looks like a log of vLLM; it ends" in read("a line of no server\n").verdict.sentence
    assert read("").verdict.state == "empty"


def test_a_message_of_several_lines_keeps_them() -> None:
    log = traced("WombatError: \n[pouch] CRITICAL: no pouch", who="")
    assert root(log) == "WombatError: [pouch] CRITICAL: no pouch"


def test_a_partial_paste_without_indentation_still_has_its_frame() -> None:
    log = 'File "vllm/pouch.py", line 3, in hop\nhop(1)\nWombatError: no pouch\n'
    (found,) = read(log).findings
    assert (found.quote, found.frame) == ("WombatError: no pouch", "vllm/pouch.py, line 3, in hop")


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("[2026-06-07 12:16:01] server_args=ServerArgs(model_path='m')", "sglang"),
        ("[TensorRT-LLM] TensorRT LLM version: 1.2.0", "tensorrt-llm"),
        ("llama_model_load: error loading model: wombat", "llama.cpp"),
        ("== NVIDIA Inference Microservice LLM NIM ==", "nim"),
        ("(EngineCore pid=2) INFO 06-01 10:00:00 [core.py:1] x", "vllm"),
        ("hello", ""),
    ],
)
def test_which_engine_wrote_a_log(line: str, engine: str) -> None:
    assert read(line).engine == engine


@pytest.mark.parametrize("version", ["0.1.dev1+g6804e1b81", "0.0.0", "0.1.dev17000+gabc"])
def test_a_build_without_a_release_is_not_an_old_release(version: str) -> None:
    log = f"(EngineCore pid=2) Initializing a V1 LLM engine (v{version}) with config: x\n"
    result = read(log)
    assert (result.vllm, result.build) == ("", version)


def test_the_work_on_many_events_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(200))
    text = "".join(f"ERROR 06-01 10:00:00 [core.py:1] {word}\n" for word in words)
    events = scan(Reader(io.BytesIO(text.encode())), []).all()[0].last.failures
    calls: list[str] = []
    plain = failures._plain

    def counting(text: str) -> str:
        calls.append(text)
        return plain(text)

    monkeypatch.setattr(failures, "_plain", counting)
    assert len(events.failures()) == 200
    assert len(calls) <= 3 * 200


@pytest.mark.parametrize(
    ("text", "is_end"),
    [
        ("Shutting down", True),
        ("shutdown of rank 0", True),
        ("CLEANUP done", True),
        ("Clean up", True),
        ("\u212aill", True),
        ("\u017ftopped", True),
        ("clean tensors", False),
        ("shutter speed", False),
        ("prefill of 3 blocks", False),
    ],
)
def test_lines_of_a_server_that_was_stopped(text: str, is_end: bool) -> None:
    """The cheap test before the pattern decides nothing by itself."""
    assert ends(text) is is_end
    assert bool(ENDING.search(text)) is is_end
