"""Runs a kernel from Python: numpy arrays in and out, races and faults as values.

result = run(ptx, "add", grid=4, block=128, arguments=[x, y, out, np.int32(n)])
assert not result.races
np.testing.assert_allclose(result[out], x + y)
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import UsageError
from builder.ptx.coverage import coverage_of
from builder.ptx.decoder import MOST_SHARED
from builder.ptx.launchfile import (
    APART,
    FIRST,
    MOST_BLOCKS,
    MOST_OF_CLUSTER,
    MOST_THREADS,
    Array,
    LaunchFile,
    check_memory,
    read_text,
)
from builder.ptx.memory import encode_tensor
from builder.ptx.runs import program_of, run_once, schedules_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import SupportsIndex

    from numpy.typing import NDArray

    from builder.ptx.coverage import Coverage
    from builder.ptx.findings import FoundRace
    from builder.ptx.source import Kernel, Parameter

    #: One to three numbers, of Python's or numpy's.
    Size = SupportsIndex | Sequence[SupportsIndex] | NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Pointer:
    """The address of an array's element as an argument: ``offset`` in bytes."""

    array: NDArray[Any]
    offset: int = 0


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A tensor map (TMA descriptor) of an array as an argument.

    ``box``: the tile's size along each axis of the array.  ``swizzle``: 0, 32, 64 or 128 bytes.
    ``packed``: the bytes hold two 4-bit elements each; the box counts elements.
    """

    array: NDArray[Any]
    box: tuple[int, ...]
    swizzle: int = 0
    packed: bool = False


@dataclass(frozen=True)
class ScheduleRun:
    """What one schedule left and showed."""

    schedule: str
    #: why it did not end; empty if it did
    fault: str
    deadlock: bool
    races: tuple[FoundRace, ...]
    instructions: int
    #: the arrays after the run, in the order in which the arguments first name them
    arrays: tuple[NDArray[Any], ...]


@dataclass(frozen=True, repr=False)
class Result:
    """A kernel in every schedule; ``result[x]`` is array ``x`` after the first one."""

    kernel: str
    runs: tuple[ScheduleRun, ...]
    #: how much of the kernel ran, and which lines did not, in all schedules together
    coverage: Coverage
    _arrays: tuple[NDArray[Any], ...]

    def __getitem__(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array that was given, after the first schedule."""
        return self.after(array, 0)

    def after(self, array: NDArray[Any], run: int) -> NDArray[Any]:
        """An array that was given, after a schedule by its number."""
        for one, contents in zip(self._arrays, self.runs[run].arrays, strict=True):
            if one is array:
                return contents
        raise KeyError("the array is no argument of the kernel")

    @property
    def races(self) -> tuple[FoundRace, ...]:
        """Each race once."""
        return tuple({race.key: race for run in self.runs for race in run.races}.values())

    @property
    def faults(self) -> tuple[str, ...]:
        """Why schedules did not end."""
        return tuple(f"{run.schedule}: {run.fault}" for run in self.runs if run.fault)

    @property
    def differ(self) -> bool:
        """Whether schedules left different bytes."""
        outcomes = {tuple(a.tobytes() for a in run.arrays) for run in self.runs if not run.fault}
        return len(outcomes) > 1

    def check(self) -> None:
        """Check that there is no race and no fault.

        Raises:
            AssertionError: there is one; the message lists all.
        """
        if self.races or self.faults:
            raise AssertionError(f"{self.kernel}:\n{self}")

    def __str__(self) -> str:
        """The findings, one a line; without any, how much of the kernel that is said of."""
        found = [*map(str, self.races), *self.faults]
        return "\n".join(found) or f"no race and no fault; {self.coverage}"

    __repr__ = __str__


