"""A model's file from its checkpoint says what the checkpoint says, and can be read again."""

import json
from pathlib import Path
from typing import Any

import pytest

from builder.proof.hub import HubCheckpoint
from builder.serving import modelfile
from builder.serving.models import Models, read_model
from tests.unit.caller import Call

from .checkpoints import checkpoint

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
BASE: dict[str, Any] = {
    "architectures": ["X"], "model_type": "x", "max_position_embeddings": 4096, "scale": None,
}  # fmt: skip


def grouped(form: str, bits: int) -> dict[str, Any]:
    """A quantisation in the form of compressed-tensors."""
    groups = {"group_0": {"weights": {"num_bits": bits}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def added(call: Call, config: dict[str, Any], **beside: Any) -> Any:
    folder = Path("checkpoint")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, value in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    done = call("models", "add", "checkpoint", "--id", "me/My_Model", "--models", "own")
    assert done.code == 0, done.err
    return read_model(Path(done.out.strip()))


@pytest.mark.parametrize(
    ("quantised", "more", "kinds"),
    [
        (NVFP4, {}, {"nvfp4-linear"}),
        (NVFP4, {"num_experts": 8}, {"nvfp4-linear", "nvfp4-moe"}),
        ({"quant_method": "mxfp4"}, {"num_local_experts": 8}, {"mxfp4-moe"}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {}, {"fp8-block"}),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, {}, {"w4a16-linear"}),
        (None, {}, {"unquantized"}),
        ({"quant_method": "awq", "bits": 4}, {}, {"int4-linear"}),
        ({"quant_method": "awq", "bits": 8}, {}, set()),
        (
            {"quant_method": "auto-round", "bits": 4},
            {"num_experts": 8},
            {"int4-linear", "int4-moe"},
        ),
        (grouped("pack-quantized", 4), {}, {"int4-linear"}),
        (grouped("pack-quantized", 8), {}, set()),
        (grouped("nvfp4-pack-quantized", 4), {}, {"nvfp4-linear"}),
        (grouped("float-quantized", 8), {}, {"fp8-linear"}),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
            {},
            {"fp8-linear", "nvfp4-linear"},
        ),
    ],
)
def test_kinds_of_layers(call: Call, quantised: Any, more: Any, kinds: set[str]) -> None:
    model = added(call, {**BASE, **more, "quantization_config": quantised})
    assert model.kinds() == kinds
    assert model.maximum_context.value == 4096
    assert model.config.value["model_type"] == "x"
    assert "scale" not in model.config.value
    assert Models.discover([Path("own")]).model("me/My_Model").name == "my-model"


def test_what_modelopt_says_beside_the_configuration(call: Call) -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    model = added(call, {**BASE, "num_experts": 2, "hidden_act": "silu"}, hf_quant_config=beside)
    assert model.kinds() == {"nvfp4-linear", "nvfp4-moe"}
    assert model.config.value["quantization_config"]["quant_algo"] == "NVFP4"
    assert (model.experts.value, model.kv_cache_dtype.value) == ("silu", "fp8")


def test_values_of_all_forms_come_back(call: Call) -> None:
    value = {
        "odd key.x": [1, 2.5, True, "a\"b\n\x7f"], "nested": {"a": {"b": [{"c": 1}]}},
        "many": [f"layers.{n}.x" for n in range(300)], "text": "ü\\u",
        "large": {f"layers.{n}": {"a.b": {"c": n}, "void": [1]} for n in range(30)}, "last": 1,
    }  # fmt: skip
    model = added(call, {**BASE, **value})
    assert {name: model.config.value[name] for name in value} == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"a":' * 30 + "1" + "}" * 30, "nested too deep"),
        ('{"model_type": "\\ud800"}', ""),
        (None, "No such file"),
    ],
)
def test_a_broken_configuration_is_refused(call: Call, text: str | None, why: str) -> None:
    Path("checkpoint").mkdir()
    if text is not None:
        Path("checkpoint/config.json").write_text(text)
    done = call("models", "add", "checkpoint", "--id", "me/mine")
    assert done.code == 2
    assert why in done.err
    assert not Path("models/mine.toml").exists()


def test_a_file_is_not_replaced(call: Call) -> None:
    added(call, BASE)
    words = ("models", "add", "checkpoint", "--id", "me/My_Model", "--models", "own")
    assert "exists" in call(*words).err
    assert 'value = "me/My_Model"' in call(*words, "--dry-run").out
    assert call("models", "add", "checkpoint", "--id", "no id").code == 2


def test_kinds_come_from_the_headers(call: Call) -> None:
    Path("checkpoint").mkdir()
    checkpoint(Path("checkpoint"), {"lm_head.weight": ("BF16", [2, 4])}, BASE)
    done = call("models", "add", "checkpoint", "--id", "me/mine", "--dry-run", "--json")
    model = done.json["model"]
    assert model["weight-bytes"] == {"value": 16, "source": "headers of the safetensors files"}
    assert [one["kind"] for one in model["holds"]] == ["unquantized"]
    assert not Path("models").exists()


def test_a_file_is_replaced_with_force(call: Call) -> None:
    added(call, BASE)
    words = ("models", "add", "checkpoint", "--id", "me/My_Model", "--models", "own")
    (file,) = Path("own").iterdir()
    file.write_text("# by hand")
    assert call(*words).code == 2
    assert file.read_text() == "# by hand"
    assert call(*words, "--force").code == 0
    assert read_model(file).id.value == "me/My_Model"


def test_a_folder_needs_an_id(call: Call) -> None:
    Path("checkpoint").mkdir()
    done = call("models", "add", "./checkpoint")
    assert done.code == 2
    assert "--id" in done.err


@pytest.mark.parametrize("why", ["", "HF_HUB_OFFLINE is set"])
def test_an_id_on_hugging_face(call: Call, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Its headers give the bytes of the weights; without them its configuration is used."""
    folder = Path("snapshot")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BASE, "quantization_config": NVFP4}))
    tensors = () if why else (("lm_head.weight", "BF16", 16),)
    read = HubCheckpoint(folder=folder.resolve(), tensors=tensors, without_headers=why)
    asked: list[object] = []

    def given(name: str, *, headers: bool) -> HubCheckpoint:
        asked.append((name, headers))
        return read

    monkeypatch.setattr(modelfile, "hub_checkpoint", given)
    done = call("models", "add", "me/Mine", "--models", "own")
    assert done.code == 0, done.err
    model = read_model(Path("own/mine.toml"))
    assert asked == [("me/Mine", True)]
    assert model.id.value == "me/Mine"
    assert why in done.err
    if why:
        assert model.weight_bytes is None
        assert model.kinds() == {"nvfp4-linear"}
    else:
        assert model.weight_bytes is not None
        assert model.weight_bytes.value == 16
