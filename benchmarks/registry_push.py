"""A patched image into a registry: ``python -m benchmarks.registry_push [--rounds N]``.

One file of a vLLM base in a registry is changed, and the result pushed beside it into a repository
that is new each time, in every way that Debian has a tool for.  The ways take turns, round by
round: seconds, bytes that the clients sent and got, and the most memory that the processes of a way
took.  What each way has pushed is read back, so that one that changes nothing cannot win.

Then, what it takes to know the base: the bytes and the memory of a plan.

Prints a table, writes every single run to ``registry_push_runs.json`` and the medians to
``registry_push.json``, and draws those as ``registry_push.svg``.  Exit 1 where a way failed or a
tool was not to be had; each is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bases import is_patched, push_base
from benchmarks.chart import draw, medians
from benchmarks.known import know_base
from benchmarks.meter import Meter, median, ratios
from benchmarks.ways import COMMANDS, ENGINE_SUITE, MISSING, Bench, Way, all_ways, told
from builder.images.registry.client import Registry
from tests.countproxy import CountProxy
from tests.engine import cache, machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.meter import Run

#: Compressed megabytes of the bases.
SIZES = (500, 1000, 2200)


def say(message: str) -> None:
    """Progress, for whoever watches."""
    print(f"  {message}", file=sys.stderr, flush=True)


def run_once(bench: Bench, way: Way, size: int, number: int) -> None:
    """Run a way once, read back what it pushed, and clean up after it."""
    tag = f"{size}m"
    # a repository that is new, so that no run finds what an earlier one has sent
    name = f"bench/patched-{size}-{abs(hash(way.name)) % 10**8}-{number}"
    base, target = f"{bench.address}/bench/base:{tag}", f"{bench.address}/{name}:{tag}"
    try:
        daemons = bench.daemons() if way.daemon else ()
        run = bench.meter.measure(lambda: way.act(bench, base, target), daemons)
        repository = Registry(bench.address).repository(name)
        if not is_patched(repository, tag):
            raise RuntimeError(f"{way.name} has pushed something that is not patched")
    finally:
        if way.daemon:
            bench.empty()
    if number or way.heavy:
        way.runs.setdefault(size, []).append(run)
    say(f"{tag:>6} {number} {way.name}: {run.seconds:.2f} s, got {run.received / 1e6:.3f} MB")


def run_all(bench: Bench, ways: Sequence[Way], sizes: Sequence[int], rounds: int) -> None:
    """Every way on every base, in turn; the first round of a light way warms it up.

    An interruption ends it with what there is: rounds are whole but for the last.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(rounds + 1):
            for size in sizes:
                for way in ways:
                    if way.problem or (way.heavy and not number):
                        continue
                    with told(way):
                        run_once(bench, way, size, number)
        return
    say("interrupted: what was measured so far")


def rows(ways: Sequence[Way], size: int) -> list[list[str]]:
    """The table of one size."""
    first = ways[0].runs[size]
    table = []
    for way in ways:
        runs = way.runs.get(size)
        if not runs:
            table.append([way.name, f"not run: {way.problem}"])
            continue
        least, middle = ratios(runs, first)
        table.append(
            [
                way.name,
                f"{median(runs, 'seconds'):.2f}",
                f"{least:.2f}, {middle:.2f}",
                f"{median(runs, 'cpu'):.2f}",
                f"{median(runs, 'sent') / 1e3:.1f}",
                f"{median(runs, 'received') / 1e3:,.0f}",
                f"{max(r.memory for r in runs) / 1e6:.0f}",
            ]
        )
    return table


HEAD = ("", "seconds", "ratio to ours (least, median)", "cpu s", "sent kB", "got kB", "memory MB")


def print_table(head: Sequence[str], table: Sequence[Sequence[str]]) -> None:
    """A table in Markdown, as the documents have it."""
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for row in table:
        print("| " + " | ".join([*row, *[""] * (len(head) - len(row))]) + " |")


