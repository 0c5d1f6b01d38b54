"""Options of ``spark-build compile``; the implementation is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples

compile_app = App(
    help="Compile kernels that a prebuilt release lacks on SM121.",
    epilog=examples("spark-build compile show --vllm 0.19.1"),
)

Change = Annotated[
    str | None,
    typer.Option(
        help="A built-in change: sm120-family.",
        metavar="NAME",
        autocompletion=complete.one_of("sm120-family"),
    ),
]
Patch = Annotated[
    Path | None, typer.Option(help="A unified diff against the source tree.", metavar="FILE")
]
Release = Annotated[
    str, typer.Option("--vllm", help="Release, or VERSION.devN+gCOMMIT.", metavar="VERSION")
]
SourceTree = Annotated[
    Path | None,
    typer.Option(help="Use this source tree instead of the released one.", metavar="DIR"),
]
ArchList = Annotated[
    str, typer.Option(help="TORCH_CUDA_ARCH_LIST of the build.", metavar="ARCH[;ARCH...]")
]
Nvcc = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|wheels",
        help="The nvcc to use (default: the installed one, else the one from released wheels).",
    ),
]
Platform = Annotated[
    str | None,
    typer.Option(
        help="linux/arm64 or linux/amd64 (default: this machine's).",
        metavar="PLATFORM",
        autocompletion=complete.one_of(*complete.PLATFORMS),
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, help="Units compiled in parallel (default: by memory).", metavar="N"
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show the units, the time and the memory needed.")
]


@compile_app.command(
    "show",
    epilog=examples(
        "spark-build compile show --vllm 0.19.1",
        "spark-build compile show --vllm 0.20.1 --operators",
    ),
)
def compile_show(
    vllm: Release,
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    cuda: Annotated[
        str, typer.Option(help="CUDA version of the build.", metavar="VERSION")
    ] = "13.0",
    changed: Annotated[
        list[str] | None,
        typer.Option(help="A changed source file; may be repeated.", metavar="FILE"),
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Show which torch operators each unit implements.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Show what a build of the sources would contain for SM121.

    Lists the architectures it keeps, what runs there, and what a change rebuilds.
    """
    from builder.cli.compile import show_command

    show_command(
        vllm=vllm,
        source=source,
        arch_list=arch_list,
        cuda=cuda,
        changed=changed or [],
        operators=operators,
        json=json,
    )


@compile_app.command(
    "run",
    epilog=examples(
        "spark-build compile run --vllm 0.19.1 --change sm120-family",
        "spark-build compile run --vllm 0.20.1 --patch my.diff --dry-run",
    ),
)
def compile_run(
    vllm: Release,
    change: Change = None,
    patch: Patch = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(help="A unit to compile unchanged; may be repeated.", metavar="FILE"),
    ] = None,
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    torch: Annotated[
        Path | None,
        typer.Option(
            help="site-packages with torch (default: the version that vLLM pins).", metavar="DIR"
        ),
    ] = None,
    nvcc: Nvcc = None,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    platform: Platform = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Compile the units that a change affects.

    Their machine code is then read. No GPU is needed.
    """
    from builder.cli.compile import RunOptions, run_command
    from builder.pipeline.options import toolkit_choice

    run_command(
        RunOptions(
            vllm=vllm,
            source=source,
            arch_list=arch_list,
            change=change,
            patch=patch,
            units=unit or [],
            torch=torch,
            nvcc=nvcc,
            toolkit=toolkit_choice(toolkit, builder),
            platform=platform,
            jobs=jobs,
            dry_run=dry_run,
            json=json,
        )
    )


@compile_app.command(
    "wheel",
    epilog=examples(
        "spark-build compile wheel --vllm 0.19.1 --change sm120-family",
        "spark-build compile wheel --vllm 0.19.1 --change sm120-family --dry-run",
    ),
)
def compile_wheel(
    vllm: Release,
    change: Change = None,
    patch: Patch = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The base that the wheel is for (default: the released wheels).", metavar="BASE"
        ),
    ] = None,
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    cuda: Annotated[
        str | None,
        typer.Option(
            help="The CUDA version that nvcc must have (default: any).", metavar="VERSION"
        ),
    ] = None,
    torch: Annotated[
        Path | None,
        typer.Option(
            help="site-packages with torch's headers (default: the base's).", metavar="DIR"
        ),
    ] = None,
    nvcc: Nvcc = None,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    platform: Platform = None,
    out: Annotated[
        Path,
        typer.Option("--output", "-o", help="Output folder for the wheel.", metavar="DIR"),
    ] = Path("dist"),
    jobs: Jobs = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Compile a change into a wheel to install next to vLLM."""
    from builder.cli.compilewheel import WheelOptions, wheel_command
    from builder.pipeline.options import toolkit_choice

    wheel_command(
        WheelOptions(
            vllm=vllm,
            base=base,
            source=source,
            arch_list=arch_list,
            change=change,
            patch=patch,
            cuda=cuda,
            torch=torch,
            nvcc=nvcc,
            toolkit=toolkit_choice(toolkit, builder),
            platform=platform,
            out=out,
            jobs=jobs,
            dry_run=dry_run,
            json=json,
        )
    )
