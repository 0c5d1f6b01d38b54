"""What it takes to know a base: a plan of an image in a registry, and no build."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from benchmarks.ways import lock_of, spark_build

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


def know_base(bench: Bench, tag: str, rounds: int = 1) -> dict[str, list[Run]]:
    """Plan with nothing in the cache, with the base in it, with a lock, and with a lock alone.

    One round will do: the bytes are the same each time.
    """
    base = f"docker://{bench.address}/bench/base:{tag}"
    words = ("-l", "change", "-b", base)
    found: dict[str, list[Run]] = {name: [] for name in KNOWING}
    lock = lock_of(bench, tag)
    lock.parent.mkdir()
    for _ in range(rounds):
        lock.unlink(missing_ok=True)
        for name in KNOWING:
            if name.endswith("never seen"):
                shutil.rmtree(bench.folder / "cache", ignore_errors=True)
            given = [*words, "--locked"] if "--locked" in name else words
            if "--locked" in name and not lock.exists():
                spark_build(bench, "lock", *words, lock=lock)
            run = bench.meter.measure(lambda: spark_build(bench, "plan", *given, lock=lock))  # noqa: B023
            found[name].append(run)
    return found
