"""What made a program fail, by the form of its message."""

from __future__ import annotations

import io
import itertools
import random
import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import pytest

from builder.diagnose import failures, servers
from builder.diagnose.entries import load_entries, whole_words
from builder.diagnose.failures import (
    KINDS,
    LONGEST,
    Rule,
    classify,
    component,
    filled,
    fix_for,
    in_flags_of,
    rules,
)
from builder.diagnose.verdict import diagnose
from tests.unit.chance import QUICK

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.example[:40])
#: A frame for each rule that asks for one.
FRAMES = {
    rule.frame: next(
        path
        for path in ("vllm/v1/core/wombat.py", "tilelang/wombat.py")
        if re.match(rule.frame, path)
    )
    for rule in rules()
    if rule.frame
}


@RULES
def test_an_example_is_of_its_rule_and_of_no_earlier_one(rule: Rule) -> None:
    frame = FRAMES.get(rule.frame, "")
    first = next(
        r
        for r in rules()
        if re.match(r.frame, frame) and re.search(r.pattern, rule.example, re.MULTILINE)
    )
    assert first == rule
    told = classify(rule.example, frame=frame)
    assert told is not None
    assert told.kind == rule.kind
    assert not re.search(r"\{[a-z0-9]+\}|\[\]", told.message + told.component)
    assert told.fix


@RULES
def test_an_example_in_a_log_is_a_failure_with_its_mechanism(rule: Rule) -> None:
    head = "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] "
    path = FRAMES.get(rule.frame, "")
    above = f'{head}Traceback (most recent call last):\n{head}  File "/x/site-packages/{path}"'
    above = f"{above}, line 1, in f\n{head}    f()\n" if path else ""
    result = diagnose(io.BytesIO(f"{above}{head}{rule.example}\n".encode()))
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


# --------------------------------------------------------------------------------------- boundaries


def glued(pattern: re.Pattern[str], text: str) -> str:
    """What a pattern finds in a text whose matching part has letters before it."""
    match = pattern.search(text)
    if match is None or not re.match(r"[a-z]", match[0]):
        return ""
    found = pattern.search("bui" + text[match.start() :])
    return found[0] if found is not None and found.start() < 4 and found.start() != 0 else ""


@RULES
def test_a_rule_matches_whole_words(rule: Rule) -> None:
    """``ld: `` is not in "build: failed to solve"."""
    assert glued(whole_words(rule.pattern, re.MULTILINE), rule.example) == ""


def test_an_entry_matches_whole_words() -> None:
    for entry in load_entries():
        for example in entry.examples:
            for pattern in entry.patterns:
                compiled = whole_words(pattern.regex.pattern)
                assert [glued(compiled, line) for line in example.log.splitlines() if line] == [
                    "" for line in example.log.splitlines() if line
                ], entry.id


#: Words of up to this many letters end longer ones.
SHORT = 4


def beginnings(tokens: list[Any]) -> Iterator[str]:
    """The fixed texts by which the alternatives of a pattern begin, without a boundary."""
    if not tokens or tokens[0][0] in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
        return
    kind, value = tokens[0]
    rest = tokens[1:]
    if kind is sre.LITERAL:
        text = "".join(
            chr(v) for _, v in itertools.takewhile(lambda t: t[0] is sre.LITERAL, tokens)
        )
        yield text
    elif kind is sre.BRANCH:
        for branch in value[1]:
            yield from beginnings([*branch, *rest])
    elif kind is sre.SUBPATTERN:
        yield from beginnings([*value[3], *rest])
    elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        if value[0] == 0:
            yield from beginnings(rest)
        yield from beginnings(list(value[2]))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *((form.kind, form.regex.pattern) for form in failures.FORMS),
        *(
            (name, getattr(failures, name).pattern)
            for name in ("FOLLOWERS", "WRAPPERS", "HARMLESS", "NOISE", "LETHAL", "SIGNALLED")
        ),
        *((name, getattr(servers, name).pattern) for name in ("UP", "REQUEST", "CHECKED")),
        *((program.name, program.lines.pattern) for program in servers.programs()),
    ],
)
def test_a_short_word_has_a_boundary(name: str, pattern: str) -> None:
    bare = [
        text
        for text in beginnings(list(sre_parser.parse(pattern)))
        if (word := re.match(r"[a-z]+(?=[^\w])", text)) and len(word[0]) <= SHORT
    ]
    assert bare == [], name


# ------------------------------------------------------------------------------ what the field sees


