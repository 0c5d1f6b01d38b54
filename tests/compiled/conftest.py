"""Commands run as in the unit tests; the caches of these are large, so they are on a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.conftest import isolated, spark_build

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["isolated", "spark_build"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test has its cache."""
    return tmp_path_factory.mktemp("folders")
