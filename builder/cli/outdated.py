"""``spark-build outdated``."""

from builder.cli.command import command
from builder.common.console import print_json
from builder.common.options import Json
from builder.errors import Exit, SparkBuildError
from builder.pipeline.options import OutdatedOptions


@command(
    "outdated",
    "spark-build outdated -l b12x-full --since 0.32.0",
    "spark-build outdated --min-age 7d --check",
    detail="Prints Markdown, for the text of a pull request.",
)
def outdated(options: OutdatedOptions, *, json: Json = False) -> None:
    """Print the report; with ``--check`` exit 9 if there is something to do."""
    from builder.serving.outdated import markdown
    from builder.serving.outdated import outdated as report

    document = report(options)
    if json:
        print_json(document)
    else:
        print(markdown(document), end="")
    if options.check and document.anything:
        raise SparkBuildError(
            f"vLLM has a release after {document.since}, or a wheel is not what it was",
            Exit.STALE,
            hint="spark-build lock --upgrade",
        )
