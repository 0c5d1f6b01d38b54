"""Options of ``spark-build ptx``; the implementation is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples

ptx_app = App(
    help="Run PTX kernels on the CPU; find races, deadlocks.",
    epilog=examples("spark-build ptx run kernel.ptx --launch launch.json"),
)

File = Annotated[Path, typer.Argument(help="PTX, as nvcc --ptx writes it.", metavar="FILE.ptx")]
Launch = Annotated[
    Path,
    typer.Option(help="Grid, block, parameters and arrays (docs/ptx.md).", metavar="FILE.json"),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        help="eager, lazy or random[:SEED]; may be repeated (default: all three).",
        metavar="NAME",
        autocompletion=complete.one_of("eager", "lazy", "random"),
    ),
]


@ptx_app.command(
    "run",
    epilog=examples(
        "spark-build ptx run kernel.ptx --launch launch.json",
        "spark-build ptx run kernel.ptx --launch launch.json --out results",
    ),
)
def ptx_run(
    file: File,
    launch: Launch,
    schedule: Schedules = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write what each schedule left in the arrays here.", metavar="DIR"),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Run a kernel in several schedules and report each result.

    No GPU is needed. Exit 5: a race, deadlock, fault or wrong value.
    """
    from builder.cli.ptx import run_command

    run_command(file, launch, schedule or (), out, json=json)


@ptx_app.command(
    "races", epilog=examples("spark-build ptx races kernel.ptx --launch launch.json --json")
)
def ptx_races(
    file: File, launch: Launch, schedule: Schedules = None, json: opt.Json = False
) -> None:
    """List each race on shared memory once, with both lines of PTX.

    No GPU is needed. Exit 5: a race, deadlock or fault.
    """
    from builder.cli.ptx import races_command

    races_command(file, launch, schedule or (), json=json)
