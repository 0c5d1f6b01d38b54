"""Headers of safetensors files: what they hold, and those that are not as the format has it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.serving.checkpoint import (
    INDEX,
    checkpoint_tensors,
    group_of,
    read_config,
    read_header,
)

from .checkpoints import raw, safetensors

if TYPE_CHECKING:
    from pathlib import Path

TWO: dict[str, tuple[str, list[int]]] = {"a": ("BF16", [2, 4]), "b": ("U8", [3])}


def test_a_header_gives_dtype_and_bytes_of_each_tensor(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", TWO)
    assert read_header(path) == [("a", "BF16", 16), ("b", "U8", 3)]


def test_a_dtype_of_a_newer_format_is_counted_by_its_offsets(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", TWO, b={"dtype": "F2_NEW"})
    assert read_header(path)[1] == ("b", "F2_NEW", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"data_offsets": [-1, 16]}}, "tensor 'a': Expected `int` >= 0"),
        ({"a": {"data_offsets": [0, -16]}}, "tensor 'a': Expected `int` >= 0"),
        ({"a": {"data_offsets": [0]}}, "tensor 'a': Expected `array` of length 2"),
        ({"b": {"data_offsets": [19, 16]}}, "has data_offsets [19, 16]"),
        ({"b": {"data_offsets": [17, 19]}}, "[17, 19], and the data before it ends at 16"),
        ({"b": {"data_offsets": [15, 18]}}, "[15, 18], and the data before it ends at 16"),
        ({"b": {"shape": [4]}}, "'b' has 3 bytes; U8 of shape [4] has another size"),
        ({"b": {"shape": [1] * 17}}, "has another size"),
        ({"b": {"shape": [-3]}}, "tensor 'b': Expected `int` >= 0"),
        ({"b": {"shape": [4], "data_offsets": [16, 20]}}, "is truncated: its tensors have 20"),
        ({"b": {"shape": [2], "data_offsets": [16, 18]}}, "1 bytes after the last tensor"),
        ({"b": {"dtype": "\x1b[2J"}}, "tensor 'b': Expected `str` matching regex"),
        ({"b": {"dtype": 3}}, "tensor 'b': Expected `str`, got `int`"),
    ],
)
def test_a_hostile_tensor_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = safetensors(tmp_path / "x.safetensors", TWO, **change)
    with pytest.raises(UsageError) as failure:
        read_header(path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"{}", 2**63, "would have 9223372036854775808 bytes, and the format allows 100000000"),
        (b"{}", 100_000_001, "the format allows 100000000"),
        (b"{}", 3, "is truncated: the header has 3 bytes, the file 10"),
        (b'{"layers.%s.x": {}}' % (b"9" * 5000), None, "name of 5009 characters"),
        (b"{", None, "bad header: it is not valid JSON"),
        (b"[]", None, "bad header: Expected `object`, got `array`"),
        (b'{"a": 1}', None, "bad header of tensor 'a'"),
        (b'{"\xff": {}}', None, "bad header"),
        (b'{"a": ' + b"[" * 100_000, None, "bad header"),
        (b'{"a": {"dtype": "U8", "shape": [1' + b"0" * 400 + b"]}}", None, "tensor 'a'"),
    ],
)
def test_a_hostile_header_is_refused(
    tmp_path: Path, header: bytes, length: int | None, message: str
) -> None:
    path = raw(tmp_path / "x.safetensors", header, length=length)
    with pytest.raises(UsageError) as failure:
        read_header(path)
    assert message in str(failure.value)


def test_a_tensors_name_is_a_line_of_text(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"x\n::error::y": ("U8", [1])})
    with pytest.raises(UsageError, match="not printable"):
        read_header(path)


def test_what_is_no_file_of_that_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\1\0")
    (tmp_path / "b.safetensors").mkdir()
    (tmp_path / "c.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name, message in (
        ("a", "is truncated: 2 bytes"), ("b", "is not a file"), ("c", "is not a safetensors file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            read_header(tmp_path / f"{name}.safetensors")


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    safetensors(tmp_path / "m-1.safetensors", {"a": TWO["a"]})
    safetensors(tmp_path / "consolidated.safetensors", TWO)
    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors"}}))
    assert [tensor.name for tensor in checkpoint_tensors(tmp_path)] == ["a"]
    index.unlink()
    with pytest.raises(UsageError, match="tensor 'a' is in another file too"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "m-1.safetensors"}}', "lacks 1 of 1 files of"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names no file of this folder"),
        ('{"weight_map": {}}', "names no file of this folder"),
        ('{"weight_map": 1}', "cannot be read"),
        ("{", "cannot be read"),
        (None, "contains no *.safetensors"),
    ],
)
def test_a_folder_that_is_not_whole(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / INDEX).write_text(text)
    with pytest.raises(UsageError) as failure:
        checkpoint_tensors(tmp_path)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("backbone.embeddings.weight", "embedding"),
        ("lm_head.weight", "output head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("backbone.layers.1.mixer.o_proj.weight", "attention"),
        ("backbone.layers.1.mixer.in_proj.weight", "Mamba and linear attention"),
        ("model.layers.0.linear_attn.out_proj.weight", "Mamba and linear attention"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "routed experts"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "routed experts"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "shared experts"),
        ("backbone.layers.1.mixer.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "feed-forward"),
        ("backbone.layers.1.mixer.up_proj.weight", "feed-forward"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.layers.4.self_attn.q_proj.weight", "draft layers"),
        ("mtp.layers.0.self_attn.q_proj.weight", "draft layers"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision and audio"),
        ("vision_tower.encoder.layers.9.self_attn.q_proj.weight", "vision and audio"),
        ("strange.weight", "other"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert group_of(name, 4) == group


def test_a_config_may_have_an_infinite_number(tmp_path: Path) -> None:
    """Nemotron's ``time_step_limit`` has: Transformers reads it with Python's parser."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "limit": [0.0, Infinity]}')
    config = read_config(tmp_path)
    assert config is not None
    assert config.text.num_hidden_layers == 2
