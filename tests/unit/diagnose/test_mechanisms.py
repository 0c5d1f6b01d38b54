"""What made a program fail, by the form of its message."""

from __future__ import annotations

import io
import random
import re

import pytest

from builder.diagnose.entries import load_entries
from builder.diagnose.failures import (
    KINDS,
    LONGEST,
    Rule,
    classify,
    component,
    filled,
    rules,
)
from builder.diagnose.verdict import diagnose
from tests.unit.chance import QUICK

RULES = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.example[:40])


@RULES
def test_an_example_is_of_its_rule_and_of_no_earlier_one(rule: Rule) -> None:
    first = next(r for r in rules() if re.search(r.pattern, rule.example, re.MULTILINE))
    assert first == rule
    told = classify(rule.example)
    assert told is not None
    assert told.kind == rule.kind
    assert not re.search(r"\{[a-z0-9]+\}|\[\]", told.message + told.component)
    assert told.fix


@RULES
def test_an_example_in_a_log_is_a_failure_with_its_mechanism(rule: Rule) -> None:
    head = "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] "
    result = diagnose(io.BytesIO(f"{head}{rule.example}\n".encode()))
    assert result.failed
    assert rule.kind in [f.mechanism for f in result.findings if f.severity == "error"]


def test_kinds_are_named_and_no_entry_has_their_name() -> None:
    assert {rule.kind for rule in rules()} <= set(KINDS)
    assert not set(KINDS) & {entry.id for entry in load_entries()}


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        (
            (
                "ValueError: No valid attention backend found for cuda with Selector("
                "head_size=64, use_sink=True). Reasons: {FLASH_ATTN: [sink setting not supported], "
                "TRITON_ATTN: [kv_cache_dtype not supported]}."
            ),
            "unsupported",
            "TRITON_ATTN: [kv_cache_dtype not supported]",
        ),
        (
            (
                "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for "
                "clients. 1/2 clients joined."
            ),
            "network",
            "1 of 2 processes came to the rendezvous in 601 seconds",
        ),
        (
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has "
                "a total capacity of 121.69 GiB of which 1.20 GiB is free. Including"
            ),
            "memory",
            "2.50 GiB more were asked for, 1.20 GiB of 121.69 GiB were free",
        ),
        (
            (
                "ValueError: Weight output_partition_size = 192 is not divisible by weight "
                "quantization block_n = 128."
            ),
            "shape",
            "of 192",
        ),
        (
            "PermissionError: [Errno 13] Permission denied: '/root/.cache/x'",
            "missing",
            "/root/.cache/x",
        ),
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file",
            "missing",
            "libcudart.so.12",
        ),
        (
            "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.2, please",
            "versions",
            "CUDA 13.2",
        ),
        ("AssertionError: x\nassert param_data.shape == loaded_weight.shape", "weights", "shape"),
        (
            (
                "RuntimeError: Worker failed with error 'CUDA error: out of memory', please "
                "check the stack trace above"
            ),
            "memory",
            "memory ran out",
        ),
    ],
)
def test_values_are_read_out_of_the_message(message: str, kind: str, said: str) -> None:
    told = classify(message)
    assert told is not None
    assert told.kind == kind
    assert said in told.message


@pytest.mark.parametrize(
    ("text", "frame", "engine", "name"),
    [
        ("x", "vllm/v1/attention/backends/mla.py, line 3, in f", "vllm", "vLLM's attention"),
        ("x", "vllm/lora/layers.py, line 3", "vllm", "vLLM's LoRA"),
        ("x", "flashinfer/decode.py, line 3", "vllm", "FlashInfer"),
        ("flashinfer says no", "vllm/worker.py, line 3", "vllm", "FlashInfer"),
        ("x", "vllm/worker.py, line 3", "vllm", "vLLM"),
        ("x", "", "sglang", "SGLang"),
        ("x", "", "", ""),
    ],
)
def test_the_component_is_read_from_the_frame(
    text: str, frame: str, engine: str, name: str
) -> None:
    assert component(text, frame, engine) == name


def test_a_part_without_its_value_is_left_out() -> None:
    assert filled("a[: {x}][ of {y}] {z} [b] {{q}}", {"x": "1", "y": "", "z": "2"}) == (
        "a: 1 2 [b] {{q}}"
    )
    assert filled("a [{x}]", {"x": "[{y}]", "y": "no"}) == "a [{y}]"  # a value is no template


