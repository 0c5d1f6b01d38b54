"""Of some changes of a kernel, drawn at random, how many the benchmark of the kernel sees.

``--mutants 40`` of `marlin`, `cutlass_experts` and `sm12x_moe`: each change is one instruction of
the kernel (`tests.mutants`): a wait, a barrier, a fence or an arrival that is left out or moved,
another address, scale or operand.  The changed kernel makes the same launch in three schedules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.ptx.program import Program
from builder.ptx.runs import SCHEDULES, program_of, run_once
from tests.mutants import drawn, lines_run, redundant

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.grid import Schedule
    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.memory import GlobalMemory

#: Which mutants are drawn.  Our choice: the day of the first table.
SEED = 20261128


@dataclass(frozen=True)
class Subject:
    """A launch, and how many of its results are wrong, by the memory after it."""

    name: str
    file: LaunchFile
    check: Callable[[GlobalMemory], int]

    def notices(self, program: Program, schedule: Schedule, known: set[Any]) -> str:
        """What shows if the launch runs a program: beside known races; or nothing."""
        single = run_once(self.file, program, schedule, watch=True)
        if single.run.fault:
            return "deadlock" if single.run.deadlock else "fault"
        if self.check(single.memory):
            return "values"
        return "race" if {race.key for race in single.run.races} - known else ""

    def show(self, count: int) -> None:
        """Draw mutants, run them, and print how many are noticed, and which are not."""
        program = program_of(self.file, Path(self.name))
        known, lines = set[Any](), set[int]()
        for schedule in SCHEDULES:
            run = run_once(self.file, program, schedule, watch=True).run
            known |= {race.key for race in run.races}
            lines |= lines_run(program, run.covered)
        found, survivors = Counter[str](), list[str]()
        for one in drawn(program.kernel, count, SEED):
            if one.line not in lines:
                found["not reached"] += 1
                continue
            mutant = Program(one.kernel)
            word = next(filter(None, (self.notices(mutant, s, known) for s in SCHEDULES)), "")
            if not word and one.kind == "dropped" and redundant(program.kernel, one.line):
                word = "redundant"
            found[word or "not noticed"] += 1
            survivors += [] if word else [f"  line {one.line}, {one.kind}: {one.said}"]
        parts = ", ".join(f"{number} {word}" for word, number in found.most_common())
        print(f"{self.name}: of {count} mutants {parts}", *survivors, sep="\n", flush=True)
