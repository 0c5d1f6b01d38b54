"""What an error suggests in place of an unknown word."""

from __future__ import annotations

import pytest

from builder.errors import did_you_mean

FLAGS = ("--host", "--port", "--headless", "--block-size", "--max-model-len", "--enforce-eager")
VARIABLES = ("VLLM_PORT", "VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_XLA_USE_SPMD")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--ports", FLAGS, "--port"),
        ("--max-model-length", FLAGS, "--max-model-len"),
        ("VLLM_LOGGING_LEVLE", VARIABLES, "VLLM_LOGGING_LEVEL"),
        ("VLLM_CACHE", VARIABLES, "VLLM_CACHE_ROOT"),
        ("fxi", ("fix", "max"), "fix"),
        ("nemotron", ("gemma-4-31b", "nemotron-3-super"), "nemotron-3-super"),
        ("--fast", FLAGS, ""),
        ("--threads", FLAGS, ""),
        ("--ctx-size", FLAGS, ""),
        ("VLLM_FOO", VARIABLES, ""),
        ("VLLM_USE_V1", VARIABLES, ""),
        ("ma", ("marlin",), ""),
        # like, and another thing: a number, an element type, an opposite
        ("VLLM_USE_FLASHINFER_MOE_FP16", ("VLLM_USE_FLASHINFER_MOE_INT4",), ""),
        ("VLLM_USE_FLASHINFER_MOE_FP8", ("VLLM_USE_FLASHINFER_MOE_INT8",), ""),
        ("glm45", ("glm47",), "glm47"),
        ("bfloat15", ("bfloat16",), "bfloat16"),
        ("--disable-prefix-caching", ("--enable-prefix-caching",), ""),
        ("--enable-prefix-cachin", ("--enable-prefix-caching",), "--enable-prefix-caching"),
        (
            "VLLM_USE_FLASHINFER_MOE_FP1",
            ("VLLM_USE_FLASHINFER_MOE_FP16",),
            "VLLM_USE_FLASHINFER_MOE_FP16",
        ),
        ("", ("marlin",), ""),
    ],
)
def test_only_a_word_that_is_alike_is_suggested(
    word: str, known: tuple[str, ...], meant: str
) -> None:
    assert did_you_mean(word, known) == (f"; did you mean {meant!r}?" if meant else "")
