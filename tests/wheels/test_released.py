"""The pinned RECORDs of released wheels are those of the index."""

from __future__ import annotations

import pytest

from builder.common.paths import package_file
from builder.common.pypi import PackageIndex
from builder.common.reference import NEWEST_VLLM
from tests.released import rows


@pytest.mark.parametrize("release", ["0.17.0", "0.20.1", NEWEST_VLLM])
def test_records_are_pinned(release: str) -> None:
    """Otherwise: python -m tests.released."""
    pinned = package_file("data", "records.txt").read_text("ascii").splitlines()
    found = list(rows(PackageIndex(), release))
    assert len(found) > 4
    assert set(found) <= set(pinned)