@pytest.mark.parametrize(
    ("message", "kind", "part"),
    [
        # patches and mods
        ("Hunk #1 FAILED at 12.", "patch", "patch or mod"),
        ("2 out of 3 hunks FAILED -- saving rejects to file a.py.rej", "patch", "patch or mod"),
        ("error: vllm/wombat.py: patch does not apply", "patch", "patch or mod"),
        ("Reversed (or previously applied) patch detected!  Assume -R?", "patch", "patch or mod"),
        ("Error: Patch script failed on node-2", "patch", "patch or mod"),
        # drivers
        (
            (
                "ERROR: This container was built for NVIDIA Driver Release 590.48 or later, but\n"
                "version 580.95 was detected and compatibility mode is UNAVAILABLE."
            ),
            "versions",
            "driver",
        ),
        ("CUDA Forward Compatibility is UNAVAILABLE on this system", "versions", "driver"),
        ("RuntimeError: requires driver version >= 590.48, found 580.95", "versions", "driver"),
        # memory that something else holds
        ("RuntimeError: The memory capacity is unbalanced.", "memory", "GPU's memory"),
        (
            (
                "AssertionError: Error in memory profiling. Initial free memory 90.1 GiB, current "
                "free memory 99.2 GiB."
            ),
            "memory",
            "GPU's memory",
        ),
        (
            "NCCL WARN Cuda failure 2 'out of memory'",
            "memory",
            "GPU's memory",
        ),
        ("RuntimeError: NCCL error: unhandled cuda error (run with x)", "gpu-fault", "NCCL"),
        # devices
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/dev/infiniband/rdma_cm'",
            "missing",
            "a device",
        ),
        ("RuntimeError: cannot open /dev/nvidia0", "missing", "a device"),
        ("OSError: no InfiniBand devices found", "missing", "a device"),
        # layers and weights
        ("AttributeError: 'Linear' object has no attribute 'weight_scale'", "weights", "quantis"),
        (
            "AttributeError: 'ParallelLMHead' object has no attribute 'wombat'",
            "unsupported",
            "lm_head",
        ),
        (
            (
                "ValueError: WombatModel has no parameter 'mtp.w2_weight_scale_inv' for checkpoint "
                "weight 'mtp.w2'"
            ),
            "weights",
            "weight loader",
        ),
        # collectives, capture, symmetric memory
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)",
            "hang",
            "NCCL",
        ),
        ("RuntimeError: Failed to send fd: No such file or directory", "unsupported", "symmetric"),
        (
            "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
            "gpu-fault",
            "graph capture",
        ),
        ("RuntimeError: cudaErrorNotPermitted", "gpu-fault", "graph capture"),
        # kernels
        (
            "RuntimeError: persistent_topk would oversubscribe, the fallback needs >=128KB smem",
            "unsupported",
            "top-k",
        ),
        ("RuntimeError: pe_dim must be 64 for fp8_ds_mla", "unsupported", "KV cache"),
        (
            "RuntimeError: FlashAttention 4 failed to compile flash_fwd_sm100",
            "compiler",
            "FlashAttention 4",
        ),
        ("ImportError: cannot import name 'a' from 'flash_attn.cute'", "versions", "Attention 4"),
        (
            "ValueError: FA4 requires compute capability 10.x, got 12.1",
            "unsupported",
            "Attention 4",
        ),
        # other things of the machine
        ("NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out", "network", "RDMA"),
        ("nvidia-container-cli: device error: /dev/nvidia0: unknown device", "missing", "a device"),
        ("AssertionError: Could not find anchor in a.py", "patch", "patch or mod"),
        ("RuntimeError: Worker did not respond to collective_rpc", "timeout", "engine's processes"),
        ("RuntimeError: memory is held by container wombat", "memory", "GPU's memory"),
        # an image that does not build
        ("ERROR: failed to build: failed to solve: wombat", "compiler", "build of the image"),
        ("/usr/bin/ld: cannot find -lwombat", "compiler", "linker"),
        ("aarch64-linux-gnu-ld: skipping incompatible libwombat.so", "compiler", "linker"),
    ],
)
def test_the_mechanism_and_the_part(message: str, kind: str, part: str) -> None:
    told = classify(message)
    assert told is not None
    assert told.kind == kind
    assert part in told.component
    head = "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] "
    log = "".join(f"{head}{line}\n" for line in message.splitlines())
    found = [f for f in diagnose(io.BytesIO(log.encode())).findings if f.severity == "error"]
    assert kind in [f.mechanism for f in found]


