"""A launch in files: what to run, and what may come out of it.

``launch.json`` names the PTX, the kernel, its grid and block, the bytes of its parameters, the
memory that they point into, and where one array is the result, the exact one and its bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import UsageError
from builder.ptx.formats import from_bf16
from builder.ptx.grid import Launch
from builder.ptx.memory import GlobalMemory, Region

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from builder.ptx.source import Kernel

SCHEMA = 1


@dataclass(frozen=True)
class Wanted:
    """Where the result will lie, what it should be, and how far each value may be off."""

    address: int
    shape: tuple[int, ...]
    exact: NDArray[np.float64]
    bound: NDArray[np.float64]

    def read(self, memory: GlobalMemory) -> NDArray[np.float64]:
        """The result as it is now, which is bfloat16."""
        size = 2 * int(np.prod(self.shape))
        region = memory.find(self.address, self.address + size)
        begin = self.address - region.address
        bits = region.data[begin : begin + size].view(np.uint16)
        return from_bf16(bits).astype(np.float64).reshape(self.shape)


@dataclass(frozen=True)
class Judgement:
    """A result held against what is wanted."""

    values: int
    wrong: int
    nans: int
    #: the place of the worst value, what it is, and what it should be
    worst: tuple[tuple[int, ...], float, float, float] | None = None

    def __str__(self) -> str:
        """In words."""
        if self.worst is None:
            return f"{self.values} values right"
        place, got, exact, bound = self.worst
        nans = f", {self.nans} of them NaN" if self.nans else ""
        where = ",".join(map(str, place))
        return (
            f"{self.wrong} of {self.values} values wrong{nans}; worst at [{where}]: {got:.7g} "
            f"instead of {exact:.7g} +- {bound:.2g}"
        )


def judge(got: NDArray[np.float64], wanted: Wanted) -> Judgement:
    """Compare each value with its bound."""
    nans = int(np.isnan(got).sum())
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(got), np.abs(got - wanted.exact), np.inf)
    over = error > wanted.bound
    wrong = int(over.sum())
    if not wrong:
        return Judgement(got.size, 0, nans)
    excess = np.where(over, error - wanted.bound, -1.0)
    place = tuple(int(n) for n in np.unravel_index(int(excess.argmax()), got.shape))
    worst = (place, float(got[place]), float(wanted.exact[place]), float(wanted.bound[place]))
    return Judgement(got.size, wrong, nans, worst)


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
    #: address, contents, whether a kernel may write there, name
    memory: tuple[tuple[int, bytes, bool, str], ...]
    wanted: Wanted | None = None

    def launch(self, kernel: Kernel) -> Launch:
        """The launch, with its parameters where the kernel has them.

        Raises:
            UsageError: they are not the kernel's.
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
        """The memory as it was before the launch."""
        return GlobalMemory(
            [
                Region(address, np.frombuffer(bytearray(data), np.uint8), writable, name)
                for address, data, writable, name in self.memory
            ]
        )


def read_launch(path: Path) -> LaunchFile:
    """Read ``launch.json`` and the files that it names beside it.

    Raises:
        UsageError: it is no such document, or a file is missing.
    """
    folder = path.parent
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema {document['schema']}, not {SCHEMA}")
        return LaunchFile(
            name=str(document.get("name", path.name)),
            ptx=(folder / document["ptx"]).read_text("utf-8"),
            kernel=str(document["kernel"]),
            grid=_triple(document["grid"]),
            block=_triple(document["block"]),
            shared=int(document["shared"]),
            parameters=tuple(bytes.fromhex(part) for part in document["parameters"]),
            memory=tuple(
                (
                    int(one["address"]),
                    (folder / one["file"]).read_bytes(),
                    bool(one["writable"]),
                    str(one.get("name", one["file"])),
                )
                for one in document["memory"]
            ),
            wanted=_wanted(folder, document["result"]) if document.get("result") else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a launch: {said}") from None


def _triple(value: Any) -> tuple[int, int, int]:
    x, y, z = (int(size) for size in value)
    return x, y, z


def _wanted(folder: Path, document: Any) -> Wanted:
    shape = tuple(int(size) for size in document["shape"])
    if document["type"] != "bf16":
        raise ValueError(f"results of type {document['type']} are not known")
    exact, bound = (
        np.frombuffer((folder / document[name]).read_bytes(), np.float64).reshape(shape)
        for name in ("exact", "bound")
    )
    return Wanted(int(document["address"]), shape, exact, bound)
