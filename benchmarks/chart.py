"""The plot of the registry benchmark: seconds, bytes and memory over the size of the base."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from benchmarks.meter import median

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.ways import Way

_PANELS = (
    ("seconds", "seconds", 1.0),
    ("received", "got from the registry, MB", 1e6),
    ("memory", "memory, MB", 1e6),
)


def draw(ways: Sequence[Way], real: Mapping[int, int], path: Path) -> bool:
    """Write ``PATH.svg`` and ``PATH.png``; whether matplotlib is there to do it."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    matplotlib.rcParams["svg.hashsalt"] = "spark-build"  # the same file for the same numbers
    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(13, 5))
    shown = [way for way in ways if way.runs]
    for axes, (key, label, unit) in zip(panels, _PANELS, strict=True):
        for number, way in enumerate(shown):
            points = [
                (real[size] / 1e9, median(runs, key) / unit) for size, runs in way.runs.items()
            ]
            own = "spark-build" in way.name
            axes.plot(
                *zip(*points, strict=True),
                marker="os^vD*PX<>"[number % 10],
                linewidth=2.5 if own else 1.2,
                color=f"C{number}",
                label=way.name,
            )
        axes.set(xlabel="base, GB compressed", ylabel=label, yscale="log")
        axes.set_xlim(left=0)
        axes.grid(visible=True, which="major", alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize="small", frameon=False)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    for kind in ("svg", "png"):
        figure.savefig(
            path.with_suffix(f".{kind}"),
            dpi=110,
            metadata={"Date": None} if kind == "svg" else None,
        )
    pyplot.close(figure)
    return True
