"""A recipe says whether its context fits, and takes a larger share of the memory if that helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from builder.errors import UsageError
from builder.serving import recipefiles as recipe_module
from builder.serving.memory import UTILIZATION, overhead
from builder.serving.models import Models
from builder.serving.recipe import Place, explanation, recipe_of
from builder.serving.serveflags import Flag
from tests.documents import validated

from .checkpoints import DENSE, checkpoint
from .served import TWO, interface, request, served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.serving.models import Model
    from builder.serving.recipe import Recipe
    from tests.unit.conftest import Called

GIB = 2**30
#: One sequence of 200000 tokens in FP8 keeps 12.2 GiB.
CONFIG: dict[str, Any] = DENSE | {
    "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262_144,
}  # fmt: skip
SPLIT = "it does not fit: "


def held(tmp_path: Path, gib: int, **changed: Any) -> Path:
    """A checkpoint with so many GiB of weights."""
    tensors: dict[str, tuple[str, list[int]]] = {
        "model.layers.0.mlp.up_proj.weight": ("U8", [gib, GIB])
    }
    return checkpoint(tmp_path / f"held-{gib}", tensors, CONFIG | changed)


def made(folder: Path | None, *chosen: str, **options: Any) -> Recipe:
    return recipe_of(request(checkpoint=folder, chosen=chosen, **options))


def share(recipe: Recipe) -> tuple[str | None, str]:
    """The share of the memory, and where it comes from."""
    return next(((f.value, f.origin) for f in recipe.flags if f.name == UTILIZATION), (None, ""))


def fits(recipe: Recipe) -> str:
    assert recipe.memory is not None
    return recipe.memory.fits


def without_bytes() -> Model:
    """A model whose file has no bytes of its weights."""
    return msgspec.structs.replace(Models.discover().model("nemotron-3-super"), weight_bytes=None)


def note(recipe: Recipe) -> str:
    """What it says of memory that is not enough."""
    return next((n.removeprefix(SPLIT) for n in recipe.notes if n.startswith(SPLIT)), "")


def test_what_fits_keeps_the_share_of_the_model(tmp_path: Path) -> None:
    recipe = made(held(tmp_path, 60))
    assert (fits(recipe), note(recipe)) == ("yes", "")
    value, origin = share(recipe)
    assert (value, origin.startswith("model: ")) == ("0.85", True)
    assert recipe.memory is not None
    beside = overhead(4096).bytes  # --max-num-batched-tokens of the model's file
    assert recipe.memory.room == int(0.85 * int(121.69 * GIB)) - 60 * GIB - beside
    assert recipe.memory.kv_cache is not None
    assert recipe.memory.kv_cache.context == 200_000
    assert recipe.made_by.endswith(f"--checkpoint {tmp_path / 'held-60'}")


def test_a_share_that_is_too_small_is_replaced(tmp_path: Path) -> None:
    recipe = made(held(tmp_path, 85))
    value, origin = share(recipe)
    assert value == "0.88", "85 + 5.88 + 3 of error + 12.21 x 1.05 + 0.25 GiB of 121.69"
    assert origin.startswith("memory: weights of 85.00 GiB and 1 x 200000 tokens of KV cache")
    assert "may not fit at 0.85 (model: " in origin
    assert (fits(recipe), note(recipe)) == ("yes", "")
    text = explanation(recipe)
    assert f"  --gpu-memory-utilization {value}\n      memory: weights of 85.00 GiB" in text
    assert "memory of one Spark, estimated: fits yes\n  weights 85.00 GiB\n" in text


def test_what_the_user_chose_is_kept_and_the_note_says_what_is_needed(tmp_path: Path) -> None:
    recipe = made(held(tmp_path, 60), "gpu-memory-utilization=0.6")
    assert share(recipe) == ("0.6", "--set")
    assert fits(recipe) == "no"
    assert "--gpu-memory-utilization 0.6 leaves 7.14 GiB for the KV cache" in note(recipe)
    least = note(recipe).rpartition("=")[2]
    assert fits(made(held(tmp_path, 60), f"gpu-memory-utilization={least}")) == "yes"
    less = f"{float(least) - 0.07:.2f}"
    assert fits(made(held(tmp_path, 60), f"gpu-memory-utilization={less}")) == "no"


def test_a_context_that_no_share_holds_gets_a_shorter_one(tmp_path: Path) -> None:
    recipe = made(held(tmp_path, 98))
    assert share(recipe)[0] == "0.85"
    step = note(recipe).rpartition("; ")[2]
    assert step.startswith("--set max-model-len=")
    shorter = made(held(tmp_path, 98), step.removeprefix("--set "))
    assert (fits(shorter), note(shorter)) == ("yes", "")


def test_weights_alone_may_be_too_large(tmp_path: Path) -> None:
    recipe = made(held(tmp_path, 110))
    assert "leaves nothing for the KV cache" in note(recipe)
    assert note(recipe).endswith("(spark-build audit DIR names its layers in 16 bits)")


def test_sequences_count(tmp_path: Path) -> None:
    assert fits(made(held(tmp_path, 60), "max-num-seqs=2")) == "yes"
    recipe = made(held(tmp_path, 60), "max-num-seqs=9")
    assert "9 x 200000 tokens" in note(recipe)


@pytest.mark.parametrize(
    ("text", "context"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("auto", 262_144), ("-1", 262_144)],
)
def test_a_context_is_read_as_vllm_reads_it(tmp_path: Path, text: str, context: int) -> None:
    memory = made(held(tmp_path, 10), f"max-model-len={text}").memory
    assert memory is not None
    assert memory.kv_cache is not None
    assert memory.kv_cache.context == context


def test_bytes_for_the_kv_cache_are_kept_and_judged(tmp_path: Path) -> None:
    known = interface("0.33.0")
    flags = (*known.flags, Flag(names=("--kv-cache-memory-bytes",), takes="one", kind="text"))
    known = msgspec.structs.replace(known, flags=flags)

    def asked(value: str, gib: int = 60) -> Recipe:
        given = f"kv-cache-memory-bytes={value}"
        return made(held(tmp_path, gib), given, served=served(interface=known))

    assert fits(asked("13G")) == "yes"
    assert "--kv-cache-memory-bytes 12G leaves 12.00 GiB" in note(asked("12G"))
    enough = note(asked("12G")).rpartition("=")[2]
    assert fits(asked(enough)) == "yes"
    assert fits(asked("13G", gib=95)) == "no", "the system needs what is left"


@pytest.mark.parametrize(("vllm", "default"), [("0.19.1", 0.9), ("0.20.0", 0.92), ("0.33.0", 0.92)])
def test_without_a_share_the_release_s_own_counts(
    tmp_path: Path, vllm: str, default: float
) -> None:
    recipe = made(held(tmp_path, 60), "gpu-memory-utilization=", served=served(vllm))
    assert recipe.memory is not None
    assert (recipe.memory.utilization, recipe.memory.source) == (default, f"vLLM {vllm} by itself")
    assert share(recipe) == (None, "")
    assert not any("the memory that it needs is unknown" in n for n in recipe.notes)
    unknown = made(None, "gpu-memory-utilization=", served=served(vllm))
    assert any("the memory that it needs is unknown" in n for n in unknown.notes)


def test_by_the_model_file_alone_the_context_is_unknown() -> None:
    recipe = made(None, model=without_bytes())
    assert fits(recipe) == "unknown"
    assert recipe.memory is not None
    assert recipe.memory.weights is not None
    assert recipe.memory.weights.at_least
    assert recipe.memory.kv_cache is None
    assert "  weights at least 62.86 GiB\n" in explanation(recipe)


def test_by_the_model_file_alone_weights_may_be_too_large() -> None:
    model = without_bytes()
    assert model.parameters is not None
    parameters = msgspec.structs.replace(model.parameters, value=250_000_000_000)
    recipe = made(None, model=msgspec.structs.replace(model, parameters=parameters))
    assert fits(recipe) == "no"
    assert note(recipe).startswith("weights of 130.97 GiB, and --gpu-memory-utilization 0.85")


def test_a_kv_cache_dtype_that_is_not_known_is_not_judged(tmp_path: Path) -> None:
    assert fits(made(held(tmp_path, 60), "kv-cache-dtype=nvfp4")) == "unknown"


def test_one_model_over_two_nodes_is_not_judged(tmp_path: Path) -> None:
    place = Place(topology="tp2", **TWO)
    recipe = made(held(tmp_path, 60), place=place)
    assert recipe.memory is None
    assert any("not for one model over two" in n for n in recipe.notes)
    assert not any("memory is estimated" in n for n in made(None, place=place).notes)
    two = Place(topology="two-solos", addresses=TWO["addresses"])
    assert fits(made(held(tmp_path, 60), place=two)) == "yes"


def test_a_checkpoint_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        made(tmp_path / "none")


def test_the_command(
    spark_build: Callable[..., Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "served_profile", lambda *_: served())
    words = ("recipe", "nemotron-3-super", "--checkpoint", held(tmp_path, 110))
    result = spark_build(*words)
    assert result.code == 0
    assert "# note: it does not fit: weights of 110.00 GiB" in result.out
    document = validated("recipe", spark_build(*words, "--json").json)
    assert document["recipe"]["memory"]["fits"] == "no"
    refused = spark_build(*words, "--format", "trtllm")
    assert (refused.code, "--checkpoint is for vLLM" in refused.err) == (2, True)
