"""Every test has a cache of its own and sees none of the developer's settings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from .fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the developer's variables and caches out."""
    for name in list(os.environ):
        if name.startswith(("SPARK_BUILD_", "VLLM_", "PIP_", "UV_")) or name == "DOCKER_HOST":
            monkeypatch.delenv(name)
    for name in ("SOURCE_DATE_EPOCH", "CLICOLOR_FORCE", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A real site-packages directory with a small vLLM in it."""
    return write_tree(tmp_path / "site-packages", vllm_files())
