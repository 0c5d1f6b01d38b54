"""The options of ``spark-build layers``; what its commands do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import options as opt  # noqa: TC001 - typer reads annotations when it runs

layers_app = typer.Typer(help="Look at layers, check them, start a new one.", no_args_is_help=True)


@layers_app.command("list")
def layers_list(patches: opt.Patches = None, json: opt.Json = False) -> None:
    """Profiles and layers, a line each."""
    from builder.cli.layers import list_command

    list_command(patches, json)


LayerName = Annotated[str, typer.Argument(help="Name of a layer or profile.")]


@layers_app.command("show")
def layers_show(
    name: LayerName,
    patches: opt.Patches = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the forge what its pull requests are today.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """What a layer does, for which versions, and where it came from."""
    from builder.cli.layers import show_command

    show_command(name, patches, refresh, json)


@layers_app.command("check")
def layers_check(
    names: Annotated[list[str] | None, typer.Argument(help="Layers (default: all).")] = None,
    patches: opt.Patches = None,
    json: opt.Json = False,
) -> None:
    """Check layer files; no network."""
    from builder.cli.layers import check_command

    check_command(names or [], patches, json)


@layers_app.command("new")
def layers_new(
    name: Annotated[str, typer.Argument(help="Name of the new layer; also its folder.")],
    directory: Annotated[Path, typer.Option("--in", help="Where to make it.")] = Path(),
    package: Annotated[str, typer.Option(help="The distribution it changes.")] = "vllm",
    from_pr: Annotated[
        str | None,
        typer.Option(help="Make it of a pull request or commit, pinned.", metavar="PULL"),
    ] = None,
    forge_clone: opt.ForgeClone = None,
) -> None:
    """Start a layer folder of your own."""
    from builder.cli.layers import new_command

    new_command(name, directory, package, from_pr, forge_clone)


@layers_app.command("pin")
def layers_pin(
    name: LayerName,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    forge_clone: opt.ForgeClone = None,
) -> None:
    """Write a layer's pins.toml: sha256 of every wheel, donor file and pull request it can need."""
    from builder.cli.layers import pin_command

    pin_command(name, patches, refresh, forge_clone)
