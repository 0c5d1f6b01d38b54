"""A bench as an SVG: one bar for each number of requests at once, beside those of another bench."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.benchdocument import Bench

_WIDTH, _LEFT, _TRACK, _HEAD, _ROW = 400, 90, 230, 62, 26
_STYLE = """
.paper { fill: #ffffff }
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.h { font-size: 16px; font-weight: 700 }
.own { fill: #0a5cb8 }
.other { fill: #9da7b1 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 }
  text { fill: #e6edf3 }
  .own { fill: #6cb0ff }
}
"""


def plot(made: Bench, other: Bench | None = None) -> str:
    """Tokens a second at each load; the same numbers give the same file."""
    theirs = {row.concurrency: row.tokens_per_second for row in other.rows} if other else {}
    most = max([*theirs.values(), *(row.tokens_per_second for row in made.rows), 1e-9])
    bars: list[str] = []
    top = float(_HEAD)
    for row in made.rows:
        bars.append(f'<text x="8" y="{top + 15:.0f}">{row.concurrency} at once</text>')
        for kind, value in (("own", row.tokens_per_second), ("other", theirs.get(row.concurrency))):
            if value is not None:
                bars += _bar(kind, value, value / most, top)
                top += _ROW
        top += 6
    release = f"vLLM {made.vllm}" if made.vllm else ""
    below = ", ".join(part for part in (release, *made.names()) if part)
    title = escape(f"{made.model}: tokens/s")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top:.0f}" '
        f'viewBox="0 0 {_WIDTH} {top:.0f}" role="img">\n<title>{title}</title>\n'
        f'<style>{_STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="h" x="8" y="22">{title}</text>\n'
        f'<text x="8" y="44">{escape(below)}</text>\n' + "\n".join(bars) + "\n</svg>\n"
    )


def _bar(kind: str, value: float, share: float, top: float) -> Iterator[str]:
    width = share * _TRACK
    yield (
        f'<rect class="{kind}" x="{_LEFT}" y="{top:.0f}" width="{width:.1f}" height="{_ROW - 6}"/>'
    )
    yield f'<text x="{_LEFT + width + 6:.1f}" y="{top + 15:.0f}">{value:.1f}</text>'
