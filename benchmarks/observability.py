"""What share of wrong kernels the checks of level ``numbers`` see.

    python -m benchmarks.observability pypi:vllm==0.33.0 --only MoE --count 12 --seed 7

It has the kernels of the profile ``b12x-full`` launched, with its layers, and draws from their PTX
kernels with one thing wrong: an operand or a scale of a product from another product, a wait that
passes at once, a barrier, or an arrival or a fence left out.  Each runs in the check's own calls,
in all schedules.  A row for each check: how many were seen of how many in code that the calls
reach; then those that were not.  Without effect are what `tests.mutants.redundant` proves, and an
operand of a product that nothing notices even where the product is NaN: of rows without a token.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.common.pypi import PackageIndex
from builder.layers.planner import IndexSources
from builder.probes.dispatch_expect import backends
from builder.proof.kernels import launch_request, wanted_launches
from builder.proof.opening import target_of_plan
from builder.ptx.launchfile import read_launch
from builder.ptx.program import Program
from builder.ptx.runs import SCHEDULES, CarriedMemory, program_of, run_once
from tests.mutants import (
    OBSERVED,
    Mutant,
    Programs,
    drawn_of,
    known_races,
    noticed,
    poisoned,
    redundant,
)
from tests.wheels.support import Planner, replies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.ptx.launchfile import LaunchFile

    Calls = Sequence[Sequence[LaunchFile]]


def launched(base: str, only: str, folder: Path) -> dict[str, list[Path]]:
    """By the names of the checks, the launches of a release with the layers of ``b12x-full``."""
    index = PackageIndex()
    planned = Planner(index, IndexSources(index))(base)
    target = target_of_plan(planned.plan, planned.base, "patched", patched=True)
    wanted = [one for one in wanted_launches(target.plan.expect) if only in one.name]
    flags = (*target.plan.serve_flags, *target.plan.moe_serve_flags)
    chosen = {**backends(flags, "nvfp4-linear"), **backends(flags, "nvfp4-moe")}
    launches: dict[str, list[Path]] = {}
    for number, one in enumerate(wanted):
        # one at a time, as the folder's names do not tell the checks
        os.environ[settings.KEEP_LAUNCHES.name] = str(folder / str(number))
        replies_of(target, launch_request(target.plan.env, "sm_121a", [one], chosen))
        launches[one.name] = sorted((folder / str(number)).rglob("launch.json"), key=_number)
    return launches


def _number(path: Path) -> int:
    return int(path.parent.name.partition("-")[2])


def calls_of(paths: Sequence[Path]) -> tuple[list[list[LaunchFile]], Programs]:
    """Launches in calls, whose last one each has a result; and their kernels."""
    calls: list[list[LaunchFile]] = [[]]
    programs = {}
    for path in paths:
        launch = read_launch(path)
        programs[launch.ptx, launch.kernel] = program_of(launch, path)
        calls[-1].append(launch)
        if launch.expected is not None:
            calls.append([])
    return [call for call in calls if call], programs


def reached(calls: Calls, programs: Programs) -> dict[tuple[str, str], set[int]]:
    """For each kernel, the lines that its launches run.

    Raises:
        ValueError: a kernel is not right itself.
    """
    lines: dict[tuple[str, str], set[int]] = {key: set() for key in programs}
    for call in calls:
        memory = CarriedMemory()
        for launch in call:
            key, own = (launch.ptx, launch.kernel), memory.memory_for(launch)
            program = programs[key]
            run = run_once(launch, program, SCHEDULES[0], watch=False, memory=own).run
            if run.fault or run.wrong:
                raise ValueError(f"{launch.name}: {run.fault or run.said}")
            memory.keep(launch, own)
            for start in run.covered:
                places = range(start, program.blocks[start].end)
                lines[key] |= {program.kernel.code[place].line for place in places}
    return lines


def _same(
    original: Program,
    mutant: Mutant,
    calls: Calls,
    programs: Programs,
    key: tuple[str, str],
    known: set[object],
) -> bool:
    """Whether a mutant that nothing noticed cannot have an effect in these calls."""
    if mutant.kind == "operand":
        poison = Program(poisoned(original.kernel, mutant.line))
        return not noticed(calls, {**programs, key: poison}, known)
    return redundant(original.kernel, mutant.line)


def main() -> None:
    """Launch, draw, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--only", default="", help="a part of the names of checks")
    parser.add_argument("--count", type=int, default=12, help="mutants of each kind and kernel")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launches = launched(options.base, options.only, Path(folder))
        table(launches, options.count, options.seed)


def table(launches: dict[str, list[Path]], count: int, seed: int) -> None:
    """Draw mutants of each kernel, run them, and print what was seen."""
    print(f"| check | {' | '.join(OBSERVED)} | without effect | not reached | seconds |")
    print(f"|---|{'---|' * (len(OBSERVED) + 3)}")
    missed = []
    for name, paths in launches.items():
        began, outside, same = time.process_time(), 0, 0
        calls, programs = calls_of(paths)
        lines, cells, known = reached(calls, programs), [], known_races(calls, programs)
        for kind in OBSERVED:
            seen = 0
            for key, program in programs.items():
                mutants = drawn_of(program.kernel, kind, count, seed)
                inside = [one for one in mutants if one.line in lines[key]]
                outside += len(mutants) - len(inside)
                for one in inside:
                    if noticed(calls, {**programs, key: Program(one.kernel)}, known):
                        seen += 1
                    elif _same(program, one, calls, programs, key, known):
                        same += 1
                    else:
                        missed.append((name, one))
            drawn = seen + sum(which == name and one.kind == kind for which, one in missed)
            cells.append(f"{seen} of {drawn}" if drawn else "")
        row = (name, *cells, same, outside, round(time.process_time() - began))
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    for name, one in missed:
        print(f"{name}: line {one.line}, {one.kind}: {one.said}")


if __name__ == "__main__":
    main()
