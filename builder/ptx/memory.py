"""Global and shared memory; accesses outside of registered memory are faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import SHARED_BASE
from builder.ptx.errors import Fault
from builder.ptx.formats import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from builder.ptx.races import Races

Lanes = Any
_ELEMENTS = (np.uint8, np.uint16, np.uint32, np.uint64, np.complex128)
_SIZES = {kind().itemsize: kind for kind in _ELEMENTS}
#: The contents of unwritten shared memory: a NaN as a scale or a float.
POISON = 0xFF


@dataclass(frozen=True)
class Region:
    """A host array that a kernel may access at an address."""

    address: int
    data: NDArray[np.uint8]
    writable: bool = True
    name: str = ""

    @cached_property
    def elements(self) -> dict[int, NDArray[Any]]:
        """Views by element size, for aligned addresses."""
        return {
            size: self.data[: len(self.data) // size * size].view(kind)
            for size, kind in _SIZES.items()
            if self.address % size == 0
        }

    def parts(self, begin: int) -> NDArray[np.complex128]:
        """16 bytes each from an offset below 16 on; nothing is computed with them."""
        return self.data[begin : begin + (len(self.data) - begin) // 16 * 16].view(np.complex128)

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + len(self.data)


@dataclass
class GlobalMemory:
    """The regions that a launch may access."""

    regions: list[Region] = field(default_factory=list)

    def find(self, first: int, end: int, *, write: bool = False) -> Region:
        """The region with these bytes.

        Raises:
            Fault: there is none, or it is read-only.
        """
        for region in self.regions:
            if region.address <= first and end <= region.end:
                if write and not region.writable:
                    raise Fault(f"a write to {region.name or 'an input'} at {first:#x}")
                return region
        if not self.regions:
            raise Fault(f"global address {first:#x} ({end - first} bytes): there are no buffers")
        near = min(self.regions, key=lambda r: min(abs(first - r.address), abs(first - r.end)))
        raise Fault(
            f"global address {first:#x} ({end - first} bytes) is outside every buffer; the "
            f"nearest is {near.name or 'one'}, {near.address:#x} to {near.end:#x}"
        )

    def groups(
        self, addresses: NDArray[np.int64], size: int, *, write: bool = False
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.uint8]]]:
        """Lanes by the region that they access: the lanes, their offsets, the region's bytes.

        Raises:
            Fault: an address is outside, or not a multiple of ``size``.
        """
        rest = addresses % size
        if np.count_nonzero(rest):
            wrong = int(addresses[rest != 0][0])
            raise Fault(f"global address {wrong:#x} is not a multiple of {size}")
        left = np.arange(len(addresses))
        while len(left):
            first = int(addresses[left[0]])
            region = self.find(first, first + size, write=write)
            offsets = addresses[left] - region.address
            inside = (offsets >= 0) & (offsets + size <= len(region.data))
            if np.count_nonzero(inside) == len(left):
                yield left, offsets, region.data
                return
            yield left[inside], offsets[inside], region.data
            left = left[~inside]

    def _whole(
        self, addresses: NDArray[np.int64], size: int, *, write: bool
    ) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """The elements of the one region that all lanes access, and their indices, or None.

        Raises:
            Fault: the first lane is outside, or its region is read-only.
        """
        if not len(addresses) or size not in _SIZES or np.count_nonzero(addresses % size):
            return None
        first = int(addresses[0])
        region = self.find(first, first + size, write=write)
        elements = region.elements.get(size)
        if elements is None:
            return None
        places = (addresses - region.address) // size
        # as unsigned numbers, negative ones are large
        outside = some(places.view(np.uint64) >= len(elements))
        return None if outside else (elements, places)

    def load(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """``size`` bytes from each address, one row each."""
        fast = self._whole(addresses, size, write=False)
        if fast is not None:
            elements, places = fast
            return elements[places].view(np.uint8).reshape(-1, size)
        found = np.empty((len(addresses), size), np.uint8)
        for lanes, offsets, data in self.groups(addresses, size):
            found[lanes] = data[offsets[:, None] + np.arange(size)]
        return found

    def store(self, addresses: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Store each row at its address; if lanes share an address, the last one wins."""
        size = rows.shape[1]
        fast = self._whole(addresses, size, write=True)
        if fast is not None:
            elements, places = fast
            elements[places] = rows.view(elements.dtype).reshape(-1)
            return
        for lanes, offsets, data in self.groups(addresses, size, write=True):
            data[offsets[:, None] + np.arange(size)] = rows[lanes]


class SharedMemory:
    """A block's shared memory; ``races``, if set, records every access."""

    def __init__(self, size: int) -> None:
        # words of 16 bytes, so that every vector access has a view
        self.bytes = np.full(-(-size // 16) * 16, POISON, np.uint8)
        self.size = size
        #: the same in elements of a size; nothing is computed with those of 16 bytes
        self.elements = {size: self.bytes.view(kind) for size, kind in _SIZES.items()}
        self.races: Races | None = None

    def offsets(self, addresses: Lanes, size: int) -> NDArray[np.int64]:
        """Offsets of addresses in the shared window.

        Raises:
            Fault: one is outside, or not a multiple of ``size``.
        """
        found = np.asarray(addresses).astype(np.int64) - SHARED_BASE
        # as unsigned numbers, negative ones are large
        if size > self.size or some(found.view(np.uint64) > self.size - size):
            wrong = found[(found < 0) | (found + size > self.size)][0]
            raise Fault(
                f"shared memory offset {int(wrong)} ({size} bytes) is outside the block's "
                f"{self.size} bytes"
            )
        if np.count_nonzero(found & (size - 1)):  # sizes are powers of two
            wrong = found[found % size != 0][0]
            raise Fault(f"shared memory offset {int(wrong)} is not a multiple of {size}")
        return found

    def load(self, addresses: Lanes, size: int, agent: int, line: int) -> Lanes:
        """``size`` bytes from each address, one row each."""
        offsets = self.offsets(addresses, size)
        if self.races:
            self.races.read(agent, offsets, size, line)
        elements = self.elements.get(size)
        if elements is None:
            return self.bytes[offsets[:, None] + np.arange(size)]
        return elements[offsets // size].view(np.uint8).reshape(-1, size)

    def store(self, addresses: Lanes, rows: NDArray[np.uint8], agent: int, line: int) -> None:
        """Store each row at its address; if lanes share an address, the last one wins."""
        size = rows.shape[1]
        offsets = self.offsets(addresses, size)
        if self.races:
            self.races.write(agent, offsets, size, line)
        elements = self.elements.get(size)
        if elements is None:
            self.bytes[offsets[:, None] + np.arange(size)] = rows
        else:
            elements[offsets // size] = rows.view(elements.dtype).reshape(-1)
