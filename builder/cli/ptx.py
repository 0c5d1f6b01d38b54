"""``spark-build ptx run|races``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, counted, print_json
from builder.common.pypi import write_atomically
from builder.errors import Exit, SparkBuildError
from builder.ptx.runs import KernelRaces, run_user_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.ptx.findings import FoundRace
    from builder.ptx.runs import OwnRun, Stopped

_HINT = "docs/ptx.md explains each finding"


def run_command(
    file: Path, launch: Path, schedules: Sequence[str], out: Path | None, *, json: bool
) -> None:
    """Run a kernel in each schedule; print and store the results.

    Raises:
        UsageError: bad input.
        SparkBuildError: a race, deadlock, fault or wrong value was found (exit 5).
    """
    user_run = run_user_kernel(file, launch, schedules)
    if out is not None:
        for name, data in user_run.files.items():
            write_atomically(out / name, data)
    result = user_run.found
    if json:
        print_json(result)
    else:
        print(f"{result.kernel}: {counted(result.blocks, 'basic block')}")
        for run in result.runs:
            print("\n".join(_lines(run, result.blocks)))
        if result.differ:
            print(f"the schedules left different values in {', '.join(result.differ)}")
    bad = [run.schedule for run in result.runs if run.bad]
    if bad:
        raise SparkBuildError(
            f"{file}: {result.kernel} is wrong in {', '.join(bad)}", Exit.VERIFY_FAILED, _HINT
        )


def races_command(file: Path, launch: Path, schedules: Sequence[str], *, json: bool) -> None:
    """Print each race once.

    Raises:
        UsageError: bad input.
        SparkBuildError: a race was found, or a run did not end (exit 5).
    """
    result = KernelRaces.of(run_user_kernel(file, launch, schedules).found)
    races, stopped = result.races, result.stopped
    if json:
        print_json(result)
    else:
        for race in races:
            print("\n".join(_race(race)))
            print(f"  seen in {', '.join(race.schedules)}")
        for run in stopped:
            print(f"{run.schedule}: {_ended(run)}")
        if not races and not stopped:
            print(f"no races in {', '.join(result.schedules)}")
    if races or stopped:
        found = counted(len(races), "race")
        found += f", and {counted(len(stopped), 'schedule')} did not end" if stopped else ""
        message = f"{file}: {result.kernel} has {found}"
        raise SparkBuildError(message, Exit.VERIFY_FAILED, _HINT)


def _ended(run: OwnRun | Stopped) -> str:
    return f"{'deadlock' if run.deadlock else 'fault'}: {run.fault}"


def _lines(run: OwnRun, blocks: int) -> Iterator[str]:
    mark = console.style("found", "red") if run.bad else console.style("ok", "green")
    if run.fault:
        yield f"{run.schedule}: {mark}"
        yield f"  {_ended(run)}"
    else:
        status = counted(run.instructions, "instruction")
        status += f", {run.covered} of {blocks} basic blocks"
        right = f", {counted(run.values, 'value')} right" if run.values and not run.wrong else ""
        yield f"{run.schedule}: {mark}; {status}{right}"
    if run.said:
        yield f"  {run.said}"
    for race in run.races:
        yield from (f"  {line}" for line in _race(race))


def _race(race: FoundRace) -> Iterator[str]:
    places = counted(race.places, "place")
    yield f"race: {race.kind}, {places} from {race.memory} offset {race.offset}"
    for line, agent in zip(race.lines, race.agents, strict=True):
        yield f"  {line.by(agent)}: {line.text}"
    if race.missing:
        yield f"  missing: {race.missing}"
