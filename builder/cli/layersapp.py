"""Options of ``spark-build layers``; the implementation is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples, running

layers_app = App(
    help="List, check and create layers.",
    cls=running("list"),
    epilog=examples("spark-build layers list", "spark-build layers show b12x-full"),
)


@layers_app.command("list", epilog=examples("spark-build layers list"))
def layers_list(patches: opt.Patches = None, json: opt.Json = False) -> None:
    """List profiles and layers, one line each."""
    from builder.cli.layers import list_command

    list_command(patches, json)


LayerName = Annotated[
    str,
    typer.Argument(
        help="Name of a layer or profile.", metavar="NAME", autocompletion=complete.layer
    ),
]


@layers_app.command(
    "show",
    epilog=examples("spark-build layers show b12x-full", "spark-build layers show b12x-env --json"),
)
def layers_show(
    name: LayerName,
    patches: opt.Patches = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Also look up the current state of its pull requests.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Show what a layer or profile does, and for which versions."""
    from builder.cli.layers import show_command

    show_command(name, patches, refresh, json)


@layers_app.command(
    "check",
    epilog=examples(
        "spark-build layers check", "spark-build layers check my-fix --patches my-layers"
    ),
)
def layers_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Layers (default: all).", metavar="NAME", autocompletion=complete.layer
        ),
    ] = None,
    patches: opt.Patches = None,
    json: opt.Json = False,
) -> None:
    """Check layer files; no network."""
    from builder.cli.layers import check_command

    check_command(names or [], patches, json)


@layers_app.command(
    "new",
    epilog=examples(
        "spark-build layers new my-fix --in my-layers",
        "spark-build layers new my-fix --from-pr vllm-project/vllm#40082",
        "spark-build layers new my-fix --from-patch fix.patch --in my-layers",
        "spark-build layers new qwen --from-series docker/patches/qwen3.8/vllm",
        "spark-build layers new my-mod --from-mod mods/my-mod",
    ),
)
def layers_new(
    name: Annotated[
        str, typer.Argument(help="Name of the new layer; also its folder.", metavar="NAME")
    ],
    directory: Annotated[Path, typer.Option("--in", help="Parent folder.", metavar="DIR")] = Path(),
    package: Annotated[
        str,
        typer.Option(
            help="The Python distribution that it changes (default: found in the paths, or vllm).",
            metavar="PACKAGE",
        ),
    ] = "",
    from_pr: Annotated[
        str | None,
        typer.Option(help="Create it from a pull request or commit, pinned.", metavar="PULL"),
    ] = None,
    from_patch: Annotated[
        list[Path] | None,
        typer.Option(help="Create it from a patch file; may be repeated.", metavar="FILE"),
    ] = None,
    from_series: Annotated[
        Path | None,
        typer.Option(
            help="Create a layer for each patch of a folder with a 'series' file.", metavar="DIR"
        ),
    ] = None,
    from_mod: Annotated[
        Path | None,
        typer.Option(help="Create it from a mod: a folder or zip with run.sh.", metavar="DIR"),
    ] = None,
    project: Annotated[
        str,
        typer.Option(
            help="The repository that a patch is for, or that a fork is a fork of.",
            metavar="OWNER/REPO",
        ),
    ] = "",
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave out files of a patch that match; may be repeated.", metavar="PATTERN"
        ),
    ] = None,
    forge_clone: opt.ForgeClone = None,
    json: opt.Json = False,
) -> None:
    """Create a layer: an example, or from an existing change."""
    from builder.cli.layers import convert_command, new_command
    from builder.layers.conversion.layers import Reading, Source

    source = Source(
        pull=from_pr or "", patches=tuple(from_patch or ()), series=from_series, mod=from_mod
    )
    if source.converts:
        reading = Reading(repository=project, package=package, exclude=tuple(exclude or ()))
        convert_command(name, directory, source, reading, json=json)
    else:
        new_command(name, directory, package or "vllm", from_pr, project, forge_clone, json=json)


@layers_app.command("pin", epilog=examples("spark-build layers pin my-fix --patches my-layers"))
def layers_pin(
    name: LayerName,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    forge_clone: opt.ForgeClone = None,
    json: opt.Json = False,
) -> None:
    """Write a layer's pins.toml with the sha256 of its inputs.

    Inputs are wheels, donor files and pull requests.
    """
    from builder.cli.layers import pin_command

    pin_command(name, patches, refresh, forge_clone, json=json)
