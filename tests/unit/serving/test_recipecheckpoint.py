"""A recipe is for a checkpoint of its model, with a context that vLLM takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.serving import recipefiles as recipe_module
from builder.serving.checkpoint import read_config
from builder.serving.recipe import Place, recipe_of

from .checkpoints import DENSE, checkpoint
from .served import TWO, interface, request, served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.serving.recipe import Recipe
    from tests.unit.conftest import Called

GIB = 2**30
CONTEXT = "--max-model-len"
#: What looks like Nemotron 3 Super, as far as the model's file goes.
SUPER: dict[str, Any] = DENSE | {
    "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4,
    "hybrid_override_pattern": "MEM*", "n_routed_experts": 512, "num_experts_per_tok": 22,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "max_position_embeddings": 262_144,
}  # fmt: skip
LLAMA: dict[str, Any] = DENSE | {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any], gib: int = 75) -> Path:
    tensors: dict[str, tuple[str, list[int]]] = {
        "model.layers.0.mlp.up_proj.weight": ("U8", [gib, GIB])
    }
    return checkpoint(tmp_path / "held", tensors, config)


def made(held: Path, *chosen: str, **options: Any) -> Recipe:
    return recipe_of(request(**{"checkpoint": held, "chosen": chosen, **options}))


def unlike(recipe: Recipe) -> str:
    """What it says of a checkpoint of something else."""
    return next((n for n in recipe.notes if "does not look like" in n), "")


def context(recipe: Recipe) -> tuple[str | None, str]:
    (flag,) = (f for f in recipe.flags if f.name == CONTEXT)
    return flag.value, flag.origin


def test_a_checkpoint_of_the_model_is_not_noted(tmp_path: Path) -> None:
    recipe = made(folder(tmp_path, SUPER))
    assert unlike(recipe) == ""
    assert context(recipe)[0] == "200000"


@pytest.mark.parametrize(
    ("model", "config", "gib", "said"),
    [
        ("nemotron-3-super", LLAMA, 75, "it has no routed experts, and the model has"),
        ("nemotron-3-super", LLAMA, 75, "all its layers are attention, and the model is a hybrid"),
        ("nemotron-3-super", LLAMA, 75, "architecture 'LlamaForCausalLM', 4 layers"),
        ("nemotron-3-super", SUPER, 20, "its weights have 21474836480 bytes, and the model has"),
        ("nemotron-3-super", SUPER, 600, "and the model has 120000000000 parameters"),
        ("qwen3.6-35b-a3b", LLAMA, 20, "it has no routed experts"),
        ("gemma-4-31b", SUPER, 20, "it has 512 routed experts, and the model has none"),
        ("gemma-4-31b", LLAMA, 20, ""),
    ],
)
def test_a_checkpoint_of_another_model_is_noted(
    tmp_path: Path, model: str, config: dict[str, Any], gib: int, said: str
) -> None:
    note = unlike(recipe_of(request(model, checkpoint=folder(tmp_path, config, gib))))
    assert said in note
    assert bool(said) == bool(note)


def test_a_name_out_of_the_checkpoint_stays_on_one_line(tmp_path: Path) -> None:
    named = LLAMA | {"architectures": ["x\nrm -rf /"]}
    assert r"architecture 'x\nrm -rf /'" in unlike(made(folder(tmp_path, named)))


@pytest.mark.parametrize("topology", ["solo", "tp2"])
def test_the_context_is_at_most_the_checkpoint_s_own(tmp_path: Path, topology: Any) -> None:
    place = Place(topology=topology, **(TWO if topology == "tp2" else {}))
    recipe = made(folder(tmp_path, LLAMA), place=place)
    value, origin = context(recipe)
    assert value == "4096"
    assert origin.startswith("checkpoint: max_position_embeddings in config.json; 200000 (model: ")
    assert any(n.startswith("--max-model-len is 4096, the checkpoint's own") for n in recipe.notes)


def test_a_context_that_the_user_set_is_refused_and_not_changed(tmp_path: Path) -> None:
    place = folder(tmp_path, SUPER)
    with pytest.raises(UsageError) as failure:
        made(place, "max_model_len=300k")
    assert str(failure.value) == (
        "--set max_model_len=300k: that is more than the model's own maximum, 262144: vLLM "
        "refuses it without VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    )
    assert context(made(place, "max-model-len=262144"))[0] == "262144"
    known = interface("0.33.0", variables={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": ()})
    long = ("max-model-len=300000", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
    assert context(made(place, *long, served=served(interface=known)))[0] == "300000"
    with pytest.raises(UsageError, match="more than the model's own maximum"):
        made(place, long[0], f"{long[1][:-1]}0", served=served(interface=known))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"factor": 2.0, "rope_type": "linear"}}, 8192),
        ({"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}, 4096),
        (
            {"rope_scaling": {
                "factor": 4.0, "type": "yarn", "original_max_position_embeddings": 2048
            }},
            8192,
        ),
        ({"rope_parameters": {"full_attention": {"factor": 8.0}, "sliding_attention": {}}}, 32768),
        ({"rope_parameters": {"factor": 1e300}}, 2**32),
        ({"model_max_length": 10_000}, 10_000),
        ({"model_max_length": 1e30}, 2**32),
        ({"max_position_embeddings": None, "model_max_length": 10_000}, None),
    ],
)  # fmt: skip
def test_positions_that_are_scaled_count(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    read = read_config(folder(tmp_path, LLAMA | config))
    assert read is not None
    assert read.longest == longest


def test_the_command(
    spark_build: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "served_profile", lambda *_: served())
    words = ("recipe", "nemotron-3-super", "--checkpoint", folder(tmp_path, LLAMA))
    result = spark_build(*words)
    assert result.code == 0
    assert "# note: the checkpoint does not look like nemotron-3-super: " in result.out
    assert "--max-model-len 4096" in result.out
    refused = spark_build(*words, "--set", "max-model-len=9000")
    assert refused.code == 2
    assert "--set max-model-len=4096\n" in refused.err
