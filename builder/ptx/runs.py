"""Runs a launch in several schedules, and says what each showed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import UsageError
from builder.ptx.errors import Deadlock, Fault, PtxError
from builder.ptx.grid import Grid, Schedule
from builder.ptx.launchfile import judge, read_launch
from builder.ptx.program import Program
from builder.ptx.source import kernels_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.ptx.launchfile import LaunchFile
    from builder.ptx.races import Race

#: Copies at once, as late as may be, and at any time: each shows what the others hide.
SCHEDULES = (Schedule("eager"), Schedule("lazy"), Schedule("random", 1))


@dataclass(frozen=True)
class Run:
    """One launch in one schedule."""

    launch: str
    schedule: str
    values: int = 0
    wrong: int = 0
    #: what is wrong with the values, in words
    said: str = ""
    #: why it did not end
    fault: str = ""
    deadlock: bool = False
    #: races by their lines, each once
    races: tuple[str, ...] = ()
    #: the race detector watched
    watched: bool = False
    instructions: int = 0
    #: basic blocks that ran
    covered: tuple[int, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Run:
        """Read what :meth:`as_json` gave."""
        lists = {name: tuple(document[name]) for name in ("races", "covered")}
        return cls(**{**document, **lists})

    def as_json(self) -> dict[str, Any]:
        """For files."""
        return asdict(self)


@dataclass(frozen=True)
class Ran:
    """All runs of one launch."""

    kernel: str
    #: sha256 of the PTX
    ptx: str
    #: basic blocks of the kernel
    blocks: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Ran:
        """Read what :meth:`as_json` gave."""
        return cls(**{**document, "runs": tuple(Run.of(run) for run in document["runs"])})

    def as_json(self) -> dict[str, Any]:
        """For files."""
        return asdict(self)


def run_file(path: Path, schedules: Sequence[Schedule] = SCHEDULES) -> Ran:
    """Run a launch in each schedule, watching for races.

    Raises:
        UsageError: it is no launch, its PTX cannot be read, or lacks the kernel.
    """
    file = read_launch(path)
    kernels = kernels_of(file.ptx)
    if file.kernel not in kernels:
        raise UsageError(f"{path}: no kernel {file.kernel}; it has {', '.join(kernels)}")
    program = Program(kernels[file.kernel])
    digest = hashlib.sha256(file.ptx.encode()).hexdigest()
    runs = tuple(_run(file, program, schedule) for schedule in schedules)
    return Ran(file.kernel, digest, len(program.blocks), runs)


def _run(file: LaunchFile, program: Program, schedule: Schedule) -> Run:
    memory = file.fresh_memory()
    watch = schedule.order != "lazy"
    found: dict[str, Any] = {"launch": file.name, "schedule": str(schedule), "watched": watch}
    grid = Grid(program, file.launch(program.kernel), memory, schedule, watch=watch)
    try:
        outcome = grid.run()
    except Fault as fault:
        stuck = isinstance(fault, Deadlock)
        return Run(**found, fault=str(fault), deadlock=stuck, races=_each_once(grid.races()))
    found["instructions"] = outcome.instructions
    found["covered"] = tuple(sorted(outcome.covered))
    found["races"] = _each_once(outcome.races)
    if file.wanted is not None:
        judgement = judge(file.wanted.read(memory), file.wanted)
        found.update(values=judgement.values, wrong=judgement.wrong)
        found["said"] = str(judgement) if judgement.wrong else ""
    return Run(**found)


def _each_once(races: Sequence[Race]) -> tuple[str, ...]:
    """The same two lines meet in many blocks."""
    return tuple({(race.kind, race.line, race.other): str(race) for race in races}.values())


def run_folder(folder: str) -> dict[str, Any]:
    """Run what a folder holds, for a process of its own: a :class:`Ran`, or its ``error``."""
    try:
        return run_file(Path(folder) / "launch.json").as_json()
    except PtxError as error:
        return {"error": str(error)}