@pytest.mark.parametrize(
    ("quoted", "part"),
    [
        ("module 'cutlass.cute.arch' has no attribute 'fmin'", "the CuTe DSL"),
        ("'_OpNamespace' '_moe_C' object has no attribute 'moe_align'", "a compiled extension"),
        ("trtllm_batch_decode() got an unexpected keyword argument 'x'", "FlashInfer"),
    ],
)
def test_the_part_is_that_of_the_quoted_error_not_of_its_messenger(quoted: str, part: str) -> None:
    text = f"RuntimeError: Worker failed with error '{quoted}', please check the stack trace above"
    told = classify(text, frame="vllm/v1/executor/multiproc_executor.py, line 3, in f")
    assert told is not None
    assert told.component == part


def test_a_copy_of_tensorrt_llm_in_flashinfer_is_flashinfer() -> None:
    line = (
        "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: no wombat "
        "(/x/flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/wombat.cu:3)\n"
    )
    result = diagnose(io.BytesIO(f"(EngineCore pid=9) {line}".encode()))
    assert result.engine == "vllm"
    assert component("trtllm_batch_decode failed", "vllm/v1/attention/backends/x.py", "vllm") == (
        "FlashInfer"
    )
    assert component("trtllm-gen failed", "", "tensorrt-llm") == "TensorRT-LLM"
    own = "[06/01/2026-10:00:00] [TRT-LLM] [RANK 0] [E] no wombat\n"
    assert diagnose(io.BytesIO(own.encode())).engine == "tensorrt-llm"


@pytest.mark.parametrize("line", ["vllm: error: unrecognized arguments: --a", "usage: vllm [-h]"])
def test_the_command_line_of_vllm_is_vllms(line: str) -> None:
    assert diagnose(io.BytesIO(f"{line}\n".encode())).engine == "vllm"


OWN_FLAGS = {
    "sglang": re.compile(
        r"--(?:mem-fraction-static|context-length|max-running-requests|chunked-prefill-size|tp-size"
        r"|pp-size|disable-cuda-graph|moe-runner-backend|speculative-algorithm|dist-init-addr"
        r"|json-model-override-args|page-size|attention-backend|kv-cache-dtype|quantization|dtype"
        r"|revision|trust-remote-code|chat-template|reasoning-parser|tool-call-parser|port|nnodes"
        r"|node-rank|disable-custom-all-reduce|cpu-offload-gb|cuda-graph-max-bs|fp4-gemm-backend"
        r"|fp8-gemm-backend|watchdog-timeout|enable-symm-mem|max-lora-rank|model-path)\b"
    ),
    "tensorrt-llm": re.compile(
        r"--(?:kv_cache_free_gpu_memory_fraction|max_seq_len|max_batch_size|max_num_tokens|tp_size"
        r"|pp_size|extra_llm_api_options|trust_remote_code|reasoning_parser|tool_parser|chat_template|port)\b"
    ),
}
#: Flags of docker, git and other tools, which advice for any engine may name.
OF_TOOLS = re.compile(
    r"--(?:gpus|ipc|network|shm-size|ulimit|device|privileged|entrypoint|user|pids-limit|rm|runtime"
    r"|compile|platform|layers|sort|force-download|force|address|add-host|progress|no-cache|mods|version)\b"
)


@pytest.mark.parametrize("engine", sorted(OWN_FLAGS))
def test_a_fix_names_no_flag_of_another_engine(engine: str) -> None:
    fixes = [(rule.example, fix_for(rule, engine)) for rule in rules()]
    fixes += [
        (entry.id, in_flags_of(engine, fix.text))
        for entry in load_entries()
        if entry.engine in ("any", engine)
        for fix in entry.fixes
    ]
    for about, fix in fixes:
        assert fix
        named = re.findall(r"(?<![\w-])--[a-z][\w-]*", fix)
        foreign = [n for n in named if not OWN_FLAGS[engine].match(n) and not OF_TOOLS.match(n)]
        assert not foreign, about
        assert "VLLM_" not in fix, about


def test_advice_for_sglang_and_for_an_unknown_engine() -> None:
    log = (
        "[2026-06-01 10:00:00] server_args=ServerArgs(model_path='m')\n"
        "[2026-06-01 10:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/python/sglang/srt/managers/scheduler.py", line 3, in f\n'
        "TypeError: 'NoneType' object is not a wombat\n"
    )
    (found,) = diagnose(io.BytesIO(log.encode())).findings
    assert "--disable-cuda-graph" in found.fix
    assert "--enforce-eager" not in found.fix
    assert in_flags_of("", "a --enforce-eager") == in_flags_of("vllm", "a --enforce-eager")
    assert "--fp4-gemm-backend" not in in_flags_of("vllm", "--a 1; with SGLang --fp4-gemm-backend")


FORK = (
    "INFO 06-01 10:00:00 [x.py:1] Registered model loader "
    "`<class 'b12x.integration.vllm.loader.L'>` with load format `b12x`\n"
)


