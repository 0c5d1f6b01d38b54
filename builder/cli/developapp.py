"""Options of ``matrix``, ``mods``, ``schema`` and ``config``."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import typed as opt
from builder.cli.command import App, examples
from builder.cli.commands import INSPECT

develop_app = App()
mods_app = App(
    help="Export mods for sparkrun and spark-vllm-docker.",
    epilog=examples("spark-build mods export"),
)


@develop_app.command(
    rich_help_panel=INSPECT,
    epilog=examples(
        "spark-build matrix -l b12x-full --releases 0.20.1,0.22.1,0.33.0",
        "spark-build matrix -l b12x-full --dispatch --json",
    ),
)
def matrix(
    layers: opt.Layers,
    releases: opt.Releases = None,
    dispatch: Annotated[
        bool,
        typer.Option("--dispatch", help="Also record which kernels each release selects on SM121."),
    ] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="Also try every backend that a release offers.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option(help="Keep each release's evidence in this directory.", metavar="DIR"),
    ] = None,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """Show the state of every layer on every vLLM release."""
    from builder.cli.matrix import matrix_command

    matrix_command(
        layers=layers,
        releases=releases,
        platform=platform,
        patches=patches,
        refresh=refresh,
        dispatch=dispatch,
        choices=choices,
        evidence=evidence,
        json=json,
    )


@mods_app.command(
    "export",
    epilog=examples(
        "spark-build mods export",
        "spark-build mods export --check",
        "spark-build mods export my-mod --layers b12x-full,my-fix --in mods",
        "spark-build mods export my-mod -l b12x-full --vendor 0.22.1 --in out",
    ),
)
def mods_export(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Mods (default: one for each profile).", metavar="MOD"),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--in",
            help="Output directory (default: mods/ of the checkout, or the current directory).",
            metavar="DIR",
        ),
    ] = None,
    layers: opt.OptionalLayers = None,
    with_pr: opt.WithPr = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    vendor: Annotated[
        str | None,
        typer.Option(
            help="Put in what these vLLM releases need on arm64, to start without network.",
            metavar="VERSION[,...]",
        ),
    ] = None,
    zipped: Annotated[
        bool, typer.Option("--zip", help="Write NAME.zip, for spark-vllm-docker.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check whether they are up to date (exit 9 if not)."),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Write self-contained mods/NAME/run.sh from the layers."""
    from builder.cli.mods import export_command

    export_command(
        names or [],
        directory,
        layers,
        with_pr or (),
        forge_clone or (),
        patches,
        vendor=vendor,
        zipped=zipped,
        check=check,
        json=json,
    )
