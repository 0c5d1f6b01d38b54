"""``spark-build plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.inputs import Inputs
from builder.cli.show import print_json, show_plan
from builder.console import console, megabytes
from builder.planner import refuse_nothing, refuse_plan

if TYPE_CHECKING:
    from pathlib import Path

    from builder.cli.options import PullOptions
    from builder.native.container import ToolkitChoice


def plan_command(
    *,
    layers: list[str] | None,
    pulls: PullOptions,
    base: str | None,
    platform: str | None,
    python: str | None,
    site_packages: str | None,
    patches: list[Path] | None,
    compile_here: bool,
    toolkit: ToolkitChoice | None,
    refresh: bool,
    json: bool,
) -> None:
    """Plan and print; a plan that could not be built is shown, then refused."""
    inputs = Inputs(
        layers, patches, pulls, refresh=refresh, compile_here=compile_here, toolkit=toolkit
    )
    ref = inputs.base_ref(base)
    identified = inputs.identify(ref, platform=platform, python=python, site_packages=site_packages)
    try:
        made = inputs.plan(identified)
    finally:
        identified.close()
    if json:
        print_json(made.as_json())
    else:
        with console.as_data():
            show_plan(made, elsewhere=inputs.elsewhere)
    console.detail(f"read {megabytes(inputs.index.bytes_read)} from the package index")
    refuse_nothing(made, inputs.selection)
    refuse_plan(made, inputs.rebuild_command("image", ref))
