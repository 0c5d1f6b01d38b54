"""Failures around an engine: installers, the kernel's log, ssh, hooks of containers; and the part
that failed, where the frame or the message says more than the form.
"""

from __future__ import annotations

import io

import pytest

from builder.diagnose.failures import classify
from builder.diagnose.verdict import Finding, diagnose, diagnoses

HEAD = "(EngineCore pid=7) ERROR 10-02 08:00:00 [core.py:1400] "


def errors(*lines: str) -> list[Finding]:
    result = diagnose(io.BytesIO("\n".join(lines).encode()))
    return [one for one in result.findings if one.severity == "error"]


def traceback(error: str, path: str, function: str = "f") -> list[str]:
    return [
        f"{HEAD}Traceback (most recent call last):",
        f'{HEAD}  File "/usr/lib/python3/dist-packages/{path}", line 12, in {function}',
        f"{HEAD}    wombat()",
        f"{HEAD}{error}",
    ]


@pytest.mark.parametrize(
    ("line", "kind", "part"),
    [
        (
            "0.7   x No solution found when resolving dependencies:",
            "versions", "packages that are installed together",
        ),
        (
            "#12 0.241 error: Requirements contain conflicting URLs for package `flashinfer-xy`:",
            "versions", "packages that are installed together",
        ),
        (
            "ERROR: No matching distribution found for wombat==9.9",
            "versions", "packages that are installed together",
        ),
        ("ERROR: ResolutionImpossible: for help visit", "versions",
         "packages that are installed together"),
        (
            "Oct 02 08:00:00 kernel: NVRM: Xid (PCI:0000:02:00): 62, 1234 5678",
            "gpu-fault", "the GPU's driver",
        ),
        ("VLLM::Worker_TP invoked oom-killer: gfp_mask=0x1(GFP_USER)", "killed",
         "the Linux kernel"),
        (
            "[ 9.123456] pcieport 0001:00:00.0: AER: Uncorrectable (Fatal) error received",
            "network", "a PCIe device",
        ),
        ("kernel: mlx5_core 0001:01:00.0: mlx5_pci_err_detected Device state = 1", "network",
         "a PCIe device"),
        ("kernel: watchdog: BUG: soft lockup - CPU#4 stuck for 22s!", "hang", "the Linux kernel"),
        ("  push <- spark-2 FAILED rc=255: ssh: connect to host spark-2 port 22: No route to host",
         "network", "ssh between the machines"),
        (
            ("docker: Error response from daemon: failed to create task: error running prestart "
            "hook #1: exit status 1, stderr: Using requested mode 'cdi'"),
            "settings", "the container runtime",
        ),
        ("/bin/sh: line 3: wombatctl: command not found", "missing", "a program (wombatctl)"),
        ("Failed: Cuda error /src/csrc/custom_all_reduce.cuh:99 'invalid argument'",
         "unsupported", "custom all-reduce"),
        (f"{HEAD}ImportError: libwombat_cuda.so.3: cannot open shared object file: No such file",
         "missing", "a shared library (libwombat_cuda.so.3)"),
    ],
)  # fmt: skip
def test_a_failure_around_the_engine(line: str, kind: str, part: str) -> None:
    found = errors(line)
    assert [(one.mechanism, one.component) for one in found[:1]] == [(kind, part)]


@pytest.mark.parametrize(
    "line",
    [
        "0.7   x No solution found when resolving dependencies:",
        "VLLM::Worker_TP invoked oom-killer: gfp_mask=0x1(GFP_USER)",
        "pcieport 0001:00:00.0: AER: Uncorrectable (Fatal) error received",
    ],
)
@pytest.mark.parametrize("prefix", ["vllm-b-1  | ", "[pod/b-1/c] "])
def test_it_is_seen_beside_a_healthy_server(line: str, prefix: str) -> None:
    healthy = prefix.replace("b", "a", 1) if "pod" not in prefix else "[pod/a-0/c] "
    lines = [
        f"{healthy}(APIServer pid=1) INFO 10-02 08:00:00 [api_server.py:9] vLLM API server",
        f"{healthy}INFO:     Application startup complete.",
        f"{prefix}{line}",
    ]
    results = diagnoses(io.BytesIO("\n".join(lines).encode()))
    assert any(one.failed for one in results)


@pytest.mark.parametrize(
    "line",
    [
        "kernel: pcieport 0001:00:00.0: AER: Correctable error received",
        "kernel: PCIe Bus Error: severity=Correctable, type=Physical Layer",
        "kernel: mlx5_core 0001:01:00.0: Detected insufficient power on the PCIe slot (27W).",
        "kernel: mlx5_core 0001:01:00.0: firmware version: 28.45.4028",
    ],
)
def test_a_kernel_that_helped_itself_is_no_failure(line: str) -> None:
    assert errors(line, "kernel: NVRM: loading NVIDIA UNIX Open Kernel Module") == []


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        ("RuntimeError: UVA is not available", "unsupported", "pinned memory"),
        (("RuntimeError: No compiled cutlass_wombat_mm for CUDA device capability: 121. Required "
         "capability: 90"), "unsupported", "CUTLASS"),
        ("RuntimeError: Invalid thread config: thread_k = -1, num_threads = -1 for MKN = [1, 2]",
         "unsupported", "Marlin"),
        ("ValueError: WOMBAT_MLA_SPARSE requires a model with an indexer", "unsupported",
         "attention backends"),
        ("RuntimeError: The wombat op requires DeepGEMM to be installed.", "missing",
         "a Python package (DeepGEMM)"),
        ("HarmonyError: error downloading or loading vocab file: failed to download", "network",
         "the Harmony vocabulary (tiktoken)"),
        ("RuntimeError: failed to download wombat.bin", "network", "a download"),
    ],
)  # fmt: skip
def test_a_message_of_this_form(error: str, kind: str, part: str) -> None:
    told = classify(error)
    assert told is not None
    assert (told.kind, told.component) == (kind, part)


