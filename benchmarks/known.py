"""What it takes to know a base: a plan of an image in a registry, and no build."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from benchmarks.ways import spark_build

if TYPE_CHECKING:
    from benchmarks.meter import Run
    from benchmarks.ways import Bench

#: What is measured, in this order: each leaves what the next one needs.
KNOWING = ("plan, base never seen", "plan, base known", "plan --locked")


def know_base(bench: Bench, tag: str, rounds: int = 1) -> dict[str, list[Run]]:
    """Plan with nothing in the cache, with the base in it, and with a lock.

    One round will do: the bytes are the same each time.
    """
    base = f"docker://{bench.address}/bench/base:{tag}"
    words = ("-l", "change", "-b", base)
    found: dict[str, list[Run]] = {name: [] for name in KNOWING}
    project = bench.folder / f"project-{tag}"
    project.mkdir()
    before = os.getcwd()  # noqa: PTH109 - the lock is found from here
    os.chdir(project)
    try:
        for _ in range(rounds):
            (project / "spark-build.lock").unlink(missing_ok=True)
            shutil.rmtree(bench.folder / "cache", ignore_errors=True)
            for name in KNOWING:
                locked = ("--locked",) if name.endswith("--locked") else ()
                if locked:
                    spark_build(bench, "lock", *words)
                run = bench.meter.measure(lambda: spark_build(bench, "plan", *words, *locked))  # noqa: B023
                found[name].append(run)
    finally:
        os.chdir(before)
    return found