def report(ways: Sequence[Way], sizes: Sequence[int], real: dict[int, int]) -> None:
    """Print everything."""
    for size in sizes:
        runs = ways[0].runs.get(size)
        if not runs:
            continue
        print(f"\nbase of {real[size] / 1e9:.2f} GB, {len(runs)} rounds in turn\n")
        print_table(HEAD, rows(ways, size))
    first = ways[0].runs
    if first.get(sizes[0]) and first.get(sizes[-1]):
        growth = real[sizes[-1]] / real[sizes[0]]
        seconds = median(first[sizes[-1]], "seconds") / median(first[sizes[0]], "seconds")
        print(f"\nours: {seconds:.2f} times the seconds for {growth:.1f} times the base")
    missing = [way for way in ways if way.problem]
    print(f"{len(ways) - len(missing)} of {len(ways)} ways were run")
    for way in missing:
        print(f"not run: {way.name}: {way.problem}")


def document(ways: Sequence[Way], real: dict[int, int], knowing: Any, load: Any) -> dict[str, Any]:
    """All runs, and the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "machine": {
            "cores": os.cpu_count(), "memory": memory, "kernel": platform.release(),
            "python": platform.python_version(), "load": load,
        },
        "bases": real,
        "ways": [
            {
                "name": way.name, "problem": way.problem,
                "runs": {size: [vars(run) for run in runs] for size, runs in way.runs.items()},
            }
            for way in ways
        ],
        "knowing": {
            size: {name: [vars(run) for run in runs] for name, runs in found.items()}
            for size, found in knowing.items()
        },
    }  # fmt: skip


def print_knowing(knowing: dict[int, dict[str, list[Any]]], real: dict[int, int]) -> None:
    """What it takes to know a base."""
    print("\nto know the base\n")
    table = [
        [
            f"{name}, base of {real[size] / 1e9:.2f} GB",
            f"{median(runs, 'seconds'):.2f}",
            f"{median(runs, 'sent') / 1e3:.1f}",
            f"{median(runs, 'received') / 1e3:,.1f}",
            f"{max(r.memory for r in runs) / 1e6:.0f}",
        ]
        for size, found in knowing.items()
        for name, runs in found.items()
    ]
    print_table(("", "seconds", "sent kB", "got kB", "memory MB"), table)


@dataclass(frozen=True)
class Measured:
    """The ways with their runs, the bytes of the bases by size, and what knowing them takes."""

    ways: Sequence[Way]
    real: dict[int, int]
    knowing: dict[int, dict[str, list[Run]]]
    load: Sequence[tuple[float, float, float]]


def measured(rounds: int, sizes: Sequence[int], commands: Mapping[str, str] = COMMANDS) -> Measured:
    """Make the bases, and run every way; ``commands`` are the spark-builds by name."""
    tools = machine.ensure_engine()
    layout = machine.base_layout(tools)
    load = [os.getloadavg()]
    with ExitStack() as stack:
        registry = stack.enter_context(machine.Registry(tools))
        proxy = stack.enter_context(CountProxy(registry.address))
        folder = stack.enter_context(cache.scratch("bench"))
        bench = Bench(Meter(proxy), folder, tools, commands)
        repository = Registry(proxy.address).repository("bench/base")
        real = {size: push_base(repository, layout, f"{size}m", size * 10**6) for size in sizes}
        say(f"bases of {', '.join(f'{size / 1e6:.0f} MB' for size in real.values())}")
        try:
            engine = machine.engine_of(ENGINE_SUITE)
            bench.engine = stack.enter_context(machine.Engine(engine))
        except MISSING as error:
            say(f"no Docker Engine: {error}")
        ways = all_ways(bench)
        knowing = {size: know_base(bench, f"{size}m") for size in sizes}
        run_all(bench, ways, sizes, rounds)
        load.append(os.getloadavg())
    return Measured(ways, real, knowing, load)


def main(rounds: int, sizes: Sequence[int], out: Path) -> int:
    """Run every way, and report; gives the exit code."""
    began = time.time()
    found = measured(rounds, sizes)
    report(found.ways, sizes, found.real)
    print_knowing(found.knowing, found.real)
    out.mkdir(parents=True, exist_ok=True)
    made = document(found.ways, found.real, found.knowing, found.load)
    (out / "registry_push_runs.json").write_text(json.dumps(made, indent=1))
    drawn = medians(found.ways, found.real)
    (out / "registry_push.json").write_text(json.dumps(drawn, indent=1) + "\n")
    (out / "registry_push.svg").write_text(draw(drawn))
    say(f"{time.time() - began:.0f} s; written to {out.resolve()}")
    return 1 if any(way.problem for way in found.ways) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="MB of the bases")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for what is written")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(given.rounds, given.sizes, given.out))
