"""Small checkpoints: safetensors files whose data is a hole in the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
DENSE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1000, "dtype": "bfloat16",
}  # fmt: skip


def safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]], **changed: Any) -> Path:
    """A file with these tensors; ``changed`` are entries of its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype]
        for one in shape:
            size *= one
        header[name] = {
            "dtype": dtype, "shape": shape, "data_offsets": [reached, reached + size]
        }  # fmt: skip
        reached += size
    for name, entry in changed.items():
        header[name] = header.get(name, {}) | entry
    return raw(path, json.dumps(header).encode(), reached)


def raw(path: Path, header: bytes, data: int = 0, length: int | None = None) -> Path:
    """A file with this header, and a hole of so many bytes as data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write((len(header) if length is None else length).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)
    return path


def checkpoint(
    folder: Path, tensors: Mapping[str, tuple[str, list[int]]], config: Mapping[str, Any] | None
) -> Path:
    """A folder with one file of tensors, and a config."""
    safetensors(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
