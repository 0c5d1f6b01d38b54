"""The 128-byte tensor map (TMA descriptor), and the tile that it describes.

PTX ISA, "Tensors" (boxes, bounds, swizzling).  The layout of the 128 bytes is not
published; it was found by comparing descriptors with the arguments that they were made from, and
every other form is an error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.ptx.constants import SHARED_BASE
from builder.ptx.errors import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from builder.ptx.memory import GlobalMemory, SharedMemory

#: Bits of an element by its code: 0 u8, 1 u16, 2 of 32 bits, 6 f16, 7 f32, 10 bf16, 11 packed
#: 4-bit codes.
ELEMENT_BITS = {0: 8, 1: 16, 2: 32, 6: 16, 7: 32, 10: 16, 11: 4}
_KIND = 2
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

    @classmethod
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
        )

    @property
    def row(self) -> int:
        """Bytes of the box along its first dimension."""
        return self.box[0] * self.bits // 8

    @cached_property
    def size(self) -> int:
        """Bytes of the box, which a copy transfers completely, even outside of the bounds."""
        return int(self.row * np.prod(self.box[1:], dtype=np.int64))

    def gather(self, memory: GlobalMemory, at: Sequence[int]) -> NDArray[np.uint8]:
        """A box's bytes, with zeros outside of the tensor."""
        found, unit = np.zeros(self.size, np.uint8), self._unit(at)
        offsets, inside = self.cover(at, unit)
        if inside.any():
            data, places = self._reached(memory, offsets[inside], unit, write=False)
            found.view(data.dtype)[inside] = data[places]
        return found

    def scatter(self, memory: GlobalMemory, at: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Store a box's bytes, those inside of the tensor."""
        unit = self._unit(at)
        offsets, inside = self.cover(at, unit)
        if inside.any():
            held, places = self._reached(memory, offsets[inside], unit, write=True)
            held[places] = data.view(held.dtype)[inside]

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

    def _unit(self, at: Sequence[int]) -> int:
        """16 bytes if the box, the tensor and its address are multiples of that, else 1."""
        first, width = at[0] * self.bits, self.dims[0] * self.bits
        whole = not (self.row % _PART or first % (8 * _PART) or width % (8 * _PART))
        return _PART if whole and self.address % _PART == 0 else 1

    def lay(self, shared: SharedMemory, start: int, data: NDArray[np.uint8]) -> None:
        """Put a box's bytes into shared memory."""
        if self.row % _PART:
            shared.bytes[self.place(start) - SHARED_BASE] = data
        else:
            shared.elements[_PART][self._places(start)] = data.view(_WORD)

    def take(self, shared: SharedMemory, start: int) -> NDArray[np.uint8]:
        """A box's bytes from shared memory."""
        if self.row % _PART:
            return shared.bytes[self.place(start) - SHARED_BASE]
        return shared.elements[_PART][self._places(start)].view(np.uint8)

    def _places(self, start: int) -> NDArray[np.int64]:
        """The offsets of a box's parts; cached, as a kernel uses few boxes."""
        found = self._known.get(start)
        if found is None:
            found = self._known[start] = (self.place(start)[::_PART] - SHARED_BASE) // _PART
        return found

    @cached_property
    def _known(self) -> dict[int, NDArray[np.int64]]:
        return {}

    def place(self, start: int) -> NDArray[np.int64]:
        """Addresses in shared memory of a box's bytes: swizzling permutes 16-byte parts."""
        plain = start + np.arange(self.size, dtype=np.int64)
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
        offsets: Any = np.arange(0, self.row, unit, dtype=np.int64) + first // 8
        inside: Any = (offsets >= 0) & (offsets < -(-self.dims[0] * self.bits // 8))
        for size, dim, stride, begin in zip(
            self.box[1:], self.dims[1:], self.strides, at[1:], strict=True
        ):
            steps = np.arange(size, dtype=np.int64) + begin
            offsets = ((steps * stride)[:, None] + offsets[None, :]).reshape(-1)
            inside = (((steps >= 0) & (steps < dim))[:, None] & inside[None, :]).reshape(-1)
        return offsets, inside
