"""Runs the target's Triton kernels as plain Python on CPU tensors.

FlashInfer sorts routes by expert in Triton before it launches a kernel of the CuTe DSL.  Such a
kernel is a Python function of blocks of numbers: with torch in place of ``triton.language`` it
computes the same.  Its programs run one after the other.

Runs under the target's interpreter beside ``launch_probe.py``.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

torch: Any = importlib.import_module("torch")


class Pointer:
    """The address of elements of a tensor."""

    def __init__(self, data: Any, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def places(self, mask: Any) -> tuple[Any, Any]:
        """The elements, and which of them take part.

        Raises:
            IndexError: one that takes part is outside.
        """
        places = torch.as_tensor(self.offset)
        mask = torch.ones_like(places, dtype=torch.bool) if mask is None else mask
        places, mask = torch.broadcast_tensors(places, mask)
        outside = mask & ((places < 0) | (places >= self.data.numel()))
        if bool(outside.any()):
            raise IndexError(f"element {int(places[outside][0])} of {self.data.numel()}")
        return places, mask


class Language:
    """``triton.language``: what route packing needs of it."""

    int32 = torch.int32
    constexpr = int
    range = static_range = staticmethod(range)
    where = staticmethod(torch.where)

    def __init__(self) -> None:
        self.place: tuple[int, ...] = ()

    def program_id(self, axis: int) -> int:
        """Which program runs."""
        return self.place[axis]

    @staticmethod
    def debug_barrier() -> None:
        """A barrier of the program's threads: every block of numbers is complete here."""

    @staticmethod
    def arange(begin: int, end: int) -> Any:
        """A block of numbers."""
        return torch.arange(begin, end, dtype=torch.int32)

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> Any:
        """A block of zeros."""
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any) -> Any:
        """A block of one value."""
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
        """Elements, and ``other`` where the mask is false."""
        places, taken = pointer.places(mask)
        values = torch.full(places.shape, other, dtype=pointer.data.dtype)
        values[taken] = pointer.data.view(-1)[places[taken].long()]
        return values

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        """Put values where the mask is true."""
        places, taken = pointer.places(mask)
        values = torch.as_tensor(value).to(pointer.data.dtype).expand(places.shape)
        pointer.data.view(-1)[places[taken].long()] = values[taken]

    @staticmethod
    def atomic_add(pointer: Pointer, value: int, mask: Any = None, **_order: str) -> Any:
        """One after the other, in order; the values before."""
        places, taken = pointer.places(mask)
        flat, before = pointer.data.view(-1), torch.zeros(places.shape, dtype=torch.int32)
        for index in torch.nonzero(taken).flatten().tolist():
            before[index] = flat[int(places[index])]
            flat[int(places[index])] += value
        return before

    @staticmethod
    def minimum(one: Any, other: Any) -> Any:
        """The smaller of each pair."""
        return torch.minimum(torch.as_tensor(one), torch.as_tensor(other))

    @staticmethod
    def maximum(one: Any, other: Any) -> Any:
        """The larger of each pair."""
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))

    @staticmethod
    def sum(block: Any, axis: int) -> Any:
        """Along an axis."""
        return block.sum(dim=axis, dtype=torch.int32)

    @staticmethod
    def max(block: Any, axis: int) -> Any:
        """Along an axis."""
        return block.amax(dim=axis)

    @staticmethod
    def cumsum(block: Any, axis: int) -> Any:
        """Along an axis."""
        return block.cumsum(dim=axis, dtype=torch.int32)


class Kernel:
    """One kernel: ``kernel[grid](...)`` runs its programs."""

    def __init__(self, function: Callable[..., None], language: Language) -> None:
        self._function, self._language = function, language
        self._names = set(inspect.signature(function).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
            constants = {n: v for n, v in options.items() if n in self._names}
            for place in itertools.product(*map(range, grid)):
                self._language.place = place
                self._function(*given, **constants)

        return launch


def run_on_host(module: types.ModuleType) -> None:
    """Make the Triton kernels of a module run here, defined with a stand-in for Triton."""
    language = Language()
    scope = vars(module)
    functions = {name: one for name, one in scope.items() if inspect.isfunction(one)}
    kernels = {name: one for name, one in functions.items() if vars(one).get("fn") is one}
    scope.update({name: Kernel(one, language) for name, one in kernels.items()})
    scope.update(tl=language, triton=types.SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
