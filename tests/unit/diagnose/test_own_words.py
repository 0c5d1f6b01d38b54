"""Failures that say in their own words what is wrong, and texts that only talk of failures.

The messages are short forms of what servers print on GB10 and its relatives.
"""

from __future__ import annotations

import io

import pytest

from builder.diagnose.failures import classify
from builder.diagnose.verdict import Diagnosis, diagnose

HEAD = "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] "


def read(text: str) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("message", "kind", "component"),
    [
        ("ValueError: wombat attention requires page_size=64, got 1", "settings", "vLLM"),
        (
            "AssertionError: the cache expects wombat_backend to be one of ['a', 'b'], but got c",
            "settings",
            "vLLM",
        ),
        ("ImportError: wombat requires numpy==1.2, found 2.0", "versions", "Python packages"),
        ("ModuleNotFoundError: No module named 'wombat'", "missing", "a Python package (wombat)"),
        ("RuntimeError: CUDA driver error: device not ready", "gpu-fault", "a kernel on the GPU"),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `wombat`",
            "gpu-fault",
            "a CUDA library (CUBLAS)",
        ),
        (
            "NCCL WARN Call to ibv_create_qp failed with error Unknown error -12",
            "memory",
            "RDMA memory registration",
        ),
        (
            "docker: Error response from daemon: unknown or invalid runtime name: nvidia.",
            "missing",
            "the GPU in the container",
        ),
        (
            "wombat: /usr/bin/bash: /usr/bin/bash: cannot execute binary file",
            "settings",
            "the container's command",
        ),
        ("ValueError: fp8_e9 kv-cache is not supported with fp8", "unsupported", "KV cache"),
        (
            "ValueError: Hybrid KV cache manager is off but failed to convert the specs",
            "unsupported",
            "KV cache",
        ),
        (
            "RuntimeError: WOMBAT_MIN_THREAD_N (64) > out_features",
            "shape",
            "block quantisation and tensor parallelism",
        ),
        (
            "RuntimeError: Cannot copy wombats during CUDA graph capture unless they are pinned",
            "gpu-fault",
            "CUDA graph capture",
        ),
        (
            "ValueError: Wombat currently requires uniform inputs; got 3 rows",
            "unsupported",
            "vLLM",
        ),
        (
            "AssertionError: Key CacheEngineKey(x) not found in local data.",
            "defect",
            "LMCache",
        ),
    ],
)
def test_a_message_has_a_mechanism_and_a_place(message: str, kind: str, component: str) -> None:
    told = classify(message, engine="vllm")
    assert told is not None
    assert (told.kind, told.component) == (kind, component)


def test_of_a_system_error_without_a_name_the_line_of_code_tells() -> None:
    result = read(
        "(Worker pid=3) Traceback (most recent call last):\n"
        '(Worker pid=3)   File "/usr/lib/python3.12/multiprocessing/synchronize.py", line 1, in f\n'
        "(Worker pid=3)     self._semlock = _multiprocessing.SemLock._rebuild(*state)\n"
        "(Worker pid=3) FileNotFoundError: [Errno 2] No such file or directory\n"
    )
    assert result.findings[0].component == "processes of several machines"


def test_an_import_that_is_passed_over_acquits_no_later_exception() -> None:
    result = read(
        "[2026-10-25 08:11:09] Ignore import error when loading sglang.srt.wombat: no kernel\n"
        "Traceback (most recent call last):\n"
        '  File "/sglang/python/sglang/srt/managers/wombat.py", line 50, in get\n'
        "ValueError: No processor registered for architecture: ['WombatForCausalLM'].\n"
    )
    assert [f.mechanism for f in result.findings if f.severity == "error"] == ["unknown-name"]


def test_a_warning_of_python_is_no_part_of_the_message_before_it() -> None:
    result = read(
        "[2026-10-25 08:11:09] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/sglang/python/sglang/srt/wombat.py", line 50, in get\n'
        "wombat.exc.Unsupported: it was skipped\n"
        "/usr/lib/python3/deep_gemm/x.py:283: UserWarning: DeepGEMM is of another year\n"
    )
    assert not [f for f in result.findings if "DeepGEMM" in f"{f.component}{f.more}"]


@pytest.mark.parametrize(
    "text",
    [
        (
            "Things that broke\n\nFirst, the driver. CUDA out of memory with 40 GB free is not "
            "a bug of the engine; the page cache has it. Then NCCL failed for a week.\n"
        ),
        (
            "docs/faq.md:12:RuntimeError: Engine core initialization failed\n"
            "docs/faq.md:40:CUDA error: no kernel image is available\n"
            "src/wombat.py:3:raise ValueError('bad')\n"
        ),
        (
            '[{"role":"user","content":"I get RuntimeError: CUDA error: an illegal memory access '
            'was encountered"},{"role":"assistant","content":"Set CUDA_LAUNCH_BLOCKING=1"}]\n'
        ),
        (
            "\\section{Failures}\nThe engine stopped with \\texttt{torch.OutOfMemoryError} in 3 "
            "of 20 runs.\n"
        ),
        "NAME: wombat\nSTATUS: deployed\nNOTES:\nIf pods show OOMKilled raise the limit.\n",
    ],
    ids=["article", "search", "conversation", "document", "advice"],
)
def test_a_text_about_failures_has_none(text: str) -> None:
    result = read(text)
    assert not [f for f in result.findings if f.severity in ("error", "warning")]
    assert not result.failed


def test_a_short_log_with_sentences_of_pytorch_is_still_a_log() -> None:
    result = read(
        f"{HEAD}torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        f"{HEAD}CUDA kernel errors might be asynchronously reported at some other API call, so "
        "the stacktrace below might be incorrect.\n"
        f"{HEAD}For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    assert result.failed
