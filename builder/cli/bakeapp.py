"""Options of ``bake``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import options as opt
from builder.cli.commands import BUILD
from builder.cli.help import App, examples

bake_app = App()


@bake_app.command(
    rich_help_panel=BUILD,
    epilog=examples(
        "spark-build bake -l b12x-full -b docker://vllm/vllm-openai:v0.33.0 -o out",
        "spark-build bake --images images.json --tag-prefix HOST/me/vllm -o out",
        "spark-build bake --images images.json --matrix",
        "spark-build bake --images images.json --target marlin-vllm-v1 -o out",
    ),
)
def bake(
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            "-l",
            help="A profile, or layers with commas; each of these is one image a base.",
            autocompletion=complete.layers,
            metavar="L[,L...]",
        ),
    ] = None,
    base: Annotated[
        list[str] | None,
        typer.Option(
            "--base",
            "-b",
            help="An image in a registry; may be repeated.",
            metavar="[docker://]IMAGE",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="JSON with the lists profiles and bases; -l or -b replace one of them.",
            metavar="FILE",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this image of the list; may be repeated (default: all).", metavar="TARGET"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A new folder for docker-bake.json and a context for each image.",
            metavar="DIR",
        ),
    ] = None,
    tag_prefix: Annotated[
        str,
        typer.Option(
            help="Repository of the images; the tags are RELEASE-PROFILE, and PROFILE for the "
            "last base.",
            metavar="[HOST/]NAME",
        ),
    ] = "spark-build",
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix", help="Only print the list of images, for a matrix of GitHub Actions."
        ),
    ] = False,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Write a build folder for docker buildx bake."""
    from builder.cli.bake import bake_command
    from builder.pipeline.bake import BakeOptions
    from builder.pipeline.options import PlanOptions

    plan = replace(
        PlanOptions.selecting(None, None, None, patches),
        platform=platform,
        locked=locked,
        refresh=refresh,
    )
    options = BakeOptions(
        plan=plan,
        layers=tuple(layers or ()),
        bases=tuple(base or ()),
        images=images,
        targets=tuple(target or ()),
        tag_prefix=tag_prefix,
    )
    bake_command(options, output, matrix=matrix, as_json=json)
