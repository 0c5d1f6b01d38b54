"""Headers of a checkpoint's files: known only if each file is there and whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from builder.proof.weightheaders import weight_headers
from builder.proof.wholemodel import configuration_alone
from tests.unit.serving.checkpoints import raw, safetensors

if TYPE_CHECKING:
    from pathlib import Path

ONE = {"norm.weight": ("BF16", [8])}


def index(folder: Path, *files: str) -> None:
    named = {f"{number}.weight": name for number, name in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def test_headers_are_read_and_weights_are_not(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        safetensors(tmp_path / name, ONE)
    index(tmp_path, "a.safetensors")
    known = weight_headers(tmp_path)
    assert (known.unknown, sorted(known.files)) == ("", ["a.safetensors", "b.safetensors"])
    text = known.files["a.safetensors"]
    assert int.from_bytes(text[:8], "little") == len(text) - 8
    assert json.loads(text[8:])["norm.weight"]["shape"] == [8]


def test_the_release_sees_the_headers_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "modeling_own.py").write_text("raise SystemExit")
    safetensors(tmp_path / "model.safetensors", {"w.weight": ("BF16", [1 << 20])})
    alone = configuration_alone(tmp_path, weight_headers(tmp_path))
    assert sorted(file.name for file in alone.iterdir()) == ["config.json", "model.safetensors"]
    assert (alone / "model.safetensors").stat().st_size < 1000


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "no safetensors files are beside config.json"),
        ({"a.safetensors": b"1234"}, "a.safetensors is truncated, or is no safetensors file"),
        ({"a.safetensors": b"\xff" * 20}, "a.safetensors is truncated, or is no safetensors file"),
        ({"a.safetensors": None}, "a.safetensors cannot be read: "),
    ],
)
def test_why_headers_are_not_known(
    tmp_path: Path, files: dict[str, bytes | None], why: str
) -> None:
    for name, text in files.items():
        if text is None:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(text)
    known = weight_headers(tmp_path)
    assert known.unknown.startswith(why)
    assert not known.files


def test_a_download_that_is_not_whole(tmp_path: Path) -> None:
    raw(tmp_path / "a.safetensors", b"{}")
    index(tmp_path, "a.safetensors", "b.safetensors", "c.safetensors")
    known = weight_headers(tmp_path)
    assert known.unknown == "2 of 3 files are not there, 'b.safetensors' first"
    assert not known.files


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    raw(tmp_path / "a.safetensors", b"{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert weight_headers(tmp_path).unknown.startswith("model.safetensors.index.json cannot be")
