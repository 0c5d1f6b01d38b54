"""``spark-build bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from builder.common.console import counted, print_json
from builder.common.pypi import write_atomically
from builder.errors import RemoteError, UsageError
from builder.serving.bench import bench, lines, plot, read_bench

if TYPE_CHECKING:
    from pathlib import Path

    from builder.serving.bench import BenchRequest


def bench_command(
    request: BenchRequest, *, output: Path | None, picture: Path | None, json: bool
) -> None:
    """Measure a server, then print and store the figures.

    Raises:
        RemoteError: requests failed; the figures of the others are printed.
    """
    for option, path in (("-o", output), ("--plot", picture)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            problem = "a folder" if path.is_dir() else "in a folder that does not exist"
            raise UsageError(
                f"{option} {path} is {problem}", hint=f"{option} {path.name or 'FILE'}"
            )
    _refuse_twice(
        {"-o": output, "--plot": picture}, {"--log": request.log, "--against": request.against}
    )
    other = read_bench(request.against) if request.against and picture else None
    made, failures = bench(request)
    if output:
        write_atomically(output, msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    if picture:
        write_atomically(picture, plot(made, other).encode())
    if json:
        print_json(made)
    else:
        print("\n".join(lines(made)))
    if failures:
        reason = max(failures, key=lambda one: failures[one])
        raise RemoteError(
            f"{made.url}: {counted(sum(failures.values()), 'request')} failed: {reason}",
            hint="docker logs NAME 2>&1 | spark-build diagnose -",
        )


def _refuse_twice(written: dict[str, Path | None], read: dict[str, Path | None]) -> None:
    """Refuse to overwrite a file that another option names.

    Raises:
        UsageError: two options name the same file.
    """
    seen: dict[Path, str] = {}
    for option, path in (*read.items(), *written.items()):
        if path is None:
            continue
        before = seen.setdefault(path.resolve(), option)
        if before != option and option in written:
            raise UsageError(f"{before} and {option} name the same file, {path}", hint=option)
