"""The options of what leads from an image to a served model; what they do is imported when run."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import options as opt
from builder.cli.help import App, examples

models_app = App(
    help="Show models that recipes exist for.",
    epilog=examples("spark-build models list", "spark-build models show nemotron-3-super"),
)

ModelFolders = Annotated[
    list[Path] | None,
    typer.Option("--models", help="More models of your own: a folder of NAME.toml.", metavar="DIR"),
]


@models_app.command("list", epilog=examples("spark-build models list"))
def models_list(models: ModelFolders = None, json: opt.Json = False) -> None:
    """List models, one line each."""
    from builder.cli.models import list_command

    list_command(models, json=json)


@models_app.command(
    "show",
    epilog=examples(
        "spark-build models show nemotron-3-super",
        "spark-build models show my-model --models my-models --json",
    ),
)
def models_show(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a model, or its id on Hugging Face.",
            metavar="MODEL",
            autocompletion=complete.models,
        ),
    ],
    models: ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Show what is known of a model, who says so, and what nobody says."""
    from builder.cli.models import show_command

    show_command(name, models, json=json)
