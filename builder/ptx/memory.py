"""Global and shared memory, and tensor maps; accesses outside of registered memory are faults.

A tensor map (TMA descriptor) has 128 bytes and describes tiles of global memory.  PTX ISA,
"Tensors" (boxes, bounds, swizzling).  The layout of the 128 bytes is not published; it was found
by comparing descriptors with the arguments that they were made from, and every other form is an
error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.machine import SHARED_BASE, Fault, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


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

    def constant(self, address: int) -> bool:
        """Whether no thread may write the region with an address."""
        return any(r.address <= address < r.end and not r.writable for r in self.regions)

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
        for lanes, offsets, region in self.spans(addresses, size, write=write):
            yield lanes, offsets, region.data

    def spans(
        self, addresses: NDArray[np.int64], size: int, *, write: bool = False
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], Region]]:
        """Lanes by the region that they access: the lanes, their offsets, the region.

        Raises:
            Fault: an address is outside, or not a multiple of ``size``.
        """
        rest = addresses % size
        if np.count_nonzero(rest):
            wrong = int(addresses[rest != 0][0])
            raise Fault(f"global address {wrong:#x} is not a multiple of {size}")
        remaining = np.arange(len(addresses))
        while len(remaining):
            first = int(addresses[remaining[0]])
            region = self.find(first, first + size, write=write)
            offsets = addresses[remaining] - region.address
            # as unsigned numbers, negative ones are large
            inside = offsets.view(np.uint64) <= len(region.data) - size
            if np.count_nonzero(inside) == len(remaining):
                yield remaining, offsets, region
                return
            yield remaining[inside], offsets[inside], region
            remaining = remaining[~inside]

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
        rows = np.empty((len(addresses), size), np.uint8)
        for lanes, offsets, data in self.groups(addresses, size):
            rows[lanes] = data[offsets[:, None] + np.arange(size)]
        return rows

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
    """A block's shared memory."""

    def __init__(self, size: int) -> None:
        # words of 16 bytes, so that every vector access has a view
        self.bytes = np.full(-(-size // 16) * 16, POISON, np.uint8)
        self.size = size
        #: the same in elements of a size; nothing is computed with those of 16 bytes
        self.elements = {size: self.bytes.view(kind) for size, kind in _SIZES.items()}

    def offsets(self, addresses: Lanes, size: int) -> NDArray[np.int64]:
        """Offsets of addresses in the shared window.

        Raises:
            Fault: one is outside, or not a multiple of ``size``.
        """
        offsets = np.asarray(addresses).astype(np.int64) - SHARED_BASE
        # as unsigned numbers, negative ones are large
        outside = offsets.view(np.uint64) > max(self.size - size, 0)
        if size > self.size or some(outside):
            wrong = offsets[0] if size > self.size else offsets[outside][0]
            raise Fault(
                f"shared memory offset {int(wrong)} ({size} bytes) is outside the block's "
                f"{self.size} bytes"
            )
        if np.count_nonzero(offsets & (size - 1)):  # sizes are powers of two
            wrong = offsets[offsets % size != 0][0]
            raise Fault(f"shared memory offset {int(wrong)} is not a multiple of {size}")
        return offsets

    def load(self, offsets: NDArray[np.int64], size: int) -> Lanes:
        """``size`` bytes from each offset, one row each."""
        elements = self.elements.get(size)
        if elements is None:
            return self.bytes[offsets[:, None] + np.arange(size)]
        return elements[offsets // size].view(np.uint8).reshape(-1, size)

    def store(self, offsets: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Store each row at its offset; if lanes share one, the last one wins."""
        size = rows.shape[1]
        elements = self.elements.get(size)
        if elements is None:
            self.bytes[offsets[:, None] + np.arange(size)] = rows
        else:
            elements[offsets // size] = rows.view(elements.dtype).reshape(-1)


# -------------------------------------------------------------------------------------- tensor maps


#: Bits of an element by its code: 0 u8, 1 u16, 2 of 32 bits, 6 f16, 7 f32, 10 bf16, 11 packed
#: 4-bit codes, 12 the same, of which 16 take 16 bytes of shared memory: the last 8 are padding.
ELEMENT_BITS = {0: 8, 1: 16, 2: 32, 6: 16, 7: 32, 10: 16, 11: 4, 12: 4}
_SPREAD = 12
_KIND = 2
#: Codes of numpy's types; others by their size.
_CODES = {"float16": 6, "float32": 7, "bfloat16": 10}
_SIZE_CODES = {1: 0, 2: 1, 4: 2}
_SWIZZLES = (0, 32, 64, 128)
#: Offsets in a tensor are less: an address has 48 bits.
_FARTHEST = 2**60
#: The unit of swizzling and of strides, as a type without arithmetic.
_PART, _WORD = 16, np.complex128


@dataclass(frozen=True)
class TensorMap:
    """A tensor's address and layout, and the layout of its tile in shared memory."""

    address: int
    bits: int
    #: 0 none, 1 to 3: 32, 64 or 128 bytes
    swizzle: int
    dims: tuple[int, ...]
    #: bytes between neighbours along each dimension but the first
    strides: tuple[int, ...]
    box: tuple[int, ...]
    #: in shared memory 8 bytes of padding follow each 8 bytes
    spread: bool = False

    @classmethod
    @lru_cache(1024)
    def of(cls, raw: bytes) -> TensorMap:
        """Decode a descriptor.

        Raises:
            Fault: the form is unknown.
        """
        word = struct.unpack("<32I", raw)
        flags = word[2]
        rank, code = ((flags >> 4) & 7) + 1, (flags >> 7) & 15
        if flags & 15 != _KIND or code not in ELEMENT_BITS or rank > 5:
            raise Fault(f"a tensor map of an unknown form (word 2 is {flags:#x})")
        if (flags >> 11) & 3:
            raise Fault("a tensor map with interleaved layout")
        if word[13] & 0xFFFFFF:
            raise Fault("a tensor map with element strides")
        high = [(word[7] >> (4 * n)) & 15 for n in range(rank - 1)]
        box = [word[13] >> 24, *((word[14] >> (8 * n)) & 255 for n in range(4))]
        return cls(
            address=word[0] | word[1] << 32,
            bits=ELEMENT_BITS[code],
            swizzle=(flags >> 13) & 3,
            dims=tuple(word[8 + n] + 1 for n in range(rank)),
            strides=tuple((word[3 + n] | high[n] << 32) * 16 for n in range(rank - 1)),
            box=tuple(size + 1 for size in box[:rank]),
            spread=code == _SPREAD,
        )

    @property
    def row(self) -> int:
        """Bytes of the box along its first dimension."""
        return self.box[0] * self.bits // 8

    @cached_property
    def size(self) -> int:
        """Bytes of the box, which a copy transfers completely, even outside of the bounds."""
        return int(self.row * np.prod(self.box[1:], dtype=np.int64))

    @property
    def room(self) -> int:
        """Bytes of shared memory that the box takes."""
        return 2 * self.size if self.spread else self.size

    def gather(self, memory: GlobalMemory, at: Sequence[int]) -> NDArray[np.uint8]:
        """A box's bytes, with zeros outside of the tensor."""
        box, unit = np.zeros(self.size, np.uint8), self._unit(at)
        offsets, inside = self.cover(at, unit)
        if inside.all():
            data, places = self._reached(memory, offsets, unit, write=False)
            return data[places].view(np.uint8)
        if inside.any():
            data, places = self._reached(memory, offsets[inside], unit, write=False)
            box.view(data.dtype)[inside] = data[places]
        return box

    def scatter(self, memory: GlobalMemory, at: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Store a box's bytes, those inside of the tensor."""
        unit = self._unit(at)
        offsets, inside = self.cover(at, unit)
        if inside.any():
            elements, places = self._reached(memory, offsets[inside], unit, write=True)
            elements[places] = data.view(elements.dtype)[inside]

    def _reached(
        self, memory: GlobalMemory, offsets: NDArray[np.int64], unit: int, *, write: bool
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The elements of the tensor's region, and their indices."""
        first, end = self.address + int(offsets.min()), self.address + int(offsets.max()) + unit
        region = memory.find(first, end, write=write)
        places = offsets + (self.address - region.address)
        if unit == 1:
            return region.data, places
        begin = (self.address - region.address) % _PART
        return region.parts(begin), (places - begin) // _PART

    def reached(
        self, memory: GlobalMemory, at: Sequence[int]
    ) -> tuple[Region | None, NDArray[np.int64], int]:
        """The part of a box inside of the tensor: its region, offsets there, and bytes of each."""
        unit = self._unit(at)
        offsets, inside = self.cover(at, unit)
        if not inside.any():
            return None, offsets[:0], unit
        places = offsets[inside]
        first, end = self.address + int(places.min()), self.address + int(places.max()) + unit
        region = memory.find(first, end)
        return region, places + (self.address - region.address), unit

    def _unit(self, at: Sequence[int]) -> int:
        """16 bytes if the box, the tensor and its address are multiples of that, else 1."""
        first, width = at[0] * self.bits, self.dims[0] * self.bits
        whole = not (self.row % _PART or first % (8 * _PART) or width % (8 * _PART))
        return _PART if whole and self.address % _PART == 0 else 1

    def lay(self, shared: SharedMemory, start: int, data: NDArray[np.uint8]) -> None:
        """Put a box's bytes into shared memory."""
        if self.row % _PART or self.spread:
            shared.bytes[self.place(start) - SHARED_BASE] = data
        else:
            shared.elements[_PART][self._places(start)] = data.view(_WORD)

    def take(self, shared: SharedMemory, start: int) -> NDArray[np.uint8]:
        """A box's bytes from shared memory."""
        if self.row % _PART or self.spread:
            return shared.bytes[self.place(start) - SHARED_BASE]
        return shared.elements[_PART][self._places(start)].view(np.uint8)

    def _places(self, start: int) -> NDArray[np.int64]:
        """The offsets of a box's parts; cached, as a kernel uses few boxes."""
        places = self._cached.get(start)
        if places is None:
            places = self._cached[start] = (self.place(start)[::_PART] - SHARED_BASE) // _PART
        return places

    @cached_property
    def _cached(self) -> dict[int, NDArray[np.int64]]:
        return {}

    def place(self, start: int) -> NDArray[np.int64]:
        """Addresses in shared memory of a box's bytes: swizzling permutes 16-byte parts."""
        offsets = np.arange(self.size, dtype=np.int64)
        plain = start + (offsets + (offsets & -8) if self.spread else offsets)
        if not self.swizzle:
            return plain
        return plain ^ (((plain >> 7) & ((1 << self.swizzle) - 1)) << 4)

    def cover(
        self, at: Sequence[int], unit: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For each of a box's bytes: the offset in the tensor, and whether it is inside.

        ``unit``: for this many bytes together, if no border lies between them.
        """
        if len(at) != len(self.dims):
            raise Fault(f"{len(at)} coordinates for a tensor of {len(self.dims)} dimensions")
        first = at[0] * self.bits
        if first % 8:
            raise Fault("a tensor coordinate that is not at a byte")
        width = -(-self.dims[0] * self.bits // 8)
        steps, everything = self._box(unit)
        start = first // 8 + sum(n * stride for n, stride in zip(at[1:], self.strides, strict=True))
        if abs(start) >= _FARTHEST:
            raise Fault(f"a tile at offset {start} of a tensor, beyond every address")
        if 0 <= first // 8 <= width - self.row and all(
            0 <= begin <= dim - size
            for begin, dim, size in zip(at[1:], self.dims[1:], self.box[1:], strict=True)
        ):
            return steps + start, everything
        row = np.arange(0, self.row, unit, dtype=np.int64) + first // 8
        inside: Any = (row >= 0) & (row < width)
        for size, dim, begin in zip(self.box[1:], self.dims[1:], at[1:], strict=True):
            places = np.arange(size, dtype=np.int64) + begin
            inside = (((places >= 0) & (places < dim))[:, None] & inside[None, :]).reshape(-1)
        return steps + start, inside

    def _box(self, unit: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The offsets of a box at the origin, and as many times ``True``; cached."""
        box = self._boxes.get(unit)
        if box is None:
            offsets = np.arange(0, self.row, unit, dtype=np.int64)
            for size, stride in zip(self.box[1:], self.strides, strict=True):
                steps = np.arange(size, dtype=np.int64) * stride
                offsets = (steps[:, None] + offsets[None, :]).reshape(-1)
            box = self._boxes[unit] = offsets, np.ones(len(offsets), np.bool_)
        return box

    @cached_property
    def _boxes(self) -> dict[int, tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        return {}


def encode_tensor(
    address: int, array: NDArray[Any], box: Sequence[int], swizzle: int, packed: bool
) -> bytes:
    """The descriptor of an array in C order at an address; ``box`` in the order of its axes.

    ``packed``: each byte holds two 4-bit elements, of which the box counts.

    Raises:
        ValueError: no descriptor can describe it.
    """
    code = 11 if packed else _CODES.get(array.dtype.name, _SIZE_CODES.get(array.itemsize, -1))
    dims = [*array.shape[::-1]]
    dims[0] *= 2 if packed else 1
    strides = [*array.strides[-2::-1]]
    sizes = [*box[::-1]]
    if code < 0 or (packed and array.itemsize != 1):
        raise ValueError(f"a tensor map of {array.dtype} is not known")
    if len(box) != array.ndim or array.ndim > 5 or any(not 1 <= n <= 256 for n in sizes):
        raise ValueError(f"a box {tuple(box)} for an array of shape {array.shape}")
    if swizzle not in _SWIZZLES:
        raise ValueError(f"a swizzle of {swizzle} bytes; there are {_SWIZZLES}")
    if any(stride % _PART for stride in strides):
        raise ValueError(f"strides of {strides} bytes are not multiples of {_PART}")
    word = [0] * 32
    word[0], word[1] = address & 0xFFFFFFFF, address >> 32
    word[2] = _KIND | (array.ndim - 1) << 4 | code << 7 | _SWIZZLES.index(swizzle) << 13
    for n, stride in enumerate(strides):
        word[3 + n] = stride // _PART & 0xFFFFFFFF
        word[7] |= (stride // _PART >> 32 & 15) << (4 * n)
    for n, dim in enumerate(dims):
        word[8 + n] = dim - 1
    word[13] = (sizes[0] - 1) << 24
    for n, size in enumerate(sizes[1:]):
        word[14] |= (size - 1) << (8 * n)
    return struct.pack("<32I", *word)
