"""The options of ``spark-build compile``; what its commands do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import options as opt

compile_app = typer.Typer(help="What a release's own build makes of its CUDA sources.")

Change = Annotated[str | None, typer.Option(help="A change that is known by name: sm120-family.")]
Patch = Annotated[Path | None, typer.Option(help="A unified diff on the source tree.")]
SourceTree = Annotated[
    Path | None, typer.Option(help="A source tree of your own instead of the released one.")
]
ArchList = Annotated[str, typer.Option(help="TORCH_CUDA_ARCH_LIST of the build.")]
Nvcc = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|wheels",
        help="The compiler; default: the installed one, else the one of released wheels.",
    ),
]
Platform = Annotated[
    str | None,
    typer.Option(help="linux/arm64 or linux/amd64 (default: this machine's)."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Units at once; default: by memory.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say which units, how long, how much memory.")
]


@compile_app.command(
    "show",
    epilog="Examples:  spark-build compile show --vllm 0.19.1   |   spark-build compile show "
    "--vllm 0.20.1 --operators",
)
def compile_show(
    vllm: Annotated[str, typer.Option(help="Release, or VERSION.devN+gCOMMIT.")],
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    cuda: Annotated[str, typer.Option(help="CUDA version of the build.")] = "13.0",
    changed: Annotated[
        list[str] | None, typer.Option(help="A source file that changes; repeatable.")
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Which torch operators stand behind each unit.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Show which architectures a build keeps, what runs on SM121, and what a change rebuilds."""
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
    epilog="Examples:  spark-build compile run --vllm 0.19.1 --change sm120-family   |   "
    "spark-build compile run --vllm 0.20.1 --patch my.diff --dry-run",
)
def compile_run(
    vllm: Annotated[str, typer.Option(help="Release, or VERSION.devN+gCOMMIT.")],
    change: Change = None,
    patch: Patch = None,
    unit: Annotated[
        list[str] | None, typer.Option(help="A unit to compile as it is; repeatable.")
    ] = None,
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    torch: Annotated[
        Path | None,
        typer.Option(help="site-packages with torch; default: what vLLM pins."),
    ] = None,
    nvcc: Nvcc = None,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    platform: Platform = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Compile only what a source change reaches, and read the machine code: no GPU needed."""
    from builder.cli.compile import RunOptions, run_command

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
            toolkit=opt.toolkit_choice(toolkit, builder),
            platform=platform,
            jobs=jobs,
            dry_run=dry_run,
            json=json,
        )
    )


@compile_app.command(
    "wheel",
    epilog="Examples:  spark-build compile wheel --vllm 0.19.1 --change sm120-family   |   "
    "spark-build compile wheel --vllm 0.19.1 --change sm120-family --base dir:/opt/venv -o dist",
)
def compile_wheel(
    vllm: Annotated[str, typer.Option(help="Release, or VERSION.devN+gCOMMIT.")],
    change: Change = None,
    patch: Patch = None,
    base: Annotated[
        str | None,
        typer.Option(help="Where it will be installed; default: the released wheels."),
    ] = None,
    source: SourceTree = None,
    arch_list: ArchList = "12.1a",
    cuda: Annotated[
        str | None, typer.Option(help="CUDA version that nvcc must be of; default: any.")
    ] = None,
    torch: Annotated[
        Path | None, typer.Option(help="site-packages with torch's headers; default: the base's.")
    ] = None,
    nvcc: Nvcc = None,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    platform: Platform = None,
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Folder that the wheel is written to.")
    ] = Path("dist"),
    jobs: Jobs = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Compile what a change reaches, and make a wheel of it that goes beside a prebuilt vLLM."""
    from builder.cli.companion import WheelOptions, wheel_command

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
            toolkit=opt.toolkit_choice(toolkit, builder),
            platform=platform,
            out=out,
            jobs=jobs,
            dry_run=dry_run,
            json=json,
        )
    )