def test_sglang_gets_its_own_flags() -> None:
    line = "CUDA out of memory. Tried to allocate 2.00 GiB."
    vllm, sglang = classify(line, engine="vllm"), classify(line, engine="sglang")
    assert vllm is not None
    assert sglang is not None
    assert "--gpu-memory-utilization" in vllm.fix
    assert "--mem-fraction-static" in sglang.fix


def test_an_unknown_message_has_no_mechanism() -> None:
    assert classify("WombatError: hop") is None
    assert classify("x" * (3 * LONGEST)) is None


# ------------------------------------------------------------------------------------------- chance

WORDS = [
    "(EngineCore pid=9) ",
    "(APIServer pid=1) ",
    "ERROR 06-01 10:00:00 [a.py:1] ",
    "INFO ",
    "  ",
    "vllm-1  | ",
    "[pod/a/b] ",
    '  File "/x/vllm/a.py", line 3, in f',
    "\n",
    "\n",
    "\n",
    "\r",
    "\t",
    "Traceback (most recent call last):\n",
    "ValueError: ",
    "RuntimeError: CUDA error: ",
    "Error",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "exited with code 1\n",
    "vLLM API server version 0.31.0\n",
    "Application startup complete.\n",
    "{'EngineCore': -9}",
    "█  version 0.31.0\n",
    "Failed core proc(s): ",
    "Killed\n",
    '{"log": "',
    '"}\n',
    "\\n",
    "!!!!!!!",
    "2026-06-01T10:00:01Z ",
    "2026-06-01T10:00:00Z ",
    "Generated response x: output: '",
    "&lt;",
    "\x1b[31m",
    "The above exception was the direct cause of the following exception:\n",
    "\ufeff",
    "\x00",
    "ü",
    "<b>",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for X\n  Value error, ",
    "Xid (",
    "| ",
    "NVRM: ",
    "NV_ERR_NO_MEMORY",
    "ptxas fatal   : ",
    "not divisible by ",
    "(",
    "[",
    "{",
    "'",
    '"',
    ":",
    "999999999999999999999999999999",
]


def texts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(WORDS, k=chance.randint(1, 120))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4 if QUICK else 16))
def test_any_text_has_a_verdict(seed: int) -> None:
    """No text ends in a traceback, and what is told is in the text."""
    for text in texts(seed, 40):
        result = diagnose(io.BytesIO(text.encode()))
        assert result.verdict.sentence
        if result.verdict.state == "failed":
            assert any(f.severity == "error" for f in result.findings)
        for found in result.findings:
            assert 0 < found.line <= result.lines
            assert not re.search(r"\{[a-z0-9]+\}", found.fix)


@pytest.mark.parametrize("seed", range(2 if QUICK else 8))
def test_a_damaged_log_has_a_verdict(seed: int) -> None:
    chance = random.Random(1000 + seed)
    base = bytearray("".join(texts(seed, 3)).encode())
    for _ in range(30):
        data = bytearray(base)
        for _ in range(chance.randint(1, 12)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 9))
        assert diagnose(io.BytesIO(bytes(data))).verdict.sentence


LONG = [
    "x",
    "a.b",
    "(a",
    "'a' ",
    "Error: ",
    "A.B.",
    ": ",
    "{",
    "[",
    "not supported ",
    "is not a ",
    "1/2 ",
]


@pytest.mark.parametrize("unit", [*LONG, "1 ", "-", "/a", "=", "ibv_", "lib", "a.so", "\n", "MTP "])
def test_a_long_message_is_classified_at_once(unit: str) -> None:
    """A rule whose work grew with the square of the length would stop here for minutes."""
    told = classify(unit * LONGEST)
    assert told is None or told.kind in KINDS


@pytest.mark.parametrize("unit", LONG)
def test_the_work_for_one_long_line_is_bounded(unit: str) -> None:
    """A line of 100 kB inside a traceback is searched in its first part alone."""
    from builder.diagnose.failures import SEARCHED

    line = unit * (100_000 // len(unit))
    log = f'Traceback (most recent call last):\n  File "/x/vllm/a.py", line 3, in f\n{line}\n'
    result = diagnose(io.BytesIO(log.encode()))
    assert all(len(f.quote) <= SEARCHED for f in result.findings)
