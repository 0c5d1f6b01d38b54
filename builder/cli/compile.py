"""``spark-build compile show|run|wheel``."""

from builder.cli.command import Group
from builder.compile.options import RunOptions, ShowOptions, WheelOptions

_compile = Group("compile", "spark-build compile show --vllm 0.19.1")


@_compile.sub(
    "show",
    "spark-build compile show --vllm 0.19.1",
    "spark-build compile show --vllm 0.20.1 --operators",
)
def show(options: ShowOptions) -> None:
    """Show what a build of the sources would contain for SM121.

    Lists the architectures it keeps, what runs there, and what a change rebuilds.
    """
    from builder.compile.command import show_build

    show_build(options)


@_compile.sub(
    "run",
    "spark-build compile run --vllm 0.19.1 --change sm120-family",
    "spark-build compile run --vllm 0.20.1 --patch my.diff --dry-run",
)
def run(options: RunOptions) -> None:
    """Compile the units that a change affects.

    Their machine code is then read. No GPU is needed.
    """
    from builder.compile.command import compile_change

    compile_change(options)


@_compile.sub(
    "wheel",
    "spark-build compile wheel --vllm 0.19.1 --change sm120-family",
    "spark-build compile wheel --vllm 0.19.1 --change sm120-family --dry-run",
)
def wheel(options: WheelOptions) -> None:
    """Compile a change into a wheel to install next to vLLM."""
    from builder.compile.command import compile_wheel

    compile_wheel(options)
