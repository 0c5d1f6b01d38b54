"""Options of ``spark-build cache``; the implementation is imported when it runs."""

from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples, running

cache_app = App(
    help="Show the local cache, or free space in it.",
    cls=running("show"),
    epilog=examples("spark-build cache show", "spark-build cache prune --dry-run"),
)


@cache_app.command(epilog=examples("spark-build cache show", "spark-build cache show --json"))
def show(json: opt.Json = False) -> None:
    """Show the cache by kind: entries, bytes and last use."""
    from builder.cli.cache import show_command

    show_command(json)


Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        help="Only this kind of entry; may be repeated.",
        metavar="KIND",
        autocompletion=complete.kinds,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be removed.")]


@cache_app.command(
    epilog=examples(
        "spark-build cache prune --older-than 7d",
        "spark-build cache prune --keep-bytes 5GB --dry-run",
        "spark-build cache prune --kind sandboxes",
    )
)
def prune(
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Entries unused for this long: 90m, 12h, 2w (default without --keep-bytes: 30d).",
            metavar="AGE",
        ),
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option(
            help="Shrink the cache to this size, least recently used first: 500MB, 5GB, 2GiB.",
            metavar="SIZE",
        ),
    ] = None,
    kind: Kinds = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Remove entries unused for 30 days, or another time.

    Safe during other runs: entries used in the last day are then kept.
    """
    from builder.cli.cache import prune_command

    prune_command(older_than, keep_bytes, kind or [], dry_run=dry_run, json=json)


@cache_app.command(
    epilog=examples(
        "spark-build cache clean --dry-run",
        "spark-build cache clean --kind sandboxes --yes",
    )
)
def clean(
    kind: Kinds = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Remove the whole cache, after confirmation.

    Safe during other runs: entries used in the last day are then kept.
    """
    from builder.cli.cache import clean_command

    clean_command(kind or [], yes=yes, dry_run=dry_run, json=json)
