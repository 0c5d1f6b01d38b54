"""The patches that are ready to be sent, on the released files of their projects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.layers.catalog import Catalog
from builder.pipeline.checking import before_of
from builder.pipeline.layerexport import Change, change_of, reports

if TYPE_CHECKING:
    from builder.common.pypi import PackageIndex

ROOT = Path(__file__).resolve().parents[2]
CATALOG = Catalog.discover()


def change(name: str, index: PackageIndex) -> Change:
    layer = CATALOG.layer(name)
    return change_of(layer, before_of(CATALOG, layer), index)


@pytest.mark.parametrize("name", reports(CATALOG))
def test_git_applies_it_to_the_released_files(
    name: str, index: PackageIndex, tmp_path: Path
) -> None:
    made = change(name, index)
    patch = ROOT / "docs" / "upstream" / name / "change.patch"
    assert patch.read_text("utf-8") == made.patch
    for path, (before, _) in made.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((before or "").encode())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    for path, (before, after) in made.files.items():
        assert (tmp_path / path).read_bytes() == (after or "").encode()
        assert before != after
