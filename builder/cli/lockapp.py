"""Options of ``spark-build lock``; the implementation is imported when it runs."""

from dataclasses import replace
from typing import Annotated

import typer

from builder.cli import options as opt
from builder.cli.commands import MAINTAIN
from builder.cli.help import App, examples

lock_app = App()


@lock_app.command(
    rich_help_panel=MAINTAIN,
    epilog=examples(
        "spark-build lock -l b12x-full -b pypi:vllm==0.20.1",
        "spark-build lock --with-pr vllm-project/vllm#40082 -b pypi:vllm==0.21.0",
        "spark-build lock --check",
        "spark-build lock --upgrade",
    ),
)
def lock(
    layers: opt.LayersOrPulls = None,
    with_pr: opt.WithPr = None,
    base: opt.BaseRef = None,
    platform: opt.PlatformName = None,
    python: opt.PythonVersion = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check whether the lock is up to date (exit 9 if not)."),
    ] = False,
    upgrade: Annotated[
        bool,
        typer.Option("--upgrade", help="Look everything up again, and lock the current state."),
    ] = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Pin every input of a build.

    Writes spark-build.lock: base digest, versions, and sha256 of every input.

    Without --layers and --with-pr, the entries of the lock are locked again.
    """
    from builder.cli.lock import lock_command
    from builder.pipeline.options import PlanOptions

    options = replace(
        PlanOptions.selecting(layers, with_pr, forge_clone, patches),
        base=base,
        platform=platform,
        python=python,
        refresh=upgrade,
        upgrade=upgrade,
    )
    lock_command(options, check=check, json=json)
