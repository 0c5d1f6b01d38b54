"""Finds selected kernels in a log, in every form that supported releases use.

A line proves that a kernel was selected, not that it ran.  The forms are from the sources of
each vLLM release from 0.17.0 to 0.33.0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from builder.util.documents import Count, Part, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


class Selection(Part, frozen=True):
    """One kernel that was selected for one kind of layer, and its first log line."""

    kind: Text
    kernel: Text
    line: Count
    file: Annotated[str, Meta(description="the log it is in, of several")] = ""


class Form(NamedTuple):
    """One form of such a line.  ``kernel`` is a group of the pattern."""

    kind: str
    pattern: str


FORMS = (
    # NVFP4: `Using NvFp4LinearBackend.MARLIN for` to 0.19, a class name from 0.20
    Form("nvfp4-linear", r"Using (?P<kernel>[\w.-]+) for NVFP4 GEMM"),
    Form("nvfp4-moe", r"Using '(?P<kernel>\w+)' NvFp4 MoE backend"),
    # FP8, per tensor and per block; the class name tells which
    Form("fp8-linear", r"Selected (?P<kernel>\w+Kernel) for \w+"),
    Form("fp8-moe", r"Using '?(?P<kernel>\w+)'? Fp8 MoE backend"),
    # MX formats
    Form("mxfp8-linear", r"Using (?P<kernel>\w+)(?: backend)? for MXFP8 GEMM"),
    Form("mxfp8-moe", r"Using '(?P<kernel>\w+)' MxFp8 MoE backend"),
    Form("mxfp4-linear", r"Using (?P<kernel>\w+) for MXFP4 GEMM"),
    Form("mxfp4-moe", r"Using '(?P<kernel>\w+)' Mxfp4 MoE backend"),  # from 0.19
    Form("mxfp4-moe", r"Using (?P<kernel>FlashInfer MXFP4 [\w ]+?) backend"),
    Form("mxfp4-moe", r"Using (?P<kernel>Marlin|Triton) backend$"),  # to 0.18
    # weight-only integers
    Form("wna16-linear", r"Using (?P<kernel>\w+LinearKernel) for \w*(?:GPTQ|AWQ|WNA16)\w*"),
    Form("wna16-moe", r"Using '(?P<kernel>\w+)' WNA16 MoE backend"),
    Form("wna16-moe", r"Using (?P<kernel>\w+) backend for WNA16 MoE"),  # to 0.22
    Form("w4a8-linear", r"Using (?P<kernel>\w+) for CompressedTensorsW4A8\w+"),
    Form("w4a8-moe", r"Using '?(?P<kernel>\w+)'? W4A8 (?:Int8 )?MoE backend"),
    Form("int8-moe", r"Using '?(?P<kernel>\w+)'? Int8 MoE backend"),
    # unquantised experts, usually of a draft model
    Form("unquantized-moe", r"Using (?P<kernel>\w+) Unquantized MoE (?:LoRA )?backend"),
    Form("unquantized-moe", r"Using (?P<kernel>[\w ]+?) backend for Unquantized MoE"),  # to 0.19
    # attention: selected automatically, or requested
    Form("attention", r"Using (?P<kernel>\w+) attention backend out of potential backends"),
    Form("attention", r"Using AttentionBackendEnum\.(?P<kernel>\w+) backend\."),
    Form("mla-prefill", r"Using (?P<kernel>\w+) MLA prefill backend"),
    Form("vision-attention", r"Using (?:AttentionBackendEnum\.)?(?P<kernel>\w+) for MMEncoder"),
    Form(
        "vision-attention",
        r"Using backend (?:AttentionBackendEnum\.)?(?P<kernel>\w+) for vit attention",
    ),
    # TensorRT-LLM logs little: its fall-back, and its configuration
    Form("moe", r"Using (?P<kernel>CutlassFusedMoE) instead"),
    Form("moe", r"moe_config=MoeConfig\([^)]*?backend=['\"](?P<kernel>\w+)['\"]"),
    Form("moe", r"\bmoe_backend='(?P<kernel>CUTLASS|CUTEDSL|TRTLLM|VANILLA|TRITON|WIDEEP)'"),
    Form("attention", r"\battn_backend=['\"](?P<kernel>\w+)['\"]"),
)

#: Names of kinds in the report.
LABELS: Mapping[str, str] = {
    "nvfp4-linear": "NVFP4 linear",
    "nvfp4-moe": "NVFP4 MoE",
    "fp8-linear": "FP8 linear",
    "fp8-block": "FP8 linear, block scales",
    "fp8-moe": "FP8 MoE",
    "int8-linear": "INT8 linear",
    "int8-moe": "INT8 MoE",
    "mxfp8-linear": "MXFP8 linear",
    "mxfp8-moe": "MXFP8 MoE",
    "mxfp4-linear": "MXFP4 linear",
    "mxfp4-moe": "MXFP4 MoE",
    "wna16-linear": "WNA16 linear",
    "wna16-moe": "WNA16 MoE",
    "w4a8-linear": "W4A8 linear",
    "w4a8-moe": "W4A8 MoE",
    "unquantized-moe": "unquantised MoE",
    "attention": "attention",
    "mla-prefill": "MLA prefill attention",
    "vision-attention": "vision attention",
    "moe": "MoE",
}


def selection(kind: str, match: re.Match[str], line: int) -> Selection:
    """The selection in a matching line."""
    kernel = match["kernel"].removeprefix("NvFp4LinearBackend.")
    if kind == "fp8-linear":
        if re.search(r"Int8", kernel):
            kind = "int8-linear"
        elif re.search(r"Block|DeepG(?:EMM|emm)", kernel):
            kind = "fp8-block"
    return Selection(kind, kernel, line)