@pytest.mark.parametrize(
    ("before", "is_fork"),
    [
        (FORK, True),
        (
            "(APIServer pid=1) INFO 06-01 10:00:00 [a.py:1] vLLM API server version 0.31.1.dev7\n",
            True,
        ),
        (
            "(APIServer pid=1) INFO 06-01 10:00:00 [a.py:1] vLLM API server version 0.31.0+g1\n",
            True,
        ),
        ("(APIServer pid=1) INFO 06-01 10:00:00 [a.py:1] vLLM API server version 0.31.0\n", False),
        ("", False),
    ],
)
def test_a_flag_of_a_fork_is_no_misspelling(before: str, is_fork: bool) -> None:
    line = "vllm: error: unrecognized arguments: --wombat-kernel b12x\n"
    (found,) = diagnose(io.BytesIO(f"{before}{line}".encode())).findings
    assert found.mechanism == "unknown-name"
    assert ("fork" in found.fix) == is_fork
    assert ("misspelling" in found.fix) != is_fork


# ------------------------------------------------------------------------------------ words, texts

WORDY = [
    "NotImplementedError: FlashInfer has no fallback for head_dim 320",
    "RuntimeError: CUDA error: out of memory (after retrying allocation)",
    "ValueError: on_error='raise' but a shard is missing",
    "AssertionError: expected 0 errors, got 3 errors",
    "KeyError: 'layers.0.self_attn.fallback_proj.weight'",
    "RuntimeError: the wombat falls back, will retry in 3 s",
    "RuntimeError: Skipped expert 3 because no kernel serves it",
]


@pytest.mark.parametrize("message", WORDY)
@pytest.mark.parametrize("head", ["(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] ", ""])
def test_no_word_acquits_an_exception(message: str, head: str) -> None:
    start = (
        "(APIServer pid=1) INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.31.0\n"
        "(APIServer pid=1) INFO:     Application startup complete.\n"
    )
    frame = f'{head}Traceback (most recent call last):\n{head}  File "/x/vllm/a.py", line 3, in f\n'
    quiet = "(EngineCore pid=9) WARNING 06-01 10:00:00 [core.py:1] falling back, retrying\n"
    for log in (
        f"{head}{message}\n",
        f"{frame}{head}{message}\n",
        f"{quiet}{frame}{head}{message}\n",
    ):
        result = diagnose(io.BytesIO(f"{start}{log}".encode()))
        assert result.verdict.state == "failed"
        assert message in [f.quote for f in result.findings]


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_such_words_weigh_a_line_of_a_log(level: str) -> None:
    line = f"(EngineCore pid=9) {level} 06-01 10:00:00 [a.py:1] hop failed, falling back to hip\n"
    assert diagnose(io.BytesIO(line.encode())).findings == ()
    loud = line.replace(level, "ERROR", 1)
    assert diagnose(io.BytesIO(loud.encode())).verdict.state == "failed"


NO_LOGS = {
    "a chat": 'Me: it froze\n\nAssistant: When people see "torch.OutOfMemoryError: CUDA out of\n'
    'memory. Tried to allocate 2.00 GiB", they lower it.\n\nMe: and "no kernel image is available '
    'for execution on the device"?\n\nAssistant: another image.\n\nMe: thanks!\n',
    "a chat as JSON": '{"role": "user", "content": "CUDA out of memory. Tried to allocate 2 GiB"}\n'
    '{"role": "assistant", "content": "No CUDA GPUs are available means no --gpus"}\n' * 3,
    "a table": "| message | what to do |\n|---|---|\n| `no kernel image is available` | CUDA 13 |\n"
    "| `No CUDA GPUs are available` | --gpus all |\n| `CUDA out of memory` | less |\n",
    "a mail": "On Mon, Jun 1, 2026 at 10:00 A Person wrote:\n> it says No CUDA GPUs are available\n"
    "Hi,\nthat was the driver. Also CUDA error: invalid argument once.\nThanks\n",
    "a diff": "diff --git a/x.py b/x.py\n@@ -1,2 +1,2 @@\n-    fail('CUDA error: out of memory')\n"
    "+    fail('no kernel image is available')\n context\n",
    "a kernel build": "  CC      kernel/wombat.o\n  LD [M]  drivers/wombat.ko\n  CC      b.o\n"
    "ld: wombat.o: in function `hop': undefined reference to `hip'\nmake: *** [all] Error 1\n",
    "cargo": "   Compiling wombat v0.1.0\ntest a::b ... FAILED\ntest result: FAILED. 1 passed\n"
    "thread 'a::b' panicked at src/a.rs:3: CUDA error: out of memory\nerror: test failed\n",
    "buildx": '#5 [2/4] RUN npm ci\n#5 3.1 npm warn deprecated\n#5 ERROR: process "/bin/sh -c npm" '
    "did not complete successfully: exit code: 1\nERROR: failed to build: failed to solve: x\n",
    "go test": "=== RUN   TestHop\n--- FAIL: TestHop (0.00s)\n    hop_test.go:3: CUDA error\nFAIL\n"
    "FAIL\texample.com/hop\t0.003s\nexit status 1\n",
}


