"""The flags that `memory` prints are ones that released vLLM have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.serving.memory import memory_estimate
from builder.serving.options import MemoryRequest
from tests.unit.serving.checkpoints import DENSE, checkpoint

from .test_serveflags import FULL

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("release", FULL)
def test_flags_are_those_of_the_release(tmp_path: Path, release: str) -> None:
    folder = checkpoint(tmp_path, {"model.layers.0.mlp.up_proj.weight": ("BF16", [8])}, DENSE)
    made = memory_estimate(
        MemoryRequest(subject=str(folder), release=release, kv_cache_dtype="fp8")
    )
    assert made.unknown == ()
    assert [word for word in made.flags if word.startswith("-")] == [
        "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs",
        "--kv-cache-memory-bytes", "--kv-cache-dtype",
    ]  # fmt: skip
