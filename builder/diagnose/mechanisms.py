"""What made a program fail, by the form of its message: the mechanism, the component, a fix.

The rules are data (``builder/data/mechanisms.toml``); the first one whose pattern is in the message
decides.  The catalogue knows more of some failures; a mechanism is known of most.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from builder.common.document import Part, Text, always, read
from builder.common.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Kinds of mechanism, and what the report calls them.
KINDS: Mapping[str, str] = {
    "memory": "out of memory",
    "unsupported": "not supported here",
    "unknown-name": "an unknown name or value",
    "settings": "settings that contradict one another, or the model",
    "shape": "shapes that do not fit",
    "weights": "the checkpoint and the model code disagree",
    "damaged": "a damaged file",
    "missing": "something is missing",
    "versions": "versions that do not belong together",
    "network": "a connection or rendezvous failed",
    "timeout": "a process that did not answer",
    "killed": "ended from outside",
    "request": "a request that failed",
    "compiler": "a compiler failed",
    "gpu-fault": "a fault on the GPU or in native code",
    "defect": "an error in a program's code",
}
#: Maximum length of a message that is classified.
LONGEST = 4000
#: Parts of the engines, and packages, by the beginning of a frame's path.
_PARTS = (
    ("vllm/model_executor/model_loader", "vLLM's weight loader"),
    ("vllm/model_executor/layers/quantization", "vLLM's quantisation"),
    ("vllm/model_executor/layers/fused_moe", "vLLM's expert layers"),
    ("vllm/model_executor/kernels", "vLLM's kernels"),
    ("vllm/model_executor/models", "vLLM's model code"),
    ("vllm/v1/attention", "vLLM's attention"),
    ("vllm/attention", "vLLM's attention"),
    ("vllm/v1/spec_decode", "vLLM's speculative decoding"),
    ("vllm/distributed/kv_transfer", "vLLM's KV transfer"),
    ("vllm/distributed", "vLLM's communication between ranks"),
    ("vllm/lora", "vLLM's LoRA"),
    ("vllm/compilation", "vLLM's compilation"),
    ("vllm/config", "vLLM's configuration"),
    ("vllm/engine/arg_utils", "vLLM's configuration"),
    ("vllm/transformers_utils", "the model's config and tokenizer"),
    ("vllm/tokenizers", "the tokenizer"),
    ("vllm/entrypoints", "vLLM's API server"),
    ("vllm/multimodal", "vLLM's multimodal input"),
    ("vllm/platforms", "vLLM's platform check"),
    ("vllm/v1/core", "vLLM's KV cache and scheduler"),
    ("vllm/v1/executor", "vLLM's executor"),
    ("vllm/", "vLLM"),
    ("sglang/srt/layers/quantization", "SGLang's quantisation"),
    ("sglang/srt/layers/attention", "SGLang's attention"),
    ("sglang/srt/layers/moe", "SGLang's expert layers"),
    ("sglang/srt/models", "SGLang's model code"),
    ("sglang/srt/model_loader", "SGLang's weight loader"),
    ("sglang/srt/mem_cache", "SGLang's KV cache"),
    ("sglang/srt/server_args", "SGLang's configuration"),
    ("sglang/", "SGLang"),
    ("flashinfer/", "FlashInfer"),
    ("deep_gemm/", "DeepGEMM"),
    ("triton/", "Triton"),
    ("nvidia_cutlass_dsl", "the CuTe DSL"),
    ("cutlass/", "the CuTe DSL"),
    ("transformers/", "Transformers"),
    ("tokenizers/", "the tokenizer"),
    ("huggingface_hub/", "the Hugging Face Hub"),
    ("safetensors/", "a weight file"),
    ("compressed_tensors/", "compressed-tensors"),
    ("tensorrt_llm/", "TensorRT-LLM"),
    ("torch/_inductor", "torch.compile"),
    ("torch/_dynamo", "torch.compile"),
    ("torch/distributed", "PyTorch's communication between ranks"),
    ("torch/", "PyTorch"),
    ("ray/", "Ray"),
    ("xgrammar/", "structured output"),
    ("mistral_common/", "the tokenizer"),
    ("lmcache/", "LMCache"),
)
#: The same, by a name in the message.
_NAMED = (
    (re.compile(r"[Ff]lash[Ii]nfer"), "FlashInfer"),
    (re.compile(r"[Dd]eep_?[Gg][Ee][Mm][Mm]"), "DeepGEMM"),
    (re.compile(r"[Tt]rtllm|TRTLLM|[Tt]llm[Gg]en"), "TensorRT-LLM's kernels"),
    (re.compile(r"[Mm]arlin"), "Marlin"),
    (re.compile(r"\b[Cc]utlass|CUTLASS"), "CUTLASS"),
    (re.compile(r"\b[Tt]riton\b"), "Triton"),
    (re.compile(r"[Ff]lash_?[Aa]ttn|FlashAttention|FlashMLA|flash_mla"), "FlashAttention"),
    (re.compile(r"sgl_kernel|sgl-kernel"), "sgl-kernel"),
    (re.compile(r"\b(?:LMCache|lmcache)\b"), "LMCache"),
    (re.compile(r"[Tt]okenizer"), "the tokenizer"),
    (re.compile(r"auto_functionalized|[Ii]nductor|[Dd]ynamo|torch\.compile"), "torch.compile"),
    (re.compile(r"\b[Nn]ccl\b|NCCL"), "NCCL"),
    (re.compile(r"[Tt]ransformers"), "Transformers"),
)
#: What a process says of the error of another.
_QUOTED = re.compile(r"Worker failed with error (['\"])(.+)\1, please check")
_SEGMENT = re.compile(r"\[([^\[\]]*\{[a-z0-9]+\}[^\[\]]*)\]|\{([a-z0-9]+)\}")
#: Maximum length of a value that a message shows.
_VALUE = 400


class Rule(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One form of message, and what it means."""

    kind: Text
    pattern: Text
    message: Text
    fix: Text
    example: Annotated[Text, Meta(description="a message of this form")]
    component: str = always("")
    sglang: Annotated[str, Meta(description="the fix for SGLang")] = always("")