def run(
    ptx: str | Path,
    kernel: str,
    grid: Size,
    block: Size,
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    shared: SupportsIndex = 0,
    cluster: Size | None = None,
    schedules: Sequence[str] = (),
) -> Result:
    """Run a kernel in each schedule, watching for races.

    ``ptx``: the text, or a path.  ``kernel``: its name, or a part of it that no other kernel has;
    a compiler may have lengthened it.  ``arguments``: in the order of the parameters; a mapping
    also gives the arrays their names in messages.  An array is passed as its address, and only
    if numpy may write to it the kernel may; numpy's numbers are passed as they are, Python's in
    the type of the parameter, and bytes unchanged.  The arrays themselves are left alone.
    ``shared``: dynamic shared memory in bytes.  ``cluster``: blocks of a cluster, if the kernel
    does not say so itself.  ``schedules``: as in ``spark-build ptx``.

    Raises:
        UsageError: the PTX cannot be read, or the arguments do not match the kernel.
    """
    file, arrays = launch_of(ptx, kernel, grid, block, arguments, shared=shared, cluster=cluster)
    program, runs, covered = program_of(file, Path("kernel")), [], set[int]()
    for schedule in schedules_of(schedules):
        single = run_once(file, program, schedule, watch=True)
        contents = tuple(
            np.frombuffer(region.data.tobytes(), array.dtype).reshape(array.shape)
            for region, array in zip(single.memory.regions, arrays, strict=True)
        )
        one = single.run
        covered |= {*one.covered}
        runs.append(
            ScheduleRun(
                str(schedule), one.fault, one.deadlock, one.races, one.instructions, contents
            )
        )
    coverage = coverage_of(program, covered)
    return Result(program.kernel.name, tuple(runs), coverage, tuple(arrays))


def launch_of(
    ptx: str | Path,
    kernel: str,
    grid: Size,
    block: Size,
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    shared: SupportsIndex = 0,
    cluster: Size | None = None,
) -> tuple[LaunchFile, list[NDArray[Any]]]:
    """The launch that `run` runs, and the arrays of its memory, in order.

    Raises:
        UsageError: as `run`.
    """
    text = read_text(ptx) if isinstance(ptx, Path) else ptx
    names = list(arguments) if isinstance(arguments, dict) else None
    values = list(arguments.values()) if isinstance(arguments, dict) else list(arguments)
    sizes = _triple(grid, "a grid", MOST_BLOCKS), _triple(block, "a block", MOST_THREADS)
    file = LaunchFile("launch", text, kernel, *sizes, 0, (), ())
    program = program_of(file, Path("kernel"))
    arrays, memory = _arrays(values, names)
    size = _whole(shared)
    if size is None or not 0 <= size <= MOST_SHARED:
        raise UsageError(f"shared is {shared!r:.60}: whole bytes, at most {MOST_SHARED}")
    parameters = _parameters(values, program.kernel, arrays, memory)
    clusters = None if cluster is None else _triple(cluster, "a cluster", MOST_OF_CLUSTER)
    changes: dict[str, Any] = {"kernel": program.kernel.name, "shared": size}
    return replace(file, parameters=parameters, memory=memory, cluster=clusters, **changes), arrays


def _triple(size: Size, what: str, most: int) -> tuple[int, int, int]:
    sizes = [*size] if isinstance(size, list | tuple | np.ndarray) and np.ndim(size) else [size]
    whole = [*filter(None, map(_whole, sizes))]
    if not 1 <= len(sizes) <= 3 or len(whole) < len(sizes) or min(whole) < 1:
        raise UsageError(f"{what} of {size}: one to three numbers of at least 1")
    x, y, z = (*whole, 1, 1)[:3]
    if x * y * z > most:
        raise UsageError(f"{what} of {size}: {most} are the most")
    return x, y, z


