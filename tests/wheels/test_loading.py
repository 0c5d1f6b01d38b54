"""``preflight`` on released wheels: the release's own loader takes tensors by name and shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.serving.configurations import FORMS
from tests.unit.serving.checkpoints import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, tuple[str, list[int]]]

RELEASES = ("0.22.1", "0.28.0", "0.33.0")
HIDDEN, HEADS, KV_HEADS, WIDTH, VOCABULARY, EXPERTS = 512, 8, 4, 64, 1024, 8
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 1024, "rms_norm_eps": 1e-6,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH,
    "num_hidden_layers": 2, "max_position_embeddings": 4096, "rope_theta": 1e6,
    "vocab_size": VOCABULARY, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False,
}  # fmt: skip
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 256,
    "norm_topk_prob": True, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "max_window_layers": 2, "use_sliding_window": False,
}  # fmt: skip
GLM = {
    **COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "moe_intermediate_size": 256, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False,
    "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
#: NVFP4 of compressed-tensors.
PACKED = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False,
                    "strategy": "tensor_group", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "symmetric": True,
                              "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
    }},
}  # fmt: skip
BLOCKS = {**(FORMS["FP8"] or {}), "modules_to_not_convert": ["lm_head", "mlp.gate"]}
TWO = ("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0")
MTP = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')


def plain(rows: int, columns: int) -> Tensors:
    """A linear layer in 16 bits."""
    return {"weight": ("BF16", [rows, columns])}


def modelopt(rows: int, columns: int) -> Tensors:
    """In NVFP4, as ModelOpt writes it."""
    return {
        "weight": ("U8", [rows, columns // 2]),
        "weight_scale": ("F8_E4M3", [rows, columns // 16]),
        "weight_scale_2": ("F32", []),
        "input_scale": ("F32", []),
    }


def packed(rows: int, columns: int) -> Tensors:
    """In NVFP4, as compressed-tensors writes it."""
    return {
        "weight_packed": ("U8", [rows, columns // 2]),
        "weight_scale": ("F8_E4M3", [rows, columns // 16]),
        "weight_global_scale": ("F32", [1]),
        "input_global_scale": ("F32", [1]),
    }


def blocks(rows: int, columns: int) -> Tensors:
    """In FP8 with a scale for each block."""
    return {
        "weight": ("F8_E4M3", [rows, columns]),
        "weight_scale_inv": ("F32", [-(-rows // 128), -(-columns // 128)]),
    }


def gated(place: str, width: int, form: Callable[[int, int], Tensors]) -> Tensors:
    """A gated feed-forward layer, or one expert."""
    sizes = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    return {
        f"{place}.{name}_proj.{part}": tensor
        for name, size in sizes.items()
        for part, tensor in form(*size).items()
    }


def layer(number: int, config: dict[str, Any], form: Callable[[int, int], Tensors]) -> Tensors:
    """The tensors of one layer."""
    place = f"model.layers.{number}"
    queries, keys = HEADS * WIDTH, KV_HEADS * WIDTH
    sizes = {"q": (queries, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN),
             "o": (HIDDEN, queries)}  # fmt: skip
    tensors: Tensors = {
        f"{place}.self_attn.{name}_proj.{part}": tensor
        for name, size in sizes.items()
        for part, tensor in form(*size).items()
    }
    for name in ("input", "post_attention"):
        tensors[f"{place}.{name}_layernorm.weight"] = ("BF16", [HIDDEN])
    if config is LLAMA or config["architectures"] == LLAMA["architectures"]:
        return tensors | gated(f"{place}.mlp", config["intermediate_size"], form)
    tensors[f"{place}.mlp.gate.weight"] = ("BF16", [EXPERTS, HIDDEN])
    for expert in range(EXPERTS):
        tensors |= gated(f"{place}.mlp.experts.{expert}", config["moe_intermediate_size"], form)
    if config["model_type"] == "glm4_moe":
        tensors[f"{place}.mlp.gate.e_score_correction_bias"] = ("F32", [EXPERTS])
        return tensors | gated(f"{place}.mlp.shared_experts", 256, form)
    for name in "qk":
        tensors[f"{place}.self_attn.{name}_norm.weight"] = ("BF16", [WIDTH])
    return tensors


def tensors_of(config: dict[str, Any], form: Callable[[int, int], Tensors] = plain) -> Tensors:
    """The tensors of a whole checkpoint."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", [VOCABULARY, HIDDEN]),
        "lm_head.weight": ("BF16", [VOCABULARY, HIDDEN]),
        NORM: ("BF16", [HIDDEN]),
    }
    for number in range(config["num_hidden_layers"]):
        tensors |= layer(number, config, form)
    return tensors


