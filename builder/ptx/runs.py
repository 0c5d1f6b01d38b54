"""Runs launches in several schedules and reports each; also a user's own kernel."""

from __future__ import annotations

import gc
import hashlib
import io
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta, structs
from msgspec.structs import asdict

from builder.common.document import Count, Digest, Document, Part, Text
from builder.errors import UsageError
from builder.ptx.coverage import Coverage, coverage_of
from builder.ptx.findings import CallRuns, FoundRace, Line, Ran, Run
from builder.ptx.grid import Grid, Schedule
from builder.ptx.launchfile import TYPES, compare, read_launch
from builder.ptx.machine import Deadlock, Fault, PtxError
from builder.ptx.program import Program
from builder.ptx.source import module_of, without_places

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.ptx.launchfile import Array, LaunchFile
    from builder.ptx.memory import GlobalMemory
    from builder.ptx.races import Race
    from builder.ptx.source import Module, Places

#: Copies at once, as late as possible, and at random times: each finds other errors.
SCHEDULES = (Schedule("eager"), Schedule("lazy"), Schedule("random", 1))
#: New objects after which Python looks for cycles.  The default, 700, takes a twentieth of the time
#: for the many objects of decoded kernels, which stay.  Our choice: 8 MB more.
_COLLECTED = 100_000


def run_file(path: Path, schedules: Sequence[Schedule] = SCHEDULES) -> Ran:
    """Run a launch in each schedule, watching for races.

    Raises:
        UsageError: it is not a launch, its PTX cannot be read, or lacks the kernel.
    """
    return run_files([path], schedules)[0]


def run_files(paths: Sequence[Path], schedules: Sequence[Schedule] = SCHEDULES) -> list[Ran]:
    """Run launches one after the other, each on the memory that the earlier ones left.

    Raises:
        UsageError: one is not a launch, its PTX cannot be read, or lacks the kernel.
    """
    files = [read_launch(path) for path in paths]
    programs = [program_of(file, path) for file, path in zip(files, paths, strict=True)]
    runs: list[list[Run]] = [[] for _ in files]
    copies = any(one.opcode == "cp" for program in programs for one in program.kernel.code)
    same = not copies and not any(program.polls for program in programs)
    for schedule in schedules:
        if schedule.order == "lazy" and same and _eager(runs):
            for own in runs:
                own.append(_as_lazy(own))
            continue
        carried_memory = CarriedMemory()
        for number, (file, program) in enumerate(zip(files, programs, strict=True)):
            memory = carried_memory.memory_for(file)
            watch = watches(schedule, program)
            single = run_once(file, program, schedule, watch=watch, as_gpus=True, memory=memory)
            runs[number].append(single.run)
            if single.run.fault:
                break
            carried_memory.keep(file, memory)
    return [_ran(*one) for one in zip(files, programs, runs, strict=True)]


def _ran(file: LaunchFile, program: Program, runs: Sequence[Run]) -> Ran:
    """All runs of a launch."""
    digest = hashlib.sha256(without_places(file.ptx).encode()).hexdigest()
    seen = coverage_of(program, (block for run in runs for block in run.covered))
    return Ran(program.kernel.name, digest, seen.blocks, tuple(runs), seen.lines, seen.unreached)


def watches(schedule: Schedule, program: Program) -> bool:
    """Whether races are looked for.

    With late copies they are the same, unless blocks wait for others: there the last block goes
    first, so that one that does not wait has no order after the first.
    """
    return schedule.order != "lazy" or program.polls


def _eager(runs: Sequence[Sequence[Run]]) -> bool:
    """Whether all launches have run in the eager schedule."""
    return all(any(run.schedule == "eager" for run in own) for own in runs)


def _as_lazy(runs: Sequence[Run]) -> Run:
    """The lazy schedule without copies to delay or blocks to wait for: as the eager one."""
    eager = next(run for run in runs if run.schedule == "eager")
    return structs.replace(eager, schedule="lazy", watched=False, races=())


