"""``spark-build plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, megabytes, print_json
from builder.layers.plan.planner import refuse_nothing, refuse_plan, refuse_unserved
from builder.pipeline.inputs import Inputs
from builder.pipeline.show import show_plan

if TYPE_CHECKING:
    from builder.pipeline.options import PlanOptions


def plan_command(options: PlanOptions, *, json: bool) -> None:
    """Plan and print; a plan that cannot be built is printed before the error."""
    inputs = Inputs(options)
    ref = inputs.base_ref()
    identified = inputs.identify(ref)
    try:
        made = inputs.plan(identified)
    finally:
        identified.close()
    if json:
        print_json(made.document)
    else:
        refuse_unserved(made, inputs.selection)
        with console.as_data():
            show_plan(made, elsewhere=inputs.elsewhere)
    console.detail(f"read {megabytes(inputs.index.bytes_read)} from the package index")
    refuse_nothing(made, inputs.selection)
    refuse_plan(made, inputs.rebuild_command("image", ref))
