"""The generated model: a true safetensors file, a configuration, the same bytes every time."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.inimage import load

if TYPE_CHECKING:
    from pathlib import Path

tiny = load("tiny_model")

#: Bytes an element, by the format's names.
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny.write(tmp_path_factory.mktemp("model"), request.param)
    return folder


def tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Tensors of the file, read as the format says."""
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0, "tensors start on an 8-byte boundary"
    header.pop("__metadata__")
    body, at, found = data[8 + length :], 0, {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert start == at, f"{name}: a hole"
        count = 1
        for size in entry["shape"]:
            count *= size
        assert end - start == count * SIZES[entry["dtype"]], name
        found[name] = (entry["dtype"], entry["shape"], body[start:end])
        at = end
    assert at == len(body)
    return found


def test_it_is_a_small_valid_safetensors_file(model: Path) -> None:
    found = tensors(model)
    assert sum(len(data) for _, _, data in found.values()) < 10 * 2**20
    assert {dtype for dtype, _, _ in found.values()} == set(SIZES)


def test_each_quantised_matrix_has_its_scales(model: Path) -> None:
    found = tensors(model)
    for name, (dtype, shape, _) in found.items():
        if dtype != "U8":
            continue
        base = name.removesuffix(".weight")
        assert found[f"{base}.weight_scale"][1] == [shape[0], shape[1] * 2 // 16]
        assert found[f"{base}.weight_scale_2"][1] == found[f"{base}.input_scale"][1] == []
        assert all(size % 128 == 0 for size in (shape[0], shape[1] * 2)), name


def test_block_scales_are_few_and_positive(model: Path) -> None:
    for name, (dtype, _, data) in tensors(model).items():
        if dtype == "F8_E4M3":
            assert set(data) == set(tiny.BLOCK_SCALES), name


def test_token_0_has_logit_0_and_no_other_has(model: Path) -> None:
    _, (rows, columns), data = tensors(model)["lm_head.weight"]
    width = 2 * columns
    zero = [row for row in range(rows) if not any(data[row * width : (row + 1) * width])]
    assert zero == [0]


def test_the_configuration_matches_the_tensors(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    found = tensors(model)
    assert found["model.embed_tokens.weight"][1] == [config["vocab_size"], config["hidden_size"]]
    quantised = {name for name, (dtype, _, _) in found.items() if dtype == "U8"}
    for name in config["quantization_config"]["ignore"]:
        assert f"{name}.weight" in found
        assert f"{name}.weight" not in quantised
    experts = {name.split(".experts.")[1].split(".")[0] for name in found if ".experts." in name}
    assert len(experts) == config.get("num_experts", 0)
    words = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(config["vocab_size"]))


def test_the_same_bytes_for_the_same_seed_only(tmp_path: Path) -> None:
    made = [
        tiny.write(tmp_path / name, "dense", seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in made)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.5, 0xC020), (0.0, 0), (1.00390625, 0x3F80), (1.01171875, 0x3F82)],
)
def test_bfloat16_is_rounded_to_the_nearest_even(value: float, bits: int) -> None:
    assert tiny.bf16(value) == struct.pack("<H", bits)
