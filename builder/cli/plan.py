"""``spark-build plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli import options as opt
from builder.cli.show import print_json, show_plan
from builder.console import console, megabytes
from builder.index import PackageIndex
from builder.planner import make_plan, refuse_nothing, refuse_plan
from builder.wheels import IndexSources

if TYPE_CHECKING:
    from pathlib import Path


def plan_command(
    *,
    layers: list[str],
    base: str | None,
    platform: str | None,
    python: str | None,
    site_packages: str | None,
    patches: list[Path] | None,
    refresh: bool,
    json: bool,
) -> None:
    """Plan and print; a plan that could not be built is shown, then refused."""
    _, selection = opt.select(layers, patches)
    index = PackageIndex(refresh=refresh)
    ref = base or opt.default_base(selection, "auto", pull=False)
    identified = opt.identify_base(
        ref,
        selection,
        index,
        platform=platform,
        python=python,
        site_packages=site_packages,
    )
    try:
        made = make_plan(identified, selection, IndexSources(index))
    finally:
        identified.close()
    if json:
        print_json(made.as_json())
    else:
        show_plan(made)
    console.detail(f"read {megabytes(index.bytes_read)} from the package index")
    refuse_nothing(made, selection)
    refuse_plan(made)
