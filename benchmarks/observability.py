"""What share of wrong kernels the checks of level ``numbers`` see.

    python -m benchmarks.observability pypi:vllm==0.33.0 --only MoE --count 12 --seed 7

It has the kernels of the profile ``b12x-full`` launched, with its layers, and draws from their PTX
kernels with one thing wrong: an operand or a scale of a product from another product, a wait that
passes at once, a barrier, or an arrival or a fence left out.  Each runs in the check's own calls,
in all schedules.  A row for each check: how many were seen of how many in code that the calls run,
and how many are *not judged*, as no call runs their code; then each that was not seen, and why.
Without effect are an operand of a product that nothing notices even where the product is NaN, of
rows without a token; what `tests.mutants.redundant` proves; and what leaves no two accesses without
order that had one (`tests.mutants.unordered`), so that the values are the same in every schedule of
these launches.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.common.pypi import PackageIndex
from builder.layers.pinned import IndexSources
from builder.probes.dispatch_expect import backends
from builder.proof.kernels import Launched, launch_request, wanted_launches
from builder.proof.opening import target_of_plan
from builder.ptx.launchfile import read_launch
from builder.ptx.program import Program
from builder.ptx.runs import SCHEDULES, CarriedMemory, program_of, run_once
from tests.mutants import (
    NOT_JUDGED,
    OBSERVED,
    Mutant,
    Programs,
    drawn_of,
    known_races,
    lines_run,
    noticed,
    reason,
    unordered,
)
from tests.wheels.kernels.test_numbers import A16_EXPERTS
from tests.wheels.support import Planner, replies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.source import Kernel

    Calls = Sequence[Sequence[LaunchFile]]


#: Launched by tests alone, as no vLLM takes these kernels without a variable.
BESIDES = tuple(
    Launched(
        name=f"FlashInfer's W4A16 experts, {name}",
        serves="w4a16-moe",
        request={**A16_EXPERTS, "tokens": [tokens]},
    )
    for name, tokens in (("1 token", 1), ("3 tokens", 3), ("24 tokens", 24))
)


def launched(base: str, only: str, folder: Path) -> dict[str, list[Path]]:
    """By the names of the checks, the launches of a release with the layers of ``b12x-full``."""
    index = PackageIndex()
    planned = Planner(index, IndexSources(index))(base)
    target = target_of_plan(planned.plan, planned.base, "patched", patched=True)
    every = (*wanted_launches(target.plan.expect), *BESIDES)
    wanted = [one for one in every if re.search(only, one.name)]
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
            lines[key] |= lines_run(program, run.covered)
    return lines


@dataclass
class Check:
    """A check's calls, and what is so without any mutant."""

    calls: Calls
    programs: Programs

    @cached_property
    def known(self) -> set[object]:
        """Races of the kernels themselves."""
        return known_races(self.calls, self.programs)

    @cached_property
    def unordered(self) -> set[object]:
        """What is without order in the kernels themselves."""
        return unordered(self.calls, self.programs)

    def with_kernel(self, key: tuple[str, str], kernel: Kernel) -> tuple[Calls, Programs]:
        """The calls that launch a kernel, with another in its place."""
        calls = [call for call in self.calls if any((i.ptx, i.kernel) == key for i in call)]
        return calls, {**self.programs, key: Program(kernel)}

    def seen(self, key: tuple[str, str], kernel: Kernel) -> str:
        """What notices a kernel in another's place."""
        return noticed(*self.with_kernel(key, kernel), self.known)

    def without_effect(self, key: tuple[str, str], mutant: Mutant) -> str:
        """Why a mutant that nothing noticed cannot have an effect in these calls, or nothing."""

        def disorders(kernel: Kernel) -> bool:
            return not unordered(*self.with_kernel(key, kernel)) <= self.unordered

        original = self.programs[key].kernel
        return reason(original, mutant, lambda kernel: self.seen(key, kernel), disorders)


def main() -> None:
    """Launch, draw, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--only", default="", help="a regular expression for names of checks")
    parser.add_argument("--together", default="", help="all these checks as one, of this name")
    parser.add_argument("--count", type=int, default=12, help="mutants of each kind and kernel")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launches = launched(options.base, options.only, Path(folder))
        if options.together:
            launches = {options.together: [path for paths in launches.values() for path in paths]}
        table(launches, options.count, options.seed)


@dataclass
class Row:
    """The outcomes of a check's mutants."""

    #: by kind: seen, and missed
    counts: dict[str, list[int]]
    #: how many are in code that no call runs
    not_judged: int = 0
    #: each mutant that was not seen, and why it cannot be or is not judged; or nothing
    others: list[tuple[Mutant, str, str]] = field(default_factory=list)


def row_of(check: Check, count: int, seed: int) -> Row:
    """Draw mutants of a check's kernels, and run them."""
    row, lines = Row({kind: [0, 0] for kind in OBSERVED}), reached(check.calls, check.programs)
    for kind, (key, program) in product(OBSERVED, check.programs.items()):
        for one in drawn_of(program.kernel, kind, count, seed):
            if one.line not in lines[key]:
                row.not_judged += 1
                row.others.append((one, program.kernel.places.at(one.line), NOT_JUDGED))
            elif check.seen(key, one.kernel):
                row.counts[kind][0] += 1
            else:
                why = check.without_effect(key, one)
                row.counts[kind][1] += not why
                row.others.append((one, program.kernel.places.at(one.line), why))
    return row


def table(launches: dict[str, list[Path]], count: int, seed: int) -> None:
    """Draw mutants of each kernel, run them, and print what was seen."""
    print(f"| check | {' | '.join(OBSERVED)} | without effect | {NOT_JUDGED} | seconds |")
    print(f"|---|{'---|' * (len(OBSERVED) + 3)}")
    rows = {}
    for name, paths in launches.items():
        began = time.process_time()
        row = rows[name] = row_of(Check(*calls_of(paths)), count, seed)
        cells = [f"{seen} of {seen + missed}" for seen, missed in row.counts.values()]
        same = sum(why not in ("", NOT_JUDGED) for _, _, why in row.others)
        seconds = round(time.process_time() - began)
        print(
            f"| {' | '.join(map(str, (name, *cells, same, row.not_judged, seconds)))} |", flush=True
        )
    for name, row in rows.items():
        for one, source, why in sorted(row.others, key=lambda other: other[2]):
            end = why if why in ("", NOT_JUDGED) else f"without effect, {why}"
            end = end or "not seen"
            print(f"{name}: line {one.line} ({source}), {one.kind}: {one.said}: {end}")


if __name__ == "__main__":
    main()
