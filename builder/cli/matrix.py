"""``spark-build matrix``: layers x releases, from the released wheels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.version import Version

from builder.cli import options as opt
from builder.cli.show import print_json
from builder.console import console
from builder.errors import Exit, SparkBuildError
from builder.index import PackageIndex
from builder.planner import make_plan
from builder.runtime.spark_apply import AMBIGUOUS, DRIFT
from builder.wheels import IndexSources

if TYPE_CHECKING:
    from pathlib import Path

_OLDEST = Version("0.17.0")
_SHORT = {
    "needed": "needed",
    "applied": "applied",
    "upstream": "upstream",
    "not-applicable": "-",
    "needs-rebuild": "REBUILD",
    "drift": "DRIFT",
    "ambiguous": "AMBIGUOUS",
}


def matrix_command(
    *,
    layers: list[str],
    releases: str | None,
    platform: str | None,
    patches: list[Path] | None,
    refresh: bool,
    json: bool,
) -> None:
    """Print the table; exit 4 when a layer drifted anywhere."""
    _, selection = opt.select(layers, patches)
    index = PackageIndex(refresh=refresh)
    sources = IndexSources(index)
    named = [r.strip() for r in (releases or "").split(",") if r.strip()]
    wanted = named or [v for v in index.releases("vllm") if _wanted(Version(v))]
    rows: list[dict[str, Any]] = []
    for release in wanted:
        console.detail(f"vllm {release}")
        base = opt.identify_base(f"pypi:vllm=={release}", selection, index, platform=platform)
        plan = make_plan(base, selection, sources)
        states = {d.name: d.outcome.state for d in plan.decisions}
        reasons = {d.name: d.outcome.reason for d in plan.decisions}
        rows.append({"vllm": release, "states": states, "reasons": reasons})
    names = [str(layer["name"]) for layer in selection.layers]
    if json:
        print_json({"schema": 1, "layers": names, "rows": rows})
    else:
        _print_table(names, rows)
    drifted = [
        f"{name} on vllm {row['vllm']}: {row['reasons'][name]}"
        for row in rows
        for name in names
        if row["states"][name] in (DRIFT, AMBIGUOUS)
    ]
    if drifted:
        raise SparkBuildError("\n  ".join(drifted), Exit.DRIFT, hint="spark-build layers show NAME")


def _wanted(version: Version) -> bool:
    return version >= _OLDEST and not version.is_prerelease


def _print_table(names: list[str], rows: list[dict[str, Any]]) -> None:
    widths = [max(len(name), 9) for name in names]
    print("vllm      " + "  ".join(f"{n:<{w}}" for n, w in zip(names, widths, strict=True)))
    for row in rows:
        cells = [
            f"{_SHORT[row['states'][name]]:<{width}}"
            for name, width in zip(names, widths, strict=True)
        ]
        print(f"{row['vllm']:<10}" + "  ".join(cells))
