"""What it takes to know a base: a plan of an image in a registry, and no build."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.ways import cache_of, lock_of, spark_build

if TYPE_CHECKING:
    from benchmarks.meter import Run
    from benchmarks.ways import Bench

#: What is measured, in this order: each leaves what the next one needs.
KNOWING = (
    "plan, base never seen",
    "plan, base known",
    "plan --locked",
    "plan --locked, base never seen",
)


def know_base(bench: Bench, tag: str) -> dict[str, list[Run]]:
    """Plan with nothing in the cache, with the base in it, with a lock, and with a lock alone.

    One run of each will do: the bytes are the same each time.
    """
    base = f"docker://{bench.address}/bench/base:{tag}"
    words = ("-l", "change", "-b", base)
    runs: dict[str, list[Run]] = {}
    for tool in bench.commands:
        lock = lock_of(bench, tool, tag)
        lock.parent.mkdir(parents=True)
        for name in KNOWING:
            if name.endswith("never seen"):
                shutil.rmtree(cache_of(bench, tool), ignore_errors=True)
            given = [*words, "--locked"] if "--locked" in name else words
            if "--locked" in name and not lock.exists():
                spark_build(bench, tool, "lock", *words, lock=lock)
            command = partial(spark_build, bench, tool, "plan", *given, lock=lock)
            runs[f"{tool} {name}"] = [bench.meter.measure(command)]
    return runs
