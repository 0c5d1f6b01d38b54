"""A launch in files: the kernel to run, and the expected result.

``launch.json`` names the PTX, the kernel, its grid and block, its parameters, the memory that they
point into, and for a result array the exact values and bounds (docs/ptx.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import UsageError
from builder.ptx.arrays import (
    TYPES,
    array_named,
    as_numbers,
    contents,
    fields,
    parameter,
    read_arrays,
    whole,
)
from builder.ptx.launch import Launch
from builder.ptx.memory import GlobalMemory, Region

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from builder.ptx.arrays import Array
    from builder.ptx.source import Kernel

SCHEMA = 1
_KEYS = (
    "schema", "name", "ptx", "kernel", "grid", "block", "shared", "parameters", "memory", "result",
)  # fmt: skip
#: Threads of a block (CUDA C++ Programming Guide, "Technical Specifications").
_MOST_THREADS = 1024
#: Shared memory of a block, the largest of any architecture (the same table: 227 KiB).
_MOST_SHARED = 227 * 1024
#: The most blocks: all of them exist at once.  Our choice.
_MOST_BLOCKS = 4096


@dataclass(frozen=True)
class ExpectedResult:
    """The expected result: its address, its exact values, and the bound of each."""

    address: int
    shape: tuple[int, ...]
    exact: NDArray[np.float64]
    bound: NDArray[np.float64]
    type: str = "bf16"

    def read(self, memory: GlobalMemory) -> NDArray[np.float64]:
        """The current result."""
        size = TYPES[self.type].itemsize * int(np.prod(self.shape))
        region = memory.find(self.address, self.address + size)
        begin = self.address - region.address
        data = region.data[begin : begin + size].tobytes()
        return as_numbers(data, self.type).reshape(self.shape)


@dataclass(frozen=True)
class Comparison:
    """A result compared with the expected one."""

    values: int
    wrong: int
    nans: int
    #: the position of the worst value, its value, and the expected one
    worst: tuple[tuple[int, ...], float, float, float] | None = None

    def __str__(self) -> str:
        """The comparison as text."""
        if self.worst is None:
            return f"{self.values} values right"
        place, got, exact, bound = self.worst
        nans = f", {self.nans} of them NaN" if self.nans else ""
        where = ",".join(map(str, place))
        return (
            f"{self.wrong} of {self.values} values wrong{nans}; worst at [{where}]: {got:.7g} "
            f"instead of {exact:.7g} +- {bound:.2g}"
        )


def compare(got: NDArray[np.float64], expected: ExpectedResult) -> Comparison:
    """Compare each value with its bound."""
    nans = int(np.isnan(got).sum())
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(got), np.abs(got - expected.exact), np.inf)
        over = ~(error <= expected.bound)  # where either is no number, too
    wrong = int(over.sum())
    if not wrong:
        return Comparison(got.size, 0, nans)
    excess = np.where(over, error - expected.bound, -1.0)
    place = tuple(int(n) for n in np.unravel_index(int(excess.argmax()), got.shape))
    worst = (place, float(got[place]), float(expected.exact[place]), float(expected.bound[place]))
    return Comparison(got.size, wrong, nans, worst)


@dataclass(frozen=True)
class LaunchFile:
    """A launch that can be run any number of times."""

    name: str
    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    parameters: tuple[bytes, ...]
    memory: tuple[Array, ...]
    expected: ExpectedResult | None = None

    def launch(self, kernel: Kernel) -> Launch:
        """The launch, with its parameters in the kernel's layout.

        Raises:
            UsageError: they do not match the kernel's.
        """
        sizes = [p.size for p in kernel.parameters.values()]
        if sizes != [len(part) for part in self.parameters]:
            raise UsageError(
                f"{self.name}: parameters of {[len(p) for p in self.parameters]} bytes; "
                f"{kernel.name[:60]} takes {sizes}"
            )
        space = bytearray(kernel.parameter_bytes)
        for place, part in zip(kernel.parameters.values(), self.parameters, strict=True):
            space[place.offset : place.offset + place.size] = part
        return Launch(self.grid, self.block, self.shared, bytes(space))

    def fresh_memory(self) -> GlobalMemory:
        """A copy of the memory before the launch."""
        return GlobalMemory(
            [
                Region(a.address, np.frombuffer(bytearray(a.data), np.uint8), a.writable, a.name)
                for a in self.memory
            ]
        )


def read_launch(path: Path, ptx: Path | None = None) -> LaunchFile:
    """Read ``launch.json``, the files that it names, and the PTX, by default from the same folder.

    Raises:
        UsageError: the document is malformed, or a file is missing.
    """
    try:
        document = fields(json.loads(path.read_text("utf-8")), "it", _KEYS)
        if document["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema {document['schema']}, not {SCHEMA}")
        memory = read_arrays(path.parent, document["memory"])
        given = document["parameters"]
        if not isinstance(given, list):
            raise TypeError("parameters is not a list")
        return LaunchFile(
            name=str(document.get("name", path.name)),
            ptx=_text(ptx or path.parent / document["ptx"]),
            kernel=str(document.get("kernel", "")),
            grid=_triple(document["grid"], "grid", _MOST_BLOCKS),
            block=_triple(document["block"], "block", _MOST_THREADS),
            shared=_shared(document.get("shared", 0)),
            parameters=tuple(parameter(one, place, memory) for place, one in enumerate(given)),
            memory=memory,
            expected=_expected(path.parent, document["result"], memory)
            if document.get("result")
            else None,
        )
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a launch: {said}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not PTX: it is not UTF-8 text") from None


def _triple(value: Any, what: str, most: int) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{what} is not a list of three numbers: {str(value)[:60]}")
    x, y, z = (whole(size, f"a size of {what}", 1) for size in value)
    if x * y * z > most:
        raise ValueError(f"{what} {value} is {x * y * z}; {most} are the most")
    return x, y, z


def _shared(value: Any) -> int:
    if whole(value, "shared") > _MOST_SHARED:
        raise ValueError(f"shared is {value} bytes; a block has at most {_MOST_SHARED}")
    return int(value)


def _expected(folder: Path, value: Any, memory: tuple[Array, ...]) -> ExpectedResult:
    document = fields(value, "result", ("array", "address", "type", "shape", "exact", "bound"))
    if "array" in document:
        array = array_named(document["array"], "result", memory)
        source = fields(document["exact"], "result's exact", ("file", "values", "fill"))
        shape = list(array.shape)
        data, kind, _ = contents(folder, source, "result's exact", array.type, shape)
        allowed = float(document.get("bound", 0))
        if not 0 <= allowed < np.inf:
            raise ValueError(f"result's bound is not a number of at least 0: {allowed}")
        exact = as_numbers(data, kind).reshape(array.shape)
        bound = np.full(array.shape, allowed)
        return ExpectedResult(array.address, array.shape, exact, bound, kind)
    shape = [whole(size, "a size of the result", 1) for size in document["shape"]]
    if document["type"] not in TYPES:
        raise ValueError(f"results of type {document['type']} are not known")
    exact, bound = (
        np.frombuffer((folder / document[name]).read_bytes(), np.float64).reshape(shape)
        for name in ("exact", "bound")
    )
    return ExpectedResult(
        int(document["address"]), tuple(shape), exact, bound, str(document["type"])
    )
