"""``spark-build bench``."""

from os.path import realpath
from pathlib import Path
from typing import Annotated

from builder.cli.command import command
from builder.common.console import counted, print_json, tell
from builder.common.options import Argument, Json, Option
from builder.errors import RemoteError, UsageError


@command(
    "bench",
    "spark-build bench http://localhost:8000",
    "spark-build bench http://spark:8000 --log server.log -o marlin.json",
    "spark-build bench http://spark:8000 --against marlin.json --plot bench.svg",
    detail="Sends chat completions at temperature 0: a warm-up, then three rounds, whose median "
    "counts. The server's API key, if any, is read from SPARK_BUILD_API_KEY.",
)
def bench(
    url: Annotated[str, Argument("The server, such as http://localhost:8000.", "URL")],
    model: Annotated[str, Option("Name of the model, if the server has several.", "NAME")] = "",
    tokens: Annotated[int, Option("Tokens of each answer.", "TOKENS", least=1)] = 200,
    concurrency: Annotated[
        str, Option("Numbers of parallel requests, measured one after another.", "N[,N...]")
    ] = "1,2,4,8,16",
    prefill: Annotated[
        int,
        Option(
            "Length of the long prompt, in words: about as many tokens; 0 for none.",
            "TOKENS",
            least=0,
            most=1_000_000,
        ),
    ] = 4096,
    log: Annotated[
        Path | None, Option("Log of the server; the selected kernels are read from it.", "FILE")
    ] = None,
    against: Annotated[
        Path | None,
        Option("An earlier bench of the same model and settings, to compare with.", "FILE"),
    ] = None,
    output: Annotated[
        Path | None, Option("Write the bench to this file, as JSON.", "FILE", "-o")
    ] = None,
    plot: Annotated[Path | None, Option("Write a diagram to this file, as SVG.", "FILE")] = None,
    *,
    json: Json = False,
) -> None:
    """Measure a server, then print and store the figures; failed requests come last."""
    import msgspec

    from builder.common.files import write_atomically
    from builder.serving.bench import BenchRequest, lines, read_bench, settings_of
    from builder.serving.bench import bench as measured
    from builder.serving.bench import plot as plotted

    settings = settings_of(tokens, concurrency, prefill)
    request = BenchRequest(url=url, model=model, settings=settings, log=log, against=against)
    for option, path in (("-o", output), ("--plot", plot)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            problem = "a folder" if path.is_dir() else "in a folder that does not exist"
            raise UsageError(
                f"{option} {path} is {problem}", hint=f"{option} {path.name or 'FILE'}"
            )
    _refuse_twice(
        {"-o": output, "--plot": plot}, {"--log": request.log, "--against": request.against}
    )
    other = read_bench(request.against) if request.against and plot else None
    results, failures = measured(request)
    if output:
        write_atomically(output, msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if plot:
        write_atomically(plot, plotted(results, other).encode())
    if json:
        print_json(results)
    else:
        tell("\n".join(lines(results)))
    if failures:
        reason = max(failures, key=lambda one: failures[one])
        raise RemoteError(
            f"{results.url}: {counted(sum(failures.values()), 'request')} failed: {reason}",
            hint="docker logs NAME 2>&1 | spark-build diagnose -",
        )


def _refuse_twice(written: dict[str, Path | None], read: dict[str, Path | None]) -> None:
    """Refuse to overwrite a file that another option names.

    Raises:
        UsageError: two options name the same file.
    """
    seen: dict[str, str] = {}
    for option, path in (*read.items(), *written.items()):
        if path is None:
            continue
        before = seen.setdefault(realpath(path), option)
        if before != option and option in written:
            raise UsageError(f"{before} and {option} name the same file, {path}", hint=option)
