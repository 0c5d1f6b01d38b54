"""Writes a tiny NVFP4 model to disk: configuration, random weights, tokenizer.  Standard library.

The format is that of NVIDIA's ModelOpt checkpoints: two E2M1 codes a byte, one E4M3 scale
for 16 of them, one FP32 scale for a tensor, one for the activations.  The architectures are Qwen3
and Qwen3-MoE, which every vLLM from 0.17 to 0.33 knows; all dimensions are multiples of 128, which
b12x needs.  It has real weights, because ``--load-format dummy`` leaves packed codes uninitialised
and draws scales around zero: such a model may correctly answer NaN.

Row 0 of the output projection is zero, so token 0 has logit 0 and others lie on both sides of it:
a server with correct numbers never answers token 0.  One whose logits are NaN answers nothing
else, which users see as ``!!!!!``.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 512, 1024, 2, 2048
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
EXPERTS, TOP_K, EXPERT_INTERMEDIATE = 8, 2, 256
#: The model's maximum sequence length.
MAX_LENGTH = 2048
#: E4M3 bytes of the block scales 32, 64 and 128; with SCALE_2 a matrix of 512 columns keeps the
#: size of what it multiplies, and each product with SCALE_2 is an E4M3 value again.
BLOCK_SCALES = (0x60, 0x68, 0x70)
SCALE_2 = 2.0**-12
#: Activations up to 6 * 448 * 2**-9 = 5.25 are within range.
INPUT_SCALE = 2.0**-9
#: Variants by name.
VARIANTS = ("dense", "moe")

Tensor = tuple[str, tuple[int, ...], bytes]


def bf16(value: float) -> bytes:
    """A number as bfloat16, rounded to nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def normal(draw: random.Random, count: int, deviation: float) -> bytes:
    """Normal numbers as bfloat16, each one of 256 equally likely values."""
    spread = statistics.NormalDist(sigma=deviation)
    table = b"".join(bf16(spread.inv_cdf((i + 0.5) / 256)) for i in range(256))
    drawn, numbers = draw.randbytes(count), bytearray(2 * count)
    numbers[::2], numbers[1::2] = drawn.translate(table[::2]), drawn.translate(table[1::2])
    return bytes(numbers)


class Weights:
    """Tensors of one variant, by name: (type, shape, bytes)."""

    def __init__(self, variant: str, seed: int = 0) -> None:
        self.draw = random.Random(seed)  # noqa: S311 - weights, not secrets
        self.tensors: dict[str, Tensor] = {}
        self._plain("model.embed_tokens", VOCABULARY, HIDDEN, 1.0)
        for layer in range(LAYERS):
            self._layer(f"model.layers.{layer}", variant)
        self._ones("model.norm", HIDDEN)
        self._plain("lm_head", VOCABULARY, HIDDEN, 1.0 / math.sqrt(HIDDEN))
        dtype, shape, data = self.tensors["lm_head.weight"]
        self.tensors["lm_head.weight"] = (dtype, shape, bytes(2 * HIDDEN) + data[2 * HIDDEN :])

    def _layer(self, name: str, variant: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._ones(f"{name}.{norm}", HIDDEN)
        for norm in ("q_norm", "k_norm"):
            self._ones(f"{name}.self_attn.{norm}", HEAD_DIM)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self._quantised(f"{name}.self_attn.{part}_proj", heads * HEAD_DIM, HIDDEN)
        self._quantised(f"{name}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        if variant == "dense":
            self._gated(f"{name}.mlp", INTERMEDIATE)
            return
        self._plain(f"{name}.mlp.gate", EXPERTS, HIDDEN, 1.0 / math.sqrt(HIDDEN))
        for expert in range(EXPERTS):
            self._gated(f"{name}.mlp.experts.{expert}", EXPERT_INTERMEDIATE)

    def _gated(self, name: str, width: int) -> None:
        self._quantised(f"{name}.gate_proj", width, HIDDEN)
        self._quantised(f"{name}.up_proj", width, HIDDEN)
        self._quantised(f"{name}.down_proj", HIDDEN, width)

    def _ones(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = ("BF16", (size,), bf16(1.0) * size)

    def _plain(self, name: str, rows: int, columns: int, deviation: float) -> None:
        data = normal(self.draw, rows * columns, deviation)
        self.tensors[f"{name}.weight"] = ("BF16", (rows, columns), data)

    def _quantised(self, name: str, rows: int, columns: int) -> None:
        blocks = columns // 16
        table = bytes(BLOCK_SCALES[i % len(BLOCK_SCALES)] for i in range(256))
        scales = self.draw.randbytes(rows * blocks).translate(table)
        codes = self.draw.randbytes(rows * columns // 2)
        self.tensors[f"{name}.weight"] = ("U8", (rows, columns // 2), codes)
        self.tensors[f"{name}.weight_scale"] = ("F8_E4M3", (rows, blocks), scales)
        self.tensors[f"{name}.weight_scale_2"] = ("F32", (), struct.pack("<f", SCALE_2))
        self.tensors[f"{name}.input_scale"] = ("F32", (), struct.pack("<f", INPUT_SCALE))


def safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes]:
    """A safetensors file: length of the header (8 bytes), the header (JSON), the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for _, _, data in tensors.values():
        yield data


def ignored(variant: str) -> list[str]:
    """Modules that are not quantised."""
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
    return ["lm_head", *(gates if variant == "moe" else [])]


def configuration(variant: str) -> dict[str, Any]:
    """``config.json``, with the quantisation as ModelOpt writes it."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if variant == "moe":
        config.update(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_intermediate_size=EXPERT_INTERMEDIATE,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ignored(variant),
        "producer": {"name": "modelopt", "version": "0.29.0"},
    }
    return config


def tokenizer() -> dict[str, Any]:
    """``tokenizer.json``: one word a token, ``t0`` to the last."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{number}": number for number in range(VOCABULARY)},
            "unk_token": "t3",
        },
    }


def write(folder: Path, variant: str, seed: int = 0) -> Path:
    """Write one of VARIANTS into a folder; a few MB, the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": "t1",
        "eos_token": "t2",
        "unk_token": "t3",
    }
    documents = {
        "config.json": configuration(variant),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": words,
    }
    for name, value in documents.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        for part in safetensors(Weights(variant, seed).tensors):
            file.write(part)
    return folder
