"""``spark-build bake``: contexts and targets for ``docker buildx bake``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from builder.common.console import console, print_json
from builder.common.document import plain
from builder.errors import UsageError
from builder.pipeline.bake import bake_jobs, write_bake

if TYPE_CHECKING:
    from pathlib import Path

    from builder.pipeline.bake import BakeOptions


def bake_command(options: BakeOptions, output: Path | None, *, matrix: bool, as_json: bool) -> None:
    """Write the folder and print its name last; with ``matrix``, list the images."""
    if matrix:
        if output is not None:
            raise UsageError(f"--matrix writes nothing, so --output {output} has no effect")
        jobs = bake_jobs(options)
        print_json(jobs) if as_json else print(json.dumps(plain(jobs)["include"]))
        return
    if output is None:
        raise UsageError("no folder to write to (--matrix writes none)", hint="--output DIR")
    baked = write_bake(options, output)
    if as_json:
        print_json(baked)
        return
    console.say(f"\nBuild {len(baked.targets)} images:\n    {baked.command}\n")
    print(baked.file)
