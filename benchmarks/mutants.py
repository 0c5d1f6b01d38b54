"""Of some changes of a kernel, drawn at random, how many the benchmark of the kernel sees.

``--mutants 40`` of `marlin`, `cutlass_experts`, `cutlass_gemm` and `sm12x_moe`: each change is one
instruction of the kernel (`tests.mutants`): a wait, a barrier, a fence or an arrival that is left
out or moved, another address, scale or operand.  The changed kernel makes the same launch in three
schedules.  Each that nothing notices is printed, with the reason if it cannot have an effect there
(`tests.mutants.reason`); those in code that the launch does not run are *not judged*.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.ptx.program import Program
from builder.ptx.runs import SCHEDULES, program_of, run_once
from tests.mutants import NOT_JUDGED, drawn, lines_run, reason, unordered

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.ptx.grid import Schedule
    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.memory import GlobalMemory
    from builder.ptx.source import Kernel

#: Which mutants are drawn.  Our choice: the day of the first table.
SEED = 20261128


@dataclass(frozen=True)
class Subject:
    """A launch, and how many of its results are wrong, by the memory after it."""

    name: str
    file: LaunchFile
    check: Callable[[GlobalMemory], int]

    @cached_property
    def program(self) -> Program:
        """The kernel that the launch names."""
        return program_of(self.file, Path(self.name))

    @cached_property
    def own(self) -> tuple[set[Any], set[int]]:
        """The keys of the kernel's own races, and the lines that the launch reaches."""
        known, lines = set[Any](), set[int]()
        for schedule in SCHEDULES:
            run = run_once(self.file, self.program, schedule, watch=True).run
            known |= {race.key for race in run.races}
            lines |= lines_run(self.program, run.covered)
        return known, lines

    @cached_property
    def own_pairs(self) -> set[object]:
        """What is without order in the kernel itself, by all that the detector has."""
        return self._unordered(self.program)

    def _unordered(self, program: Program) -> set[object]:
        return unordered([[self.file]], {(self.file.ptx, self.file.kernel): program})

    def disorders(self, kernel: Kernel) -> bool:
        """Whether a kernel in this one's place has accesses without order that had one."""
        return not self._unordered(Program(kernel)) <= self.own_pairs

    def seen(self, kernel: Kernel) -> str:
        """What shows if the launch runs a kernel: beside the races of its own; or nothing."""
        program = Program(kernel)
        return next(filter(None, (self._notices(program, one) for one in SCHEDULES)), "")

    def _notices(self, program: Program, schedule: Schedule) -> str:
        single = run_once(self.file, program, schedule, watch=True)
        if single.run.fault:
            return "deadlock" if single.run.deadlock else "fault"
        if self.check(single.memory):
            return "values"
        return "race" if {race.key for race in single.run.races} - self.own[0] else ""

    def show(self, count: int) -> None:
        """Draw mutants, run them, and print how many are noticed, and which are not, and why."""
        found, survivors = Counter[str](), list[str]()
        kernel, (_, lines) = self.program.kernel, self.own
        for one in drawn(kernel, count, SEED):
            word = self.seen(one.kernel) if one.line in lines else NOT_JUDGED
            why = ""
            if not word:
                why = reason(kernel, one, self.seen, self.disorders)
                word = "without effect" if why else "not noticed"
            if word in (NOT_JUDGED, "without effect", "not noticed"):
                survivors += [f"  line {one.line}, {one.kind}: {one.said}: {why or word}"]
            found[word] += 1
        parts = ", ".join(f"{number} {word}" for word, number in found.most_common())
        print(f"{self.name}: of {count} mutants {parts}", *survivors, sep="\n", flush=True)
