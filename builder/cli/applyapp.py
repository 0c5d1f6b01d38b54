"""Options of ``apply`` and ``revert``; the implementation is imported when they run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from builder.cli import typed as opt
from builder.cli.command import App, examples
from builder.cli.commands import BUILD

apply_app = App()

DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would change, without writing anything.")
]
Directory = Annotated[
    Path, typer.Argument(help="site-packages, or a virtual environment.", metavar="DIR")
]


@apply_app.command(
    rich_help_panel=BUILD,
    epilog=examples(
        "spark-build apply ~/vllm-env --layers b12x-full --dry-run",
        "spark-build apply ~/vllm-env --layers b12x-full",
    ),
)
def apply(
    directory: Directory,
    layers: opt.LayersOrPulls = None,
    with_pr: opt.WithPr = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    compile_here: opt.Compile = False,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Apply layers to an installed environment.

    A layer is applied completely or not at all.
    """
    from builder.cli.apply import apply_command
    from builder.pipeline.options import PlanOptions

    options = replace(
        PlanOptions.selecting(layers, with_pr, forge_clone, patches),
        locked=locked,
        compile_here=compile_here,
        toolkit=toolkit,
        builder=builder or "",
    )
    apply_command(directory, options, dry_run=dry_run, json=json)


@apply_app.command(
    rich_help_panel=BUILD,
    epilog=examples(
        "spark-build revert ~/vllm-env",
        "spark-build revert ~/vllm-env --layers vllm-b12x-backend --dry-run",
    ),
)
def revert(
    directory: Directory,
    layers: opt.OptionalLayers = None,
    patches: opt.Patches = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Restore the original files even if they were edited later."),
    ] = False,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Remove layers, and restore the original files.

    Removes all layers unless some are named.
    """
    from builder.cli.apply import revert_command

    revert_command(
        directory=directory,
        layers=layers,
        patches=patches,
        force=force,
        dry_run=dry_run,
        json=json,
    )
