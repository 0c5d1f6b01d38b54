"""What ``outdated --ask`` learns from two releases, beside what is recorded of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from builder.pipeline.options import OutdatedOptions
from builder.serving.outdated import outdated

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_releases_that_are_asked_answer_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without records and with: the same kernels changed; and the recipe starts on the newer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    recipe = ROOT / "recipes" / "sparkrun" / "qwen3-30b-a3b.yaml"
    shutil.copy(recipe, tmp_path / "recipes")
    words = {"layers": ("marlin",), "since": "0.32.0", "no_forge": True}
    asked = outdated(
        OutdatedOptions(ask=True, evidence=tmp_path / "none", recipes=tmp_path / "recipes", **words)  # type: ignore[arg-type]
    )
    recorded = outdated(OutdatedOptions(evidence=ROOT / "docs" / "evidence", **words))  # type: ignore[arg-type]
    assert asked.kernels == recorded.kernels
    assert not [change for change in asked.kernels if not change.kind], "both were asked"
    assert (asked.linted, asked.recipes) == (1, ())
    assert asked.notes == recorded.notes
