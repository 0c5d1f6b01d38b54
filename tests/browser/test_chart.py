"""The plot of what a push costs, on a phone: it fits, and can be read in light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.chart import draw

if TYPE_CHECKING:
    from .chromium import Chromium

DOCS = Path(__file__).parents[2] / "docs"
CHART = DOCS / "registry_push.svg"
#: Of every text: left, right, height of its letters on the screen, its colour, and the paper's.
TEXTS = """
Array.from(document.querySelectorAll('text')).map(e => {
  const box = e.getBoundingClientRect(), scale = e.getScreenCTM().a;
  const paper = getComputedStyle(document.querySelector('.paper')).fill;
  const style = getComputedStyle(e);
  return [box.left, box.right, parseFloat(style.fontSize) * scale, style.fill, paper];
})
"""


def luminance(colour: str) -> float:
    """As WCAG 2 has it."""
    parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_plot_matches_the_numbers() -> None:
    numbers = json.loads((DOCS / "registry_push.json").read_text("utf-8"))
    assert draw(numbers) == CHART.read_text("utf-8")
    changed = json.loads(json.dumps(numbers))
    changed["ways"][0]["seconds"][0] *= 2
    assert draw(changed) != draw(numbers)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plot_fits_a_phone_and_is_legible(browser: Chromium, tmp_path: Path, scheme: str) -> None:
    page = tmp_path / "chart.html"
    head = '<!doctype html><meta name="viewport" content="width=device-width">'
    drawn = CHART.read_text("utf-8").replace("<svg ", '<svg style="max-width: 100%" ', 1)
    page.write_text(f"{head}<body style='margin: 16px'>{drawn}", "utf-8")
    shown = browser.open(page, width=390, scheme=scheme)
    texts = shown.evaluate(TEXTS)
    shown.close()
    assert len(texts) > 60
    for left, right, height, colour, paper in texts:
        assert 0 <= left < right <= 390
        assert height >= 12
        light = [luminance(colour) + 0.05, luminance(paper) + 0.05]
        assert max(light) / min(light) >= 4.5
    assert (luminance(texts[0][4]) < 0.1) is (scheme == "dark")