class Mechanism(NamedTuple):
    """What made a program fail."""

    kind: str
    component: str
    message: str
    fix: str


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in their order."""
    table = tomllib.loads(package_file("data", "mechanisms.toml").read_text("utf-8"))
    return read(table["rule"], tuple[Rule, ...])


@cache
def _compiled() -> tuple[tuple[re.Pattern[str], Rule], ...]:
    return tuple((re.compile(rule.pattern, re.MULTILINE), rule) for rule in rules())


def classify(text: str, *, frame: str = "", engine: str = "") -> Mechanism | None:
    """The mechanism of a failure: its message, innermost relevant frame, and the engine."""
    text = text[:LONGEST]
    if inner := _QUOTED.search(text):
        text = inner[2]
    for regex, rule in _compiled():
        if match := regex.search(text):
            groups = {k: _value(v) for k, v in match.groupdict().items()}
            return Mechanism(
                rule.kind,
                filled(rule.component, groups) or component(text, frame, engine),
                filled(rule.message, groups),
                filled((engine == "sglang" and rule.sglang) or rule.fix, groups),
            )
    own = component("", frame, "")
    if own.endswith("configuration"):
        return Mechanism(
            "settings", own, "A check of the settings failed.", "change what the message names"
        )
    return None


def component(text: str, frame: str, engine: str) -> str:
    """The part that failed, by its frame, or by a name in its message."""
    path = frame.partition(",")[0]
    own = next((name for start, name in _PARTS if path.startswith(start)), "")
    if own and own not in ("vLLM", "SGLang", "PyTorch"):
        return own
    named = next((name for regex, name in _NAMED if regex.search(text)), "")
    return named or own or {"vllm": "vLLM", "sglang": "SGLang"}.get(engine, "")


def _value(text: str | None) -> str:
    text = " ".join((text or "").split()).rstrip(" .,:;")
    return text if len(text) <= _VALUE else f"{text[:_VALUE]}..."


def filled(template: str, groups: Mapping[str, str]) -> str:
    """A text with values in place of ``{name}``; a part in brackets without its value is left out.

    Other braces and brackets stay.
    """

    def put(match: re.Match[str]) -> str:
        if match[1] is None:
            return groups.get(match[2], match[0])
        names = re.findall(r"\{([a-z0-9]+)\}", match[1])
        if not all(groups.get(name) for name in names):
            return ""
        return re.sub(r"\{([a-z0-9]+)\}", lambda m: groups[m[1]], match[1])

    return _SEGMENT.sub(put, template)