class CarriedMemory:
    """Memory that is passed between launches, although all host code ran before the first launch.

    If both a kernel and then the host code changed an array, each byte is the host code's
    if that differs from the byte before the kernel.
    """

    def __init__(self) -> None:
        self._changes: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def memory_for(self, file: LaunchFile) -> GlobalMemory:
        """The memory at the start of a launch."""
        memory = file.fresh_memory()
        for array, region in zip(file.memory, memory.regions, strict=True):
            before, after = self._changes.get((array.address, len(array.data)), (b"", b""))
            if before:
                old, new = (np.frombuffer(data, np.uint8) for data in (before, after))
                region.data[...] = np.where(region.data == old, new, region.data)
        return memory

    def keep(self, file: LaunchFile, memory: GlobalMemory) -> None:
        """Store the memory after a launch."""
        for array, region in zip(file.memory, memory.regions, strict=True):
            key = (array.address, len(array.data))
            self._changes[key] = (array.data, region.data.tobytes())


def program_of(file: LaunchFile, path: Path) -> Program:
    """The kernel that a launch names, decoded.

    Raises:
        UsageError: the PTX cannot be read, or does not have one kernel of this name.
    """
    return _program(file.ptx, kernel_named(_module(file.ptx).entries, file.kernel, path))


def kernel_named(kernels: Sequence[str], name: str, path: Path) -> str:
    """The kernel of a name, or of a part of it that no other has; without a name, the only one.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = [name] if name in kernels else [one for one in kernels if name in one]
    if len(found) == 1:
        return found[0]
    if found:
        which = f"{name!r} is a part of" if name else "which kernel? it has"
        raise UsageError(f"{path}: {which} {len(found)} names: {', '.join(found)}")
    what = f"no kernel {name}; it has {', '.join(kernels)}" if kernels else "it has no kernel"
    raise UsageError(f"{path}: {what}")


@lru_cache(maxsize=4)
def _module(ptx: str) -> Module:
    return module_of(ptx)


@lru_cache(maxsize=4)
def _program(ptx: str, name: str) -> Program:
    """Decode and cache a kernel: its launches follow each other."""
    return Program(_module(ptx).kernel(name))


@dataclass(frozen=True)
class SingleRun:
    """One run, and the memory after it."""

    run: Run
    memory: GlobalMemory


def run_once(
    file: LaunchFile,
    program: Program,
    schedule: Schedule,
    *,
    watch: bool,
    as_gpus: bool = False,
    strict: bool = False,
    memory: GlobalMemory | None = None,
) -> SingleRun:
    """Run a launch in one schedule, on its own memory or on the given one.

    ``as_gpus``, ``strict``: with races as `LaunchRaces` says.

    Raises:
        UsageError: its parameters do not match the kernel's.
    """
    memory = memory or file.fresh_memory()
    fields: dict[str, Any] = {"launch": file.name, "schedule": str(schedule), "watched": watch}
    launch = file.launch(program.kernel)
    grid = Grid(program, launch, memory, schedule, watch=watch, as_gpus=as_gpus, strict=strict)
    places = program.kernel.places
    ended = False
    try:
        grid.run()
        ended = True
    except Fault as fault:
        fault.source = places.at(fault.line)
        fields.update(fault=str(fault), deadlock=isinstance(fault, Deadlock))
    races = grid.races()
    fields["races"] = tuple(distinct_races(races, file.ptx.split("\n"), places)) if races else ()
    fields["instructions"] = grid.outcome.instructions
    fields["covered"] = tuple(sorted(grid.outcome.covered))
    if ended and file.expected is not None:
        comparison = compare(file.expected.read(memory), file.expected)
        fields.update(values=comparison.values, wrong=comparison.wrong)
        fields["said"] = str(comparison) if comparison.wrong else ""
    return SingleRun(Run(**fields), memory)


def distinct_races(races: Sequence[Race], text: Sequence[str], places: Places) -> list[FoundRace]:
    """Races with the lines of their PTX, each pair once, because it occurs in many blocks."""
    by_key: dict[object, FoundRace] = {}
    for race in races:
        numbers = [race.line, race.other] if race.other else [race.line]
        lines = tuple(Line(n, text[n - 1].strip(), places.at(n)) for n in numbers)
        described = FoundRace(
            race.kind, lines, race.agents[: len(lines)], race.offset, race.words,
            race.memory, race.missing,
        )  # fmt: skip
        by_key[described.key] = described
    return list(by_key.values())


def run_folders(folders: Sequence[str]) -> CallRuns:
    """Run the launches of one call, for a process of its own."""
    paths = [Path(folder) / "launch.json" for folder in folders]
    try:
        return CallRuns(ran=tuple(run_files(paths)))
    except PtxError as error:
        return CallRuns(error=str(error))


def run_calls(calls: Sequence[Sequence[str]], jobs: int) -> list[CallRuns]:
    """Run the launches of some calls in processes; those of the same kernels in the same one."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for number, folders in enumerate(calls):
        same = tuple((Path(folder) / "kernel.ptx").read_bytes() for folder in folders)
        groups.setdefault(same, []).append(number)
    if len(groups) < 2:
        return [run_folders(folders) for folders in calls]
    order = [[calls[number] for number in numbers] for numbers in groups.values()]
    # not forked: numpy may have threads here
    with ProcessPoolExecutor(
        max(1, jobs),
        mp_context=get_context("spawn"),
        initializer=gc.set_threshold,
        initargs=(_COLLECTED,),
    ) as pool:
        results = [one for many in pool.map(_run_each, order) for one in many]
    numbers = [number for numbers in groups.values() for number in numbers]
    by_number = dict(zip(numbers, results, strict=True))
    return [by_number[number] for number in range(len(calls))]