@pytest.mark.parametrize(
    ("error", "path", "kind", "part"),
    [
        # a name of a layer, where no weight is loaded
        ("KeyError: 'model.layers.7.wombat_attn'", "vllm/v1/core/kv_cache_utils.py", "defect",
         "the KV cache's layers"),
        ("KeyError: 'model.layers.7.wombat_attn'", "vllm/v1/worker/gpu/attn_utils.py", "defect",
         "the KV cache's layers"),
        ("KeyError: 'model.layers.7.wombat'", "vllm/model_executor/models/utils.py", "weights",
         "the weight loader"),
        # a library of kernels checks shapes, not settings
        ("AssertionError: block must be greater than 4, got 2", "tilelang/x/gemm.py",
         "unsupported", "TileLang"),
        ("AssertionError: block must be 64", "flashinfer/decode.py", "unsupported",
         "FlashInfer"),
        ("AssertionError: block must be 64", "vllm/config/model.py", "settings",
         "the configuration"),
        ("RuntimeError: This wombat is only supported on SM90a.",
         "vllm/third_party/flashmla/flash_mla_interface.py", "unsupported", "FlashMLA"),
        # errors of the GPU come later than their cause
        ("RuntimeError: CUDA error: invalid argument", "vllm/model_executor/models/wombat.py",
         "gpu-fault", "a kernel on the GPU"),
    ],
)  # fmt: skip
def test_the_frame_says_what_the_message_does_not(
    error: str, path: str, kind: str, part: str
) -> None:
    (found,) = errors(*traceback(error, path))
    assert (found.mechanism, found.component) == (kind, part)


def test_the_cause_is_before_the_builds_own_line() -> None:
    (first, *_) = errors(
        "#12 0.241 error: Requirements contain conflicting URLs for package `flashinfer-xy`:",
        "------",
        'ERROR: failed to build: failed to solve: process "/bin/sh -c uv pip install x" did not '
        "complete successfully: exit code: 2",
    )
    assert first.mechanism == "versions"


def test_a_process_that_was_killed_is_no_follower() -> None:
    (found,) = errors(
        f"{HEAD}Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down",
        f"{HEAD}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    )
    assert found.mechanism == "killed"


def test_an_exception_of_cpp_with_pytorchs_sentences_is_no_talk() -> None:
    (found, *_) = errors(
        "terminate called after throwing an instance of 'c10::AcceleratorError'",
        "  what():  CUDA error: an illegal instruction was encountered",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    )
    assert found.mechanism == "gpu-fault"


def test_a_part_of_a_record_is_of_its_server() -> None:
    ready = "INFO:     Application startup complete."
    tag = "[pod/b-1/c] (EngineCore pid=7) (RayWorkerWrapper pid=8) ERROR 10-02 08:00:00 [r.py:8] "
    long = ", ".join(f"wombat_{n} = [{n}]" for n in range(12))
    lines = [
        "[pod/a-0/c] (APIServer pid=1) INFO 10-02 08:00:00 [api_server.py:9] vLLM API server",
        f"[pod/a-0/c] {ready}",
        f"{tag}RuntimeError: Invalid thread config: thread_k = -1, {long}",
    ]
    results = diagnoses(io.BytesIO("\n".join(lines).encode()))
    assert {one.file: one.failed for one in results} == {"pod/a-0/c": False, "pod/b-1/c": True}


@pytest.mark.parametrize(
    "text",
    [
        'Hej Ole,\n\nden anden Spark skriver igen "Permission denied (publickey)". Kan du se?\n',
        "wombat==1.2\nvllm==0.33.0\ntorch==2.13.0\ntriton==3.6.0\nnumpy==2.3.5\n",
        (
            "https://example.org/vllm/1  [Bug]: vllm dies\nhttps://example.org/vllm/2  [Bug]: OOM\n"
            "https://example.org/vllm/3  Error with vllm\n"
        ),
        (
            "# vllm on two machines\n\n## Troubleshooting\n\n**`RuntimeError: wombat`**: set "
            "`VLLM_WOMBAT=1`.\n\nLook for the `shm_broadcast` lines.\n\n```sh\ncompose up\n```\n"
        ),
    ],
)
def test_a_text_about_servers_is_no_log(text: str) -> None:
    result = diagnose(io.BytesIO(text.encode()))
    assert result.findings == ()
    assert not result.is_log
