"""A kernel of one's own, run by hand: what each schedule showed, and what it wrote."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import UsageError
from builder.ptx.errors import PtxError
from builder.ptx.grid import Schedule
from builder.ptx.launchfile import read_launch
from builder.ptx.runs import SCHEDULES, program_of, run_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.ptx.arrays import Array
    from builder.ptx.findings import FoundRace
    from builder.ptx.runs import Once


def _plain(value: Any) -> Any:
    """A value of dataclasses as JSON has it: lists instead of tuples."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Output:
    """What a kernel left in an array that it may write."""

    name: str
    type: str
    shape: tuple[int, ...]
    sha256: str
    data: bytes

    def as_json(self) -> dict[str, Any]:
        """Without the data."""
        return {key: value for key, value in asdict(self).items() if key != "data"}


@dataclass(frozen=True)
class OwnRun:
    """One schedule."""

    schedule: str
    #: why it did not end
    fault: str
    deadlock: bool
    races: tuple[FoundRace, ...]
    #: values that were compared with the wanted ones, how many are wrong, and in words
    values: int
    wrong: int
    said: str
    instructions: int
    #: basic blocks that ran
    covered: int
    outputs: tuple[Output, ...]

    @property
    def bad(self) -> bool:
        """Whether something was found."""
        return bool(self.fault or self.races or self.wrong)


@dataclass(frozen=True)
class Owned:
    """A kernel in every schedule that was asked for."""

    kernel: str
    ptx: str
    #: basic blocks of the kernel
    blocks: int
    runs: tuple[OwnRun, ...]

    @property
    def differ(self) -> tuple[str, ...]:
        """Arrays in which the schedules that ended left different bytes."""
        seen: dict[str, set[str]] = {}
        for run in self.runs:
            for output in run.outputs if not run.fault else ():
                seen.setdefault(output.name, set()).add(output.sha256)
        return tuple(name for name, digests in seen.items() if len(digests) > 1)

    def head(self) -> dict[str, Any]:
        """What both documents begin with."""
        return {"schema": 1, "kernel": self.kernel, "ptx": self.ptx, "blocks": self.blocks}

    def as_json(self) -> dict[str, Any]:
        """The document of ``ptx run``."""
        runs = [
            {**asdict(run), "outputs": [output.as_json() for output in run.outputs]}
            for run in self.runs
        ]
        document: dict[str, Any] = _plain({**self.head(), "runs": runs, "differ": self.differ})
        return document

    def races_as_json(self) -> dict[str, Any]:
        """The document of ``ptx races``."""
        found = [{**asdict(race), "schedules": names} for race, names in self.races()]
        stopped = [
            {"schedule": run.schedule, "fault": run.fault, "deadlock": run.deadlock}
            for run in self.runs
            if run.fault
        ]
        schedules = [run.schedule for run in self.runs]
        document: dict[str, Any] = _plain({**self.head(), "schedules": schedules, "races": found})
        return {**document, "stopped": stopped}

    def races(self) -> list[tuple[FoundRace, list[str]]]:
        """Each race once, by its kind and lines, with the schedules that showed it."""
        found: dict[object, tuple[FoundRace, list[str]]] = {}
        for run in self.runs:
            for race in run.races:
                _, names = found.setdefault(race.key, (race, []))
                names.append(run.schedule)
        return list(found.values())


def schedules_of(words: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules of ``eager``, ``lazy``, ``random`` and ``random:SEED``; without words, all.

    Raises:
        UsageError: one is not known.
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
    raise UsageError(f"no schedule {word!r}; there is eager, lazy, random and random:SEED")


def run_own(ptx: Path, launch: Path, words: Sequence[str] = ()) -> Owned:
    """Run a kernel in each schedule, watching for races.

    Raises:
        UsageError: a file is missing or not understood, or the launch does not suit the kernel.
    """
    schedules = schedules_of(words)
    file = read_launch(launch, ptx)
    try:
        program = program_of(file, ptx)
    except PtxError as error:
        raise UsageError(f"{ptx}: {error}", hint=error.hint) from None
    runs = []
    for schedule in schedules:
        once = run_once(file, program, schedule, watch=True)
        outputs = tuple(_outputs(file.memory, once))
        run = once.run
        runs.append(
            OwnRun(run.schedule, run.fault, run.deadlock, run.races, run.values, run.wrong,
                   run.said, run.instructions, len(run.covered), outputs)
        )  # fmt: skip
    digest = hashlib.sha256(file.ptx.encode()).hexdigest()
    return Owned(program.kernel.name, f"sha256:{digest}", len(program.blocks), tuple(runs))


def _outputs(arrays: Sequence[Array], once: Once) -> Iterator[Output]:
    for array, region in zip(arrays, once.memory.regions, strict=True):
        if array.writable:
            data = region.data.tobytes()
            digest = hashlib.sha256(data).hexdigest()
            yield Output(array.name, array.type, array.shape, f"sha256:{digest}", data)


def files_of(owned: Owned) -> dict[str, bytes]:
    """The outputs as ``SCHEDULE/NAME.npy``; bfloat16 as its bits, in ``uint16``."""
    from builder.ptx.arrays import TYPES

    found = {}
    for run in owned.runs:
        for output in run.outputs:
            file = io.BytesIO()
            np.save(file, np.frombuffer(output.data, TYPES[output.type]).reshape(output.shape))
            name = output.name.removesuffix(".npy")
            found[f"{run.schedule.replace(' ', '-')}/{name}.npy"] = file.getvalue()
    return found
