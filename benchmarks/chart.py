"""The plot of the registry benchmark: ``python -m benchmarks.chart docs/registry_push.json``.

One row a way, one panel a cost, as an SVG that fits a phone and follows the reader's light or dark
setting.  It is made of the medians alone, so the same numbers give the same file.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from benchmarks.meter import median

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchmarks.ways import Way

#: Key of the medians, and heading.
_PANELS = (("seconds", "Seconds"), ("received", "Got from the registry"), ("memory", "Memory"))
#: Units of bytes, the largest first.
_UNITS = ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
_WIDTH, _LEFT, _TRACK = 400, 8, 240
_HEAD, _ROW, _FOOT = 34, 42, 30
_STYLE = """
.paper { fill: #ffffff }
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
text { fill: #1b1f24; font-variant-numeric: tabular-nums }
.h { font-size: 17px; font-weight: 700 }
.soft { fill: #57606a }
.grid { stroke: #d0d7de }
.line { stroke: #57606a; stroke-width: 2 }
.dot { fill: #57606a }
.own { font-weight: 700 }
line.own { stroke: #0a5cb8; stroke-width: 3 }
circle.own { fill: #0a5cb8 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117 }
  text { fill: #e6edf3 }
  .soft, .dot { fill: #9da7b1 }
  .grid { stroke: #3d444d }
  .line { stroke: #9da7b1 }
  line.own { stroke: #6cb0ff }
  circle.own { fill: #6cb0ff }
}
"""


def medians(ways: Sequence[Way], real: Mapping[int, int]) -> dict[str, Any]:
    """What is drawn, and kept beside the plot: sizes of the bases, and medians of each way."""
    return {
        "bases": list(real.values()),
        "ways": [
            {
                "name": way.name,
                **{key: [median(runs, key) for runs in way.runs.values()] for key, _ in _PANELS},
            }
            for way in ways
            if way.runs
        ],
    }


def draw(numbers: Mapping[str, Any]) -> str:
    """The plot of a push as SVG."""
    sizes = ", ".join(f"{size / 1e9:.1f}" for size in numbers["bases"])
    note = f"Small to large dot: a base of {sizes} GB. Logarithmic scales."
    return plot(numbers["ways"], _PANELS, note, "What a push costs: seconds, bytes and memory")


def plot(
    ways: Sequence[Mapping[str, Any]], panels: Iterable[tuple[str, str]], note: str, title: str
) -> str:
    """A panel for each key of the ways, with its heading, as SVG; ``note`` has two sentences."""
    parts: list[str] = []
    top = 0.0
    for key, heading in panels:
        parts += _panel(ways, key, heading, top)
        top += _HEAD + _ROW * len(ways) + _FOOT
    parts += _words(note, _LEFT, top + 4)
    lines = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top + 30:.0f}" '
        f'viewBox="0 0 {_WIDTH} {top + 30:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<style>{_STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f"{lines}\n</svg>\n"
    )


def _words(note: str, left: float, top: float) -> Iterator[str]:
    """A note in two lines."""
    first, _, second = note.partition(". ")
    for number, line in enumerate((f"{first}.", second)):
        yield f'<text class="soft" x="{left}" y="{top + 18 * number:.0f}">{escape(line)}</text>'


def _panel(ways: Sequence[Mapping[str, Any]], key: str, heading: str, top: float) -> Iterator[str]:
    """One cost of every way."""
    every = [value for way in ways for value in way[key]]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))

    def at(value: float) -> float:
        return _LEFT + 6 + (math.log10(value) - low) / max(1, high - low) * (_TRACK - 12)

    first, last = top + _HEAD, top + _HEAD + _ROW * len(ways)
    yield f'<text class="h" x="{_LEFT}" y="{top + 18:.0f}">{escape(heading)}</text>'
    step = 1 if high - low <= 4 else 2
    for power in range(low, high + 1, step):
        x = at(10.0**power)
        anchor, place = ("start", _LEFT) if power == low else ("middle", x)
        yield f'<line class="grid" x1="{x:.1f}" y1="{first:.0f}" x2="{x:.1f}" y2="{last:.0f}"/>'
        yield (
            f'<text class="soft" text-anchor="{anchor}" x="{place:.1f}" y="{last + 14:.0f}">'
            f"{_axis(key, 10.0**power)}</text>"
        )
    for number, way in enumerate(ways):
        values = way[key]
        own = " own" if way["name"].startswith("spark-build") else ""
        y = first + _ROW * number
        name = escape(way["name"])
        yield f'<text class="name{own}" x="{_LEFT}" y="{y + 14:.0f}">{name}</text>'
        y += 29
        yield (
            f'<line class="line{own}" x1="{at(min(values)):.1f}" y1="{y:.0f}" '
            f'x2="{at(max(values)):.1f}" y2="{y:.0f}"/>'
        )
        for radius, value in enumerate(values, 3):
            yield f'<circle class="dot{own}" cx="{at(value):.1f}" cy="{y:.0f}" r="{radius}"/>'
        shown = _shown(key, values)
        yield (
            f'<text class="value{own}" text-anchor="end" x="{_WIDTH - _LEFT}" y="{y + 5:.0f}">'
            f"{shown}</text>"
        )


def _unit(key: str, value: float) -> tuple[float, str]:
    """The unit that a value is written in; seconds are seconds."""
    if key in ("seconds", "cpu"):
        return 1.0, ""
    return next(((unit, name) for unit, name in _UNITS if value >= unit), (1.0, " B"))


def _axis(key: str, value: float) -> str:
    unit, name = _unit(key, value)
    return f"{value / unit:g}{name}"


def _shown(key: str, values: Sequence[float]) -> str:
    """Values in the unit of the largest, in two digits at least: ``0.50 / 1.0 / 2.2 GB``."""
    unit, name = _unit(key, max(values))
    numbers = [value / unit for value in values]
    return " / ".join(f"{n:.0f}" if n >= 10 else f"{n:#.2g}" for n in numbers) + name


if __name__ == "__main__":
    given = Path(sys.argv[1])
    given.with_suffix(".svg").write_text(draw(json.loads(given.read_text("utf-8"))), "utf-8")