@pytest.mark.parametrize("name", NO_LOGS)
def test_a_text_that_is_no_log_has_no_finding(name: str) -> None:
    result = diagnose(io.BytesIO(NO_LOGS[name].encode()))
    assert (result.is_log, result.findings) == (False, ())


def test_a_log_in_a_conversation_is_read() -> None:
    log = (
        "Me: what is this?\n(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] RuntimeError: No "
        "CUDA GPUs are available\nAssistant: the container has no GPU.\n"
    )
    assert diagnose(io.BytesIO(log.encode())).verdict.state == "failed"


TALKS = {
    "two people": "alice: does anyone know why it says CUDA out of memory?\nbob: lower the share\n"
    "alice: and No CUDA GPUs are available?\nbob: give it the GPU\nalice: thx\n",
    "a forum": "I bought a second one last week and I cannot get it to work.\nWhen I start it, it "
    'prints "CUDA out of memory" and dies.\nDoes anybody know what I should set?\n',
    "an answer": 'The error "CUDA error: an illegal memory access was encountered" means that a '
    "kernel wrote outside of its buffers.\n\nTo find it:\n1. Set CUDA_LAUNCH_BLOCKING=1\n"
    "2. Run it again\n\nIf the message is `CUBLAS_STATUS_ALLOC_FAILED`, the memory ran out.\n",
    "Git": "$ git pull\nerror: Your local changes to the following files would be overwritten:\n"
    "\tvllm/config.py\nAborting\n",
    "an answer of an API": '{\n  "error": {\n    "message": "CUDA out of memory",\n    "code": 1\n'
    "  }\n}\n",
    "a recipe": "name: wombat\ncommand: |\n  vllm serve wombat\n# CUDA error: out of memory\n"
    "env:\n  NCCL_DEBUG: WARN\n",
}


TALKS |= {
    "a check of types": 'a/b.py:3: error: No overload for "CUDA error" matches\nFound 1 error\n',
    "a table": "time,level,message\n10:00,error,CUDA out of memory\n10:01,info,ok\n",
    "settings": '[messages]\noom = "CUDA out of memory"\nxid = "NVRM: Xid (1): 119"\n',
    "a script": "if ! gpu; then\n  echo 'No CUDA GPUs are available'\n  exit 1\nfi\n",
    "curl": "curl: (7) Failed to connect to 127.0.0.1 port 8000: Connection refused\n",
    "two labels": 'Ich: er friert ein\nKI: "CUDA out of memory" heißt, nichts ist frei.\n'
    'Ich: und "No CUDA GPUs are available"?\nKI: Dann fehlt --gpus all.\n',
}


@pytest.mark.parametrize("name", TALKS)
def test_what_people_write_is_no_log(name: str) -> None:
    result = diagnose(io.BytesIO(TALKS[name].encode()))
    assert (result.is_log, result.findings) == (False, ())


@pytest.mark.parametrize(
    "line",
    [
        "CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
        "Failed to pull image wombat: Error response from daemon: pull access denied for wombat",
        'exec: "vllm serve wombat": stat vllm serve wombat: no such file or directory',
        "NVRM: RmInitAdapter failed! (0x62:0x1a:2631)",
    ],
)
def test_a_pasted_line_is_read(line: str) -> None:
    for log in (f"{line}\n", f"{line}\n" * 6):
        assert diagnose(io.BytesIO(log.encode())).verdict.state == "failed"


def test_the_part_of_a_compilers_error_is_what_was_compiled() -> None:
    head = "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] "
    for path in ("vllm/vllm_flash_attn/cute/interface.py", "flash_attn/cute/flash_fwd.py"):
        log = (
            f"{head}Traceback (most recent call last):\n"
            f'{head}  File "/x/site-packages/{path}", line 3, in f\n'
            f"{head}cutlass.base_dsl.common.DSLRuntimeError: no wombat\n"
        )
        (found,) = diagnose(io.BytesIO(log.encode())).findings
        assert (found.mechanism, found.component) == ("compiler", "FlashAttention 4")
