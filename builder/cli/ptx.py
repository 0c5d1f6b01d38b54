"""``spark-build ptx run``, ``ptx races`` and ``ptx instructions``."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import Group
from builder.common.console import console, counted, print_json
from builder.common.options import Argument, Json, Option
from builder.errors import Exit, SparkBuildError

if TYPE_CHECKING:
    from builder.ptx.findings import FoundRace
    from builder.ptx.runs import OwnRun, Stopped

_HINT = "docs/ptx.md explains each finding"

_ptx = Group("ptx", "spark-build ptx run kernel.ptx --launch launch.json")

File = Annotated[Path, Argument("PTX, as nvcc --ptx writes it.", "FILE.ptx")]
Launch = Annotated[Path, Option("Grid, block, parameters and arrays (docs/ptx.md).", "FILE.json")]
Schedules = Annotated[
    tuple[str, ...],
    Option(
        "eager, lazy or random[:SEED]; may be repeated (default: all three).",
        "NAME",
        complete=("eager", "lazy", "random"),
    ),
]


@_ptx.sub(
    "run",
    "spark-build ptx run kernel.ptx --launch launch.json",
    "spark-build ptx run kernel.ptx --launch launch.json --out results",
)
def run(
    file: File,
    launch: Launch,
    schedule: Schedules = (),
    out: Annotated[
        Path | None, Option("Write what each schedule left in the arrays here.", "DIR")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Run a kernel in several schedules and report each result.

    No GPU is needed. Exit 5: a race, deadlock, fault or wrong value.
    """
    from builder.common.files import write_atomically
    from builder.ptx.coverage import spans
    from builder.ptx.runs import run_user_kernel

    user_run = run_user_kernel(file, launch, schedule)
    if out is not None:
        for name, data in user_run.files.items():
            write_atomically(out / name, data)
    result = user_run.kernel_runs
    if json:
        print_json(result)
    else:
        print(f"{result.kernel}: {result.coverage}")
        if console.verbose and result.coverage.unreached:
            print(f"not reached: {', '.join(spans(result.coverage.unreached))}")
        for one in result.runs:
            print("\n".join(_lines(one, result.blocks)))
        if result.differ:
            print(f"the schedules left different values in {', '.join(result.differ)}")
    bad = [one.schedule for one in result.runs if one.bad]
    if bad:
        raise SparkBuildError(
            f"{file}: {result.kernel} is wrong in {', '.join(bad)}", Exit.VERIFY_FAILED, _HINT
        )


@_ptx.sub("races", "spark-build ptx races kernel.ptx --launch launch.json --json")
def races(file: File, launch: Launch, schedule: Schedules = (), *, json: Json = False) -> None:
    """List each race once, with both lines and what is missing.

    No GPU is needed. Exit 5: a race, deadlock or fault.
    """
    from builder.ptx.runs import KernelRaces, run_user_kernel

    result = KernelRaces.of(run_user_kernel(file, launch, schedule).kernel_runs)
    once, stopped = result.races, result.stopped
    if json:
        print_json(result)
    else:
        for race in once:
            print("\n".join(_race(race)))
            print(f"  seen in {', '.join(race.schedules)}")
        for one in stopped:
            print(f"{one.schedule}: {_ended(one)}")
        if not once and not stopped:
            print(f"no races in {', '.join(result.schedules)}")
    if once or stopped:
        problems = counted(len(once), "race")
        problems += f", and {counted(len(stopped), 'schedule')} did not end" if stopped else ""
        message = f"{file}: {result.kernel} has {problems}"
        raise SparkBuildError(message, Exit.VERIFY_FAILED, _HINT)


@_ptx.sub(
    "instructions",
    "spark-build ptx instructions",
    "spark-build ptx instructions kernel.ptx",
)
def instructions(
    file: Annotated[Path | None, Argument("PTX, as nvcc --ptx writes it.", "FILE.ptx")] = None,
    *,
    json: Json = False,
) -> None:
    """Print the instructions that run, or what a file lacks.

    Exit 5: the file has an instruction that does not run.
    """
    from builder.ptx.supported import Instructions, missing_in, table

    result = missing_in(file) if file else Instructions(table(), (), ())
    if json:
        print_json(result)
    elif file:
        for one in result.missing:
            print(f"{one.kernel}, line {one.line}: {one.text}")
            print(f"  {one.why}")
        if not result.missing:
            print(f"every instruction of {counted(len(result.kernels), 'kernel')} runs")
    else:
        for form in result.forms:
            total = len(form.known) + len(form.unknown)
            print(f"{len(form.known):>4} of {total:>3}  {form.form}")
    if result.missing:
        message = f"{file}: {counted(len(result.missing), 'instruction')} of its kernels do not run"
        hint = "docs/ptx-instructions.md lists what runs"
        raise SparkBuildError(message, Exit.VERIFY_FAILED, hint)


def _ended(run: "OwnRun | Stopped") -> str:
    return f"{'deadlock' if run.deadlock else 'fault'}: {run.fault}"


def _lines(run: "OwnRun", blocks: int) -> Iterator[str]:
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


def _race(race: "FoundRace") -> Iterator[str]:
    places = counted(race.places, "place")
    yield f"race: {race.kind}, {places} from {race.memory} offset {race.offset}"
    for line, agent in zip(race.lines, race.agents, strict=True):
        yield f"  {line.by(agent)}: {line.text}"
    if race.missing:
        yield f"  missing: {race.missing}"
