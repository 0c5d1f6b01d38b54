"""Start-up, and what a plan costs: ``python -m benchmarks.start_and_plan``.

Start-up of ``--help`` against ``python -c "import typer"``; a plan of a ``pypi:`` base cold (bytes
read, as a share of the wheels) and warm (seconds).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import report, run_once, side_by_side
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.common.wheels import RemoteWheel, WheelTree
from builder.images.bases.identify import identify
from builder.images.subject import BaseRequest
from builder.layers.catalog import Catalog
from builder.layers.planner import IndexSources, make_plan

COMMAND = str(Path(sys.executable).with_name("spark-build"))
RELEASES = ("0.20.1", "0.22.1", "0.33.0")


def start(rounds: int = 15) -> None:
    """``--help`` against the import of its one dependency."""
    samples = side_by_side(
        {
            'python -c "import typer"': lambda: run_once([sys.executable, "-c", "import typer"]),
            "spark-build --help": lambda: run_once([COMMAND, "--help"]),
        },
        rounds,
    )
    report("start-up (bound: 1.5)", samples)


def plan_bytes(release: str) -> None:
    """What a cold plan reads of the wheels that it plans for."""
    selection = Catalog.discover().select(["b12x-full"])
    index = PackageIndex()
    request = BaseRequest(ref=Ref(f"pypi:vllm=={release}"), pins=selection.pins(), index=index)
    base = identify(request)
    plan = make_plan(base, selection, IndexSources(index))
    read = index.bytes_read
    assert isinstance(base.tree, WheelTree)
    total = sum(wheel.size for wheel in base.tree.wheels)
    for decision in plan.decisions:
        for pin in decision.outcome.inputs:
            file = next(w for w in index.wheels(pin.distribution) if w.sha256 == pin.sha256)
            total += RemoteWheel(file, index).size
    print(
        f"  vllm {release}: read {read / 1e6:.2f} MB of {total / 1e6:.0f} MB of wheels: "
        f"{100 * read / total:.2f} % (bound: 2)"
    )


def warm_plan(release: str, rounds: int = 7) -> None:
    """A plan whose inputs are all in the cache (bound: 1 s)."""
    words = ["plan", "-l", "b12x-full", "-b", f"pypi:vllm=={release}", "--json"]
    samples = side_by_side(
        {
            'python -c "import typer"': lambda: run_once([sys.executable, "-c", "import typer"]),
            f"plan of {release}, warm": lambda: run_once([COMMAND, *words]),
        },
        rounds,
    )
    report("warm plan (bound: 1 s)", samples)


def main() -> None:
    """Run all three."""
    start()
    print("\ncold plan of b12x-full, bytes read")
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SPARK_BUILD_CACHE"] = folder
            plan_bytes(release)
            if release == RELEASES[0]:
                warm_plan(release)


if __name__ == "__main__":
    main()