def with_draft(tensors: Tensors) -> Tensors:
    """The tensors of a model with one layer for drafts."""
    place = "model.layers.2"
    more: Tensors = {
        f"{place}.{name}.weight": ("BF16", [HIDDEN])
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    more[f"{place}.eh_proj.weight"] = ("BF16", [HIDDEN, 2 * HIDDEN])
    for name in ("shared_head.head", "embed_tokens"):
        more[f"{place}.{name}.weight"] = ("BF16", [VOCABULARY, HIDDEN])
    return tensors | layer(2, GLM, plain) | more


NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.0.gate_proj."
DENSE, DRAFT = tensors_of(LLAMA), with_draft(tensors_of(GLM))
NVFP4 = {**LLAMA, "quantization_config": FORMS["NVFP4"]}
MOE_PACKED = {**MOE, "quantization_config": PACKED}
MOE_BLOCKS = {**MOE, "quantization_config": BLOCKS}
#: Checkpoints that load, and flags.
RIGHT: dict[str, tuple[dict[str, Any], Tensors, tuple[str, ...]]] = {
    "dense": (LLAMA, DENSE, ()),
    "dense, rank 0 of 2": (LLAMA, DENSE, TWO),
    "NVFP4": (NVFP4, tensors_of(LLAMA, modelopt), ()),
    "NVFP4, rank 0 of 2": (NVFP4, tensors_of(LLAMA, modelopt), TWO),
    "experts": (MOE, tensors_of(MOE), ()),
    "experts in NVFP4": (MOE_PACKED, tensors_of(MOE, packed), ()),
    "experts in NVFP4, divided": (
        MOE_PACKED, tensors_of(MOE, packed), (*TWO, "--enable-expert-parallel"),
    ),
    "experts in FP8": (MOE_BLOCKS, tensors_of(MOE, blocks), ()),
    "experts in FP8, rank 0 of 2": (MOE_BLOCKS, tensors_of(MOE, blocks), TWO),
    "MTP": (GLM, DRAFT, MTP),
}  # fmt: skip


def without(tensors: Tensors, name: str) -> Tensors:
    """The tensors without one."""
    return {key: value for key, value in tensors.items() if key != name}


#: Checkpoints that do not load, and what the refusal says.
WRONG: dict[str, tuple[dict[str, Any], Tensors, tuple[str, ...], str]] = {
    "a name too many": (
        LLAMA, {**DENSE, "model.layers.1.mlp.strange.weight": ("BF16", [8])}, (), "strange",
    ),
    "a weight too few": (LLAMA, without(DENSE, NORM), (), NORM),
    "another shape": (LLAMA, {**DENSE, NORM: ("BF16", [511])}, (), NORM),
    "another width": (LLAMA, {**DENSE, QUERY: ("BF16", [512, 256])}, (), QUERY),
    "experts' scales with a name of others": (
        MOE_BLOCKS, {**tensors_of(MOE, blocks), f"{EXPERT}odd_scale": ("F32", [])}, (), "odd_scale",
    ),
    "an MTP layer too few": (
        GLM, without(DRAFT, "model.layers.2.enorm.weight"), MTP, "enorm",
    ),
}  # fmt: skip


@pytest.fixture
def asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit status and the document for a checkpoint, a release and flags."""

    def ask(
        release: str, config: dict[str, Any], tensors: Tensors, flags: tuple[str, ...]
    ) -> tuple[int, dict[str, Any]]:
        folder = checkpoint(tmp_path / "model", tensors, config)
        code = run(["preflight", str(folder), "--release", release, "--json", *flags])
        return code, dict(json.loads(capfd.readouterr().out))

    return ask


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_checkpoint_that_loads_is_not_refused(
    asked: Callable[..., tuple[int, dict[str, Any]]], release: str, name: str
) -> None:
    config, tensors, flags = RIGHT[name]
    code, document = asked(release, config, tensors, flags)
    assert (code, document["starts"]) == (0, "yes"), document["refusal"]
    parts = ["model", "draft"] if flags == MTP else ["model"]
    assert [one["part"] for one in document["loading"]] == parts
    for one in document["loading"]:
        assert one["tensors"] == len(tensors)
        assert "not_asked" not in one, one


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_that_does_not_load_is_refused(
    asked: Callable[..., tuple[int, dict[str, Any]]], release: str, name: str
) -> None:
    config, tensors, flags, words = WRONG[name]
    code, document = asked(release, config, tensors, flags)
    assert (code, document["starts"]) == (5, "no"), document["loading"]
    assert document["refusal"]["stage"] == "loading"
    assert words in document["refusal"]["message"]


def test_without_files_of_weights_loading_is_not_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run(["preflight", str(tmp_path), "--release", RELEASES[-1]]) == 0
    assert "loading    not asked: no safetensors files are beside" in capfd.readouterr().out
