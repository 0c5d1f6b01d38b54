"""Runs a user's own kernel: the result of each schedule, and its output."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from builder.errors import UsageError
from builder.ptx.arrays import TYPES
from builder.ptx.errors import PtxError
from builder.ptx.findings import FoundRace
from builder.ptx.grid import Schedule
from builder.ptx.launchfile import read_launch
from builder.ptx.runs import SCHEDULES, program_of, run_once
from builder.util.documents import Count, Digest, Document, Part, Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.ptx.arrays import Array
    from builder.ptx.runs import SingleRun


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


class Kernel(Document, frozen=True, kw_only=True):
    """The common beginning of both documents."""

    kernel: Text
    ptx: Annotated[Digest, Meta(description="digest of the PTX")]
    blocks: Annotated[Count, Meta(description="basic blocks of the kernel")]


class KernelRuns(Kernel, frozen=True, kw_only=True):
    """A kernel in every requested schedule."""

    runs: Annotated[tuple[OwnRun, ...], Meta(min_length=1)]
    differ: Annotated[
        tuple[Text, ...],
        Meta(description="arrays in which the schedules left different bytes"),
    ]


class SeenRace(FoundRace, frozen=True):
    """A race, and the schedules in which it was found."""

    schedules: Annotated[
        tuple[Text, ...], Meta(min_length=1, description="schedules in which it was seen")
    ]


class Stopped(Part, frozen=True):
    """A schedule that did not end."""

    schedule: Text
    fault: Text
    deadlock: bool


class KernelRaces(Kernel, frozen=True, kw_only=True):
    """Each race of a kernel once."""

    schedules: Annotated[tuple[Text, ...], Meta(min_length=1)]
    races: tuple[SeenRace, ...]
    stopped: Annotated[tuple[Stopped, ...], Meta(description="schedules that did not end")]

    @classmethod
    def of(cls, ran: KernelRuns) -> KernelRaces:
        """Each race once, by its kind and lines, with the schedules in which it was found."""
        found: dict[object, tuple[FoundRace, list[str]]] = {}
        for run in ran.runs:
            for race in run.races:
                _, names = found.setdefault(race.key, (race, []))
                names.append(run.schedule)
        return cls(
            kernel=ran.kernel,
            ptx=ran.ptx,
            blocks=ran.blocks,
            schedules=tuple(run.schedule for run in ran.runs),
            races=tuple(
                SeenRace(**asdict(race), schedules=tuple(names)) for race, names in found.values()
            ),
            stopped=tuple(
                Stopped(run.schedule, run.fault, run.deadlock) for run in ran.runs if run.fault
            ),
        )


@dataclass(frozen=True)
class UserRun:
    """The findings, and the arrays that the kernel wrote: ``SCHEDULE/NAME.npy``."""

    found: KernelRuns
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
    runs, files = [], {}
    for schedule in schedules:
        single = run_once(file, program, schedule, watch=True)
        outputs = []
        for array, data in _written(file.memory, single):
            digest = hashlib.sha256(data).hexdigest()
            outputs.append(Output(array.name, array.type, array.shape, f"sha256:{digest}"))
            name = array.name.removesuffix(".npy")
            files[f"{str(schedule).replace(' ', '-')}/{name}.npy"] = _npy(array, data)
        run = single.run
        runs.append(
            OwnRun(run.schedule, run.fault, run.deadlock, run.races, run.values, run.wrong,
                   run.said, run.instructions, len(run.covered), tuple(outputs))
        )  # fmt: skip
    digest = hashlib.sha256(file.ptx.encode()).hexdigest()
    found = KernelRuns(
        kernel=program.kernel.name,
        ptx=f"sha256:{digest}",
        blocks=len(program.blocks),
        runs=tuple(runs),
        differ=_differ(runs),
    )
    return UserRun(found, files)


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
