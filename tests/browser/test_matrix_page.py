"""The picture of releases as people see it: it fits, asks for nothing, and can be walked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.layers.catalog import Catalog
from builder.layers.decisions import Evidence
from builder.pipeline.matrix import Matrix, MatrixRow
from builder.pipeline.matrixpage import matrix_page

from .axe import violations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .chromium import Chromium, Page

    Show = Callable[..., Page]

LAYERS = ("flashinfer-b12x-store-wait", "vllm-b12x-reachable", "marlin-env")
MARKUP = "<script>document.title = 'hacked'</script>"
PLACE = Evidence(file="flashinfer/" + "deep/" * 30 + "x.py", found="old", anchor=MARKUP, line=7)


def row(number: int) -> MatrixRow:
    states = {
        LAYERS[0]: "needed" if number < 25 else "upstream",
        LAYERS[1]: "drift" if number == 24 else "not-applicable",
        LAYERS[2]: "needed",
    }
    return MatrixRow(
        vllm=f"0.{number}.0", release=f"0.{number}.0", served=True, uploaded="2026-05-04",
        states=states, reasons=dict.fromkeys(LAYERS, MARKUP),  # type: ignore[arg-type]
        packages={"vllm": f"0.{number}.0", "flashinfer-python": "0.6.9"},
        evidence={LAYERS[0]: (PLACE,)},
    )  # fmt: skip


@pytest.fixture
def show(browser: Chromium, tmp_path: Path) -> Iterator[Show]:
    document = Matrix(layers=LAYERS, rows=tuple(row(n) for n in range(17, 34)))
    file = tmp_path / "matrix.html"
    diffs = [("x.py", "@@ -1 +1 @@\n-" + "long " * 80 + "\n+new\n")]
    file.write_text(matrix_page([document], Catalog.discover(), lambda *_: diffs), "utf-8")
    opened: list[Page] = []

    def show(width: int = 1400, scheme: str = "light") -> Page:
        opened.append(browser.open(file, width=width, scheme=scheme))
        return opened[-1]

    yield show
    for page in opened:
        page.close()


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_it_fits_and_asks_for_nothing(show: Show, width: int) -> None:
    page = show(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate(f"location.hash = 'at:{LAYERS[0]}:0.25.0'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(page.requests) == 1
    assert page.complaints == []
    assert page.evaluate("document.title") == "What vLLM releases need on SM121"


def test_a_phone_shows_the_releases_of_each_state_in_words(show: Show) -> None:
    query = f"document.querySelector('a[href=\"#at:{LAYERS[0]}:0.17.0\"]').innerText"
    assert show(390).evaluate(query).split() == ["●", "needed", "0.17.0", "–", "0.24.0"]


SHOWN = """
[...document.querySelectorAll('#vllm tr[data-words]')].filter(e => e.offsetParent)
  .map(e => e.querySelector('th').innerText)
"""
TYPE = """
(() => {{
  const field = document.getElementById('{}');
  field.value = '{}';
  field.dispatchEvent(new Event('input'));
}})()
"""


def test_a_search_hides_rows_and_has_an_address(show: Show) -> None:
    page = show()
    assert set(LAYERS) <= set(page.evaluate(SHOWN))
    page.evaluate(TYPE.format("search", "store"))
    assert page.evaluate(SHOWN) == [LAYERS[0]]
    assert page.evaluate("location.hash") == "#?q=store"
    page.evaluate(TYPE.format("search", ""))
    page.evaluate(TYPE.format("profile", "marlin"))
    assert set(page.evaluate(SHOWN)) == {"marlin", "marlin-env"}


OPEN = """
[...document.querySelectorAll('.detail')].filter(e => getComputedStyle(e).display != 'none')
  .map(e => e.id)
"""
PRESS = """
document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}})); 0
"""


def test_a_cell_opens_its_evidence_and_escape_closes_it(show: Show) -> None:
    page = show()
    assert page.evaluate(OPEN) == []
    page.evaluate(f"document.querySelector('a[href=\"#at:{LAYERS[0]}:0.25.0\"]').click()")
    assert page.evaluate(OPEN) == [f"at:{LAYERS[0]}:0.25.0"]
    page.evaluate(PRESS.format("Escape"))
    assert page.evaluate(OPEN) == []
    assert page.evaluate("document.activeElement.hash") == f"#at:{LAYERS[0]}:0.25.0"


def test_the_address_of_one_release_opens_its_run(show: Show) -> None:
    page = show()
    page.evaluate(f"location.hash = '{LAYERS[0]}:0.22.0'")
    assert page.evaluate(OPEN) == [f"at:{LAYERS[0]}:0.17.0"]


def test_arrow_keys_walk_over_cells(show: Show) -> None:
    page = show()
    page.evaluate(f"document.querySelector('a[href=\"#at:{LAYERS[0]}:0.17.0\"]').focus()")
    page.evaluate(PRESS.format("ArrowRight"))
    assert page.evaluate("document.activeElement.hash") == f"#at:{LAYERS[0]}:0.25.0"
    page.evaluate(PRESS.format("ArrowDown"))
    assert page.evaluate("document.activeElement.hash") != f"#at:{LAYERS[0]}:0.25.0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_nothing(show: Show, width: int, scheme: str) -> None:
    page = show(width, scheme)
    assert violations(page) == []
    page.evaluate(f"location.hash = '{LAYERS[0]}:0.25.0'")
    assert page.evaluate(OPEN) == [f"at:{LAYERS[0]}:0.25.0"]
    assert violations(page) == []


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (
            (
                "(f => { f.placeholder = ''; f.closest('label').replaceWith(f) })"
                "(document.getElementById('search'))"
            ),
            "label",
        ),
        ("document.querySelector('td.needed a').style.color = '#9bd'", "color-contrast"),
    ],
)
def test_axe_sees_a_page_that_was_spoilt(show: Show, spoil: str, rule: str) -> None:
    page = show()
    page.evaluate(f"{spoil}; 0")
    assert any(line.startswith(f"{rule}: ") for line in violations(page))
