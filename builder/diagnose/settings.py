"""Requested settings in a log: variables, flags, and vLLM's echo of its arguments.

A requested setting may not be in effect; the catalogue compares the two.  A name is that of vLLM's
argument (``moe_backend``), a variable is in capitals, and settings of the draft model of
speculative decoding have the prefix ``draft.``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FLAGS = (
    "linear_backend",
    "moe_backend",
    "attention_backend",
    "reasoning_parser",
    "tool_call_parser",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "nnodes",
)
_BACKENDS = (
    "auto|cutlass|b12x|marlin|triton|emulation|humming|deep[-_]gemm|flashinfer[-_](?:b12x|cutlass|"
    "cutedsl|trtllm|cudnn)"
)
_VARIABLE = re.compile(
    r"\b((?:VLLM|TLLM|FLASHINFER)_[A-Z0-9_]+|CUTE_DSL_ARCH|(?:GLOO|NCCL)_SOCKET_IFNAME)="
    r"[\"']?([^\s\"',;)\]}]*)"
)
_FLAG = re.compile(rf"--(linear|moe)[-_]backend[= ][\"']?({_BACKENDS})\b")
_ARGUMENT = re.compile(rf"'({'|'.join(_FLAGS)})': '?([\w.-]+)")
_CONFIG = re.compile(r"\b(linear_backend|moe_backend|quantization)='?([\w.-]+)")
_DRAFT = re.compile(
    r"'speculative_config': \{[^{}]*\}|speculative_config=SpeculativeConfig\([^)]*\)"
)
_DRAFT_ENTRY = re.compile(r"'?moe_backend'?[:=] ?'([\w-]+)'")
#: Prefixes of NAME=VALUE in an assignment.
_SETTERS = (
    "export",
    "-e",
    "-e=",
    "--env",
    "--env=",
    "env",
    "ENV",
    "+",
    "-",
    "-x",
    '"',
    "'",
    "[",
    ",",
    "{",
)

#: Text before a flag that a message only recommends.
_ADVICE = ("use ", "pass ", "set ", "try ", "with ", "to ")

#: Texts, one of which is in every line with a setting.
TRIGGERS = (
    "VLLM_",
    "TLLM_",
    "FLASHINFER_",
    "CUTE_DSL_ARCH=",
    "_SOCKET_IFNAME=",
    "-backend",
    "non-default args",
    "KernelConfig(",
)


class Setting(NamedTuple):
    """One requested setting."""

    name: str
    value: str
    line: int


def settings_in(text: str, line: int) -> list[Setting]:
    """Settings requested in one line of a log."""
    found = [
        Setting(match[1], match[2], line)
        for match in _VARIABLE.finditer(text)
        if _is_set(text, match.start())
    ]
    echo = "non-default args" in text or "KernelConfig(" in text
    if not echo:
        found += [
            Setting(f"{match[1]}_backend", match[2].replace("-", "_"), line)
            for match in _FLAG.finditer(text)
            if not text[: match.start()].lower().endswith(_ADVICE)
        ]
        return [s for s in found if s.value != "auto"]
    for draft in _DRAFT.findall(text):
        found += [Setting("draft.moe_backend", m, line) for m in _DRAFT_ENTRY.findall(draft)]
    own = _DRAFT.sub("", text)
    for match in [*_ARGUMENT.finditer(own), *_CONFIG.finditer(own)]:
        found.append(Setting(match[1], match[2], line))
    return [s for s in found if s.value not in ("auto", "None")]


def _is_set(text: str, start: int) -> bool:
    """Whether NAME=VALUE at ``start`` is an assignment, not advice in a message."""
    before = text[:start].rstrip()
    if not before or before.endswith(_SETTERS):
        return True
    last = before.rsplit(None, 1)[-1]
    return bool(re.fullmatch(r"[\"']?[A-Z][A-Z0-9_]+=\S*", last))
