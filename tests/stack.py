"""What the profile ``b12x-full`` applies to vLLM 0.20.1, in order."""

from __future__ import annotations

APPLIED = (
    "cutlass-dsl-cu13",
    "cutlass-dsl-sm121a",
    "flashinfer-b12x",
    "flashinfer-sm121",
    "flashinfer-b12x-moe-barrier",
    "flashinfer-b12x-store-wait",
    "flashinfer-b12x-moe-rows",
    "vllm-b12x-backend",
    "vllm-b12x-experts-scales",
    "b12x-env",
)