def _run_each(calls: Sequence[Sequence[str]]) -> list[CallRuns]:
    return [run_folders(folders) for folders in calls]


# ------------------------------------------------------------------------------ a user's own kernel


class Output(Part, frozen=True):
    """The contents of a writable array after a run."""

    name: Text
    type: Text
    shape: tuple[Count, ...]
    sha256: Digest


class OwnRun(Part, frozen=True):
    """The run of one schedule."""

    schedule: Text
    fault: Annotated[str, Meta(description="why the run did not end; empty when it did")]
    deadlock: bool
    races: tuple[FoundRace, ...]
    values: Annotated[Count, Meta(description="values compared with the wanted ones")]
    wrong: Count
    said: Annotated[str, Meta(description="the wrong values in words")]
    instructions: Annotated[Count, Meta(description="instructions that warps ran")]
    covered: Annotated[Count, Meta(description="basic blocks that ran")]
    outputs: Annotated[tuple[Output, ...], Meta(description="arrays that the kernel may write")]

    @property
    def bad(self) -> bool:
        """Whether there is a finding."""
        return bool(self.fault or self.races or self.wrong)


class RunKernel(Document, frozen=True, kw_only=True):
    """The common beginning of both documents."""

    kernel: Text
    ptx: Annotated[Digest, Meta(description="digest of the PTX")]
    blocks: Annotated[Count, Meta(description="basic blocks of the kernel")]


class KernelRuns(RunKernel, frozen=True, kw_only=True):
    """A kernel in every requested schedule."""

    runs: Annotated[tuple[OwnRun, ...], Meta(min_length=1)]
    differ: Annotated[
        tuple[Text, ...],
        Meta(description="arrays in which the schedules left different bytes"),
    ]
    coverage: Annotated[Coverage, Meta(description="what ran in any schedule")]


class SeenRace(FoundRace, frozen=True, kw_only=True):
    """A race, and the schedules in which it was found."""

    schedules: Annotated[
        tuple[Text, ...], Meta(min_length=1, description="schedules in which it was seen")
    ]


class Stopped(Part, frozen=True):
    """A schedule that did not end."""

    schedule: Text
    fault: Text
    deadlock: bool


