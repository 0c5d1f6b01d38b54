"""Counts in a configuration that no model has are found at once; those of models are not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import package_file
from builder.errors import UsageError
from builder.probes.model_counts import too_many
from builder.serving.checkpoint import decoded_config, read_config
from tests.unit.inimage import load

if TYPE_CHECKING:
    from pathlib import Path

BILLION = 10**9


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": BILLION}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers is beyond"),
        ({"full_attention_interval": 2, "num_hidden_layers": BILLION}, "num_hidden_layers"),
        ({"text_config": {"num_hidden_layers": BILLION}}, "num_hidden_layers"),
        ({"vision_config": {"depth": BILLION}}, "depth is"),
        ({"vision_config": {"depths": [2, 10**5, {"depth": BILLION}]}}, "depth is"),
        ({"num_nextn_predict_layers": BILLION}, "num_nextn_predict_layers"),
        ({"n_layer": BILLION}, "n_layer"),
        ({"layer_types": ["full_attention"] * 10_001}, "layer_types has 10001 entries"),
        ({"ignore": ["a"] * 1_000_001}, "ignore has 1000001 entries"),
    ],
)
def test_a_count_that_no_model_has_is_named(config: Any, words: str, tmp_path: Path) -> None:
    assert too_many(config).startswith(words)
    with pytest.raises(UsageError, match=words):
        decoded_config(config)
    if 10**4000 not in config.values():  # Python writes and reads no such number
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=words):
            read_config(tmp_path)


def test_known_models_are_read() -> None:
    known = json.loads(package_file("data", "configurations.json").read_text("utf-8"))
    assert known
    assert [one["id"] for one in known if too_many(one["config"])] == []


def test_names_of_modules_are_no_layers() -> None:
    """A checkpoint may list each expert that it does not quantise."""
    names = [f"model.layers.{n}.mlp.experts.{m}.up_proj" for n in range(60) for m in range(512)]
    assert too_many({"quantization_config": {"ignored_layers": names}}) == ""


def test_an_override_has_the_same_limit() -> None:
    probe = load("preflight_probe")
    probe.refuse_counts("--hf-overrides", {"num_hidden_layers": 4})
    probe.refuse_counts("--hf-overrides", None)
    with pytest.raises(probe.TooMuchError, match="--hf-overrides: num_hidden_layers is 10"):
        probe.refuse_counts("--hf-overrides", {"text_config": {"num_hidden_layers": BILLION}})
