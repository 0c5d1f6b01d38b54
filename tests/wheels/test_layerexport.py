"""The patches that are ready to be sent, on the released files of their projects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.layers.catalog import Catalog
from builder.pipeline.checking import before_of
from builder.pipeline.layerexport import change_of, made_on, reports

if TYPE_CHECKING:
    from builder.common.pypi import PackageIndex

ROOT = Path(__file__).resolve().parents[2]
CATALOG = Catalog.discover()


@pytest.mark.parametrize("name", reports(CATALOG))
def test_git_applies_it_to_the_released_files(
    name: str, index: PackageIndex, tmp_path: Path
) -> None:
    layer = CATALOG.layer(name)
    patch = ROOT / "docs" / "upstream" / name / "change.patch"
    # a release that is newer than the patch does not change it
    package, release = made_on(patch.read_text("utf-8"))
    change = change_of(layer, before_of(CATALOG, layer), index, release)
    assert package == layer.package
    assert patch.read_text("utf-8") == change.patch
    for path, (before, _) in change.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((before or "").encode())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    for path, (before, after) in change.files.items():
        assert (tmp_path / path).read_bytes() == (after or "").encode()
        assert before != after