def _whole(value: Any) -> int | None:
    """A whole number of Python's or numpy's, also as an array of no dimensions."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _array_of(value: Any) -> NDArray[Any] | None:
    if isinstance(value, Pointer | TensorMap):
        return value.array
    return value if isinstance(value, np.ndarray) and value.ndim else None


def _arrays(
    values: Sequence[Any], names: Sequence[str] | None
) -> tuple[list[NDArray[Any]], tuple[Array, ...]]:
    """The distinct arrays among arguments, and the memory that they become."""
    arrays: list[NDArray[Any]] = []
    memory: list[Array] = []
    address = FIRST
    for place, value in enumerate(values):
        array = _array_of(value)
        if array is None or any(one is array for one in arrays):
            continue
        if not array.flags.c_contiguous or not array.size:
            raise UsageError(f"argument {place} is not an array in C order with elements")
        name = names[place] if names else f"argument {place}"
        arrays.append(array)
        try:
            check_memory(array.nbytes + sum(len(one.data) for one in memory))
        except ValueError as error:
            raise UsageError(f"the launch: {error}") from None
        data = array.tobytes()
        memory.append(Array(name, address, data, array.flags.writeable, "u8", (len(data),)))
        address += -(-len(data) // APART) * APART + APART
    return arrays, tuple(memory)


def _parameters(
    values: Sequence[Any], kernel: Kernel, arrays: Sequence[Any], memory: Sequence[Array]
) -> tuple[bytes, ...]:
    wanted = [*kernel.parameters.values()]
    if len(values) != len(wanted):
        raise UsageError(f"{len(values)} arguments; {kernel.name[:60]} takes {len(wanted)}")
    parameters = []
    for place, (value, one) in enumerate(zip(values, wanted, strict=True)):
        array = _array_of(value)
        address = 0
        if array is not None:
            address = next(m.address for m, own in zip(memory, arrays, strict=True) if own is array)
        data = _bytes(value, one, address, f"argument {place}")
        if len(data) != one.size:
            has = f"has {len(data)} bytes; the parameter has {one.size}"
            raise UsageError(f"argument {place} {has}")
        parameters.append(data)
    return tuple(parameters)


def _bytes(value: Any, parameter: Parameter, address: int, what: str) -> bytes:
    if isinstance(value, TensorMap):
        try:
            return encode_tensor(address, value.array, value.box, value.swizzle, value.packed)
        except ValueError as error:
            raise UsageError(f"{what}: {error}") from None
    if address:
        at = address + int(getattr(value, "offset", 0))
        if not 0 <= at < 2**64:
            raise UsageError(f"{what}: an offset of {value.offset} bytes")
        return at.to_bytes(8, "little")
    if isinstance(value, np.generic | np.ndarray):
        _check_kind(value, parameter, what)
        return value.tobytes()
    if isinstance(value, bytes):
        return value
    return _number(value, parameter, what)


def _check_kind(value: Any, parameter: Parameter, what: str) -> None:
    """Refuse a number of numpy's whose bits mean another number in the parameter's type."""
    of_numpy = {"i": "us", "u": "us", "f": "f"}.get(value.dtype.kind, "")
    if of_numpy and parameter.kind in ("u", "s", "f") and parameter.kind not in of_numpy:
        raise UsageError(
            f"{what} is a {value.dtype} of numpy's, {value}; the parameter is "
            f".{parameter.kind}{8 * parameter.size}"
        )


def _number(value: Any, parameter: Parameter, what: str) -> bytes:
    """A number of Python in the type of a parameter."""
    size, kind = parameter.size, parameter.kind
    if isinstance(value, float) and kind in ("u", "s"):
        raise UsageError(f"{what} is {value}; the parameter is a whole number, .{kind}{8 * size}")
    try:
        if isinstance(value, int) and kind == "f" and size in (4, 8):
            value = float(value)
        if isinstance(value, int):
            return value.to_bytes(size, "little", signed=value < 0)
        if isinstance(value, float) and size in (4, 8):
            return struct.pack("<f" if size == 4 else "<d", value)
    except OverflowError:
        raise UsageError(f"{what}: {value} does not fit into {size} bytes") from None
    raise UsageError(f"{what} is neither an array, a number nor bytes: {value!r:.60}")
