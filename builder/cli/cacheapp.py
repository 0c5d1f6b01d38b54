"""The options of ``spark-build cache``; what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from builder.cli import options as opt  # noqa: TC001 - typer reads the annotations

cache_app = typer.Typer(help="What is kept on this machine, and how to make it less.")


def complete_kinds(incomplete: str) -> list[str]:
    """Shell completion for ``--kind``."""
    from builder.cache.kinds import KINDS

    return [k.name for k in KINDS if k.prunable and k.name.startswith(incomplete)]


@cache_app.command(epilog="Examples:  spark-build cache show   |   spark-build cache show --json")
def show(json: opt.Json = False) -> None:
    """Show what is in the cache: kinds, entries, bytes, and when they were last used."""
    from builder.cli.cache import show_command

    show_command(json)


@cache_app.command(
    epilog="Examples:  spark-build cache prune --older-than 30d   |   spark-build cache prune "
    "--keep-bytes 5GB --dry-run   |   spark-build cache prune --kind sandboxes"
)
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Only what was not used for so long: 90m, 12h, 30d, 2w.")
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option(help="Down to so many bytes, the longest unused first: 500MB, 5GB, 2GiB."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only this kind; may be repeated.", autocompletion=complete_kinds),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be removed.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Remove what is kept; all of it can be made or fetched again.

    Safe beside other runs: while there are any, what was used in the last day stays.
    """
    from builder.cli.cache import prune_command

    prune_command(older_than, keep_bytes, kind or [], dry_run=dry_run, json=json)