class KernelRaces(RunKernel, frozen=True, kw_only=True):
    """Each race of a kernel once."""

    schedules: Annotated[tuple[Text, ...], Meta(min_length=1)]
    races: tuple[SeenRace, ...]
    stopped: Annotated[tuple[Stopped, ...], Meta(description="schedules that did not end")]

    @classmethod
    def of(cls, kernel_runs: KernelRuns) -> KernelRaces:
        """Each race once, by its kind and lines, with the schedules in which it was found."""
        by_key: dict[object, tuple[FoundRace, list[str]]] = {}
        for run in kernel_runs.runs:
            for race in run.races:
                _, names = by_key.setdefault(race.key, (race, []))
                names.append(run.schedule)
        return cls(
            kernel=kernel_runs.kernel,
            ptx=kernel_runs.ptx,
            blocks=kernel_runs.blocks,
            schedules=tuple(run.schedule for run in kernel_runs.runs),
            races=tuple(
                SeenRace(**asdict(race), schedules=tuple(names)) for race, names in by_key.values()
            ),
            stopped=tuple(
                Stopped(run.schedule, run.fault, run.deadlock)
                for run in kernel_runs.runs
                if run.fault
            ),
        )


@dataclass(frozen=True)
class UserRun:
    """The findings, and the arrays that the kernel wrote: ``SCHEDULE/NAME.npy``."""

    kernel_runs: KernelRuns
    files: dict[str, bytes]


def schedules_of(words: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules of ``eager``, ``lazy``, ``random`` and ``random:SEED``; without words, all.

    Raises:
        UsageError: one is unknown.
    """
    return tuple(dict.fromkeys(map(_schedule, words))) or SCHEDULES


def _schedule(word: str) -> Schedule:
    if word == "eager":
        return Schedule("eager")
    if word == "lazy":
        return Schedule("lazy")
    order, colon, seed = word.partition(":")
    if order == "random" and (not colon or re.fullmatch("[0-9]{1,9}", seed)):
        return Schedule("random", int(seed or 1))
    raise UsageError(f"no schedule {word!r}; the schedules are eager, lazy, random and random:SEED")


def run_user_kernel(ptx: Path, launch: Path, words: Sequence[str] = ()) -> UserRun:
    """Run a kernel in each schedule, watching for races.

    Raises:
        UsageError: a file is missing or malformed, or the launch does not match the kernel.
    """
    schedules = schedules_of(words)
    file = read_launch(launch, ptx)
    try:
        program = program_of(file, ptx)
    except PtxError as error:
        raise UsageError(f"{ptx}: {error}", hint=error.hint) from None
    runs, files, covered = [], {}, set[int]()
    for schedule in schedules:
        try:
            single = run_once(file, program, schedule, watch=True)
        except PtxError as error:
            raise UsageError(f"{ptx}: {error}") from error
        outputs = []
        for array, data in _written(file.memory, single):
            digest = hashlib.sha256(data).hexdigest()
            outputs.append(Output(array.name, array.type, array.shape, f"sha256:{digest}"))
            name = array.name.removesuffix(".npy")
            files[f"{str(schedule).replace(' ', '-')}/{name}.npy"] = _npy(array, data)
        run = single.run
        covered |= {*run.covered}
        runs.append(
            OwnRun(run.schedule, run.fault, run.deadlock, run.races, run.values, run.wrong,
                   run.said, run.instructions, len(run.covered), tuple(outputs))
        )  # fmt: skip
    digest = hashlib.sha256(file.ptx.encode()).hexdigest()
    kernel_runs = KernelRuns(
        kernel=program.kernel.name,
        ptx=f"sha256:{digest}",
        blocks=len(program.blocks),
        runs=tuple(runs),
        differ=_differ(runs),
        coverage=coverage_of(program, covered),
    )
    return UserRun(kernel_runs, files)


def _differ(runs: Sequence[OwnRun]) -> tuple[str, ...]:
    """Arrays whose bytes differ between completed schedules."""
    seen: dict[str, set[str]] = {}
    for run in runs:
        for output in run.outputs if not run.fault else ():
            seen.setdefault(output.name, set()).add(output.sha256)
    return tuple(name for name, digests in seen.items() if len(digests) > 1)


def _written(arrays: Sequence[Array], single: SingleRun) -> Iterator[tuple[Array, bytes]]:
    for array, region in zip(arrays, single.memory.regions, strict=True):
        if array.writable:
            yield array, region.data.tobytes()


def _npy(array: Array, data: bytes) -> bytes:
    """An array as a .npy file; bfloat16 by its bits, as ``uint16``."""
    file = io.BytesIO()
    np.save(file, np.frombuffer(data, TYPES[array.type]).reshape(array.shape))
    return file.getvalue()
