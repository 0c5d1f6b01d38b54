"""Runs a launch in several schedules, and says what each showed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import UsageError
from builder.ptx.errors import Deadlock, Fault, PtxError
from builder.ptx.findings import Ran, Run, found_races
from builder.ptx.grid import Grid, Schedule
from builder.ptx.launchfile import judge, read_launch
from builder.ptx.places import without_places
from builder.ptx.program import Program
from builder.ptx.source import kernels_of
from builder.util.documents import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.memory import GlobalMemory

#: Copies at once, as late as may be, and at any time: each shows what the others hide.
SCHEDULES = (Schedule("eager"), Schedule("lazy"), Schedule("random", 1))


def run_file(path: Path, schedules: Sequence[Schedule] = SCHEDULES) -> Ran:
    """Run a launch in each schedule, watching for races.

    Raises:
        UsageError: it is no launch, its PTX cannot be read, or lacks the kernel.
    """
    file = read_launch(path)
    program = program_of(file, path)
    digest = hashlib.sha256(without_places(file.ptx).encode()).hexdigest()
    runs = tuple(
        run_once(file, program, schedule, watch=schedule.order != "lazy").run
        for schedule in schedules
    )
    return Ran(program.kernel.name, digest, len(program.blocks), runs)


def program_of(file: LaunchFile, path: Path) -> Program:
    """The kernel that a launch names, decoded; without a name, the only one.

    Raises:
        UsageError: the PTX cannot be read, or lacks the kernel.
    """
    kernels = kernels_of(file.ptx)
    name = file.kernel or (next(iter(kernels)) if len(kernels) == 1 else "")
    if name not in kernels:
        raise UsageError(f"{path}: no kernel {name}; it has {', '.join(kernels) or 'none'}")
    return Program(kernels[name])


@dataclass(frozen=True)
class Once:
    """One run, with all that it left."""

    run: Run
    memory: GlobalMemory


def run_once(file: LaunchFile, program: Program, schedule: Schedule, *, watch: bool) -> Once:
    """Run a launch in one schedule.

    Raises:
        UsageError: its parameters are not the kernel's.
    """
    memory = file.fresh_memory()
    found: dict[str, Any] = {"launch": file.name, "schedule": str(schedule), "watched": watch}
    grid = Grid(program, file.launch(program.kernel), memory, schedule, watch=watch)
    places = program.kernel.places
    outcome = None
    try:
        outcome = grid.run()
    except Fault as fault:
        fault.source = places.at(fault.line)
        found.update(fault=str(fault), deadlock=isinstance(fault, Deadlock))
    races = grid.races()
    found["races"] = tuple(found_races(races, file.ptx.split("\n"), places)) if races else ()
    if outcome is None:
        return Once(Run(**found), memory)
    found["instructions"] = outcome.instructions
    found["covered"] = tuple(sorted(outcome.covered))
    if file.wanted is not None:
        judgement = judge(file.wanted.read(memory), file.wanted)
        found.update(values=judgement.values, wrong=judgement.wrong)
        found["said"] = str(judgement) if judgement.wrong else ""
    return Once(Run(**found), memory)


def run_folder(folder: str) -> dict[str, Any]:
    """Run what a folder holds, for a process of its own: a :class:`Ran`, or its ``error``."""
    try:
        return plain(run_file(Path(folder) / "launch.json"))
    except PtxError as error:
        return {"error": str(error)}
