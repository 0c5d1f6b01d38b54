"""Fixtures: one client of the package index, and plans of real releases, made once per session.

These tests read released wheels, so they need the package index; what they read stays in
spark-build's own cache.  Without an index they fail: nothing here is skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.pypi import PackageIndex
from builder.layers.pinned import IndexSources

from .support import Planner

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> Iterator[None]:
    """Variables that a layer sets must come from the layer, and not from whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SPARK_BUILD_PATCHES", "SOURCE_DATE_EPOCH", "CUTE_DSL_ARCH"):
            patch.delenv(name, raising=False)
        patch.setenv("NO_COLOR", "1")
        yield


@pytest.fixture(scope="session")
def index() -> PackageIndex:
    """The package index, with the user's cache."""
    return PackageIndex()


@pytest.fixture(scope="session")
def sources(index: PackageIndex) -> IndexSources:
    """Pinned inputs of layers."""
    return IndexSources(index)


@pytest.fixture(scope="session")
def planned(index: PackageIndex, sources: IndexSources) -> Planner:
    """Plans by base and layers, each made once."""
    return Planner(index, sources)
