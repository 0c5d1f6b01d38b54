"""A launch in files: the kernel to run, its memory and parameters, and the expected result.

``launch.json`` names the PTX, the kernel, its grid and block, its parameters, the memory that they
point into, and for a result array the exact values and bounds (docs/ptx.md).
"""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.applier.files import read_regular
from builder.errors import UsageError, did_you_mean
from builder.ptx.block import Launch
from builder.ptx.decoder import MOST_SHARED
from builder.ptx.machine import from_bf16, to_bf16
from builder.ptx.memory import GlobalMemory, Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from builder.ptx.source import Kernel

# ---------------------------------------------------------------------------- arrays and parameters


#: Element types by their PTX names, with numpy's types; bfloat16 by its bits.
TYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"), "s8": np.dtype("<i1"), "u16": np.dtype("<u2"), "s16": np.dtype("<i2"),
    "u32": np.dtype("<u4"), "s32": np.dtype("<i4"), "u64": np.dtype("<u8"), "s64": np.dtype("<i8"),
    "f16": np.dtype("<f2"), "bf16": np.dtype("<u2"), "f32": np.dtype("<f4"), "f64": np.dtype("<f8"),
}  # fmt: skip
#: The keys that define an array's contents: one of them.
_CONTENTS = ("file", "values", "fill")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: The first address for arrays without one, and the gap after each.  Our choice.
FIRST, APART = 0x1000_0000, 0x1_0000
#: The largest array: every schedule copies all arrays.  Our choice.
_MOST_BYTES = 2**30
#: All arrays of a launch together, the elements of a result, and the bytes of a text.  Our choice.
_MOST_MEMORY, _MOST_RESULT, _MOST_TEXT = 2**31, 2**27, 2**26
#: The hardware's address space (CUDA C++ Programming Guide: 47 or 48 bits, by the host).
_ADDRESSES = 2**48


@dataclass(frozen=True)
class Array:
    """Memory that a kernel may access, with its contents before the launch."""

    name: str
    address: int
    data: bytes
    writable: bool
    type: str
    shape: tuple[int, ...]


def fields(value: Any, what: str, allowed: Sequence[str]) -> Mapping[str, Any]:
    """Check that a JSON object has no other keys than these.

    Raises:
        TypeError: it is malformed.
        ValueError: it has other keys.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{what} is not a JSON object: {str(value)[:60]}")
    for key in value:
        if key not in allowed:
            raise ValueError(
                f"{what} has a key {key!r} that is not known{did_you_mean(key, allowed)}"
            )
    return value


def whole(value: Any, what: str, least: int = 0) -> int:
    """A whole number.

    Raises:
        ValueError: it is malformed, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is not a whole number of at least {least}: {str(value)[:60]}")
    return value


def read_arrays(folder: Path, document: Any) -> tuple[Array, ...]:
    """The arrays of a launch; those without an address get a free one.

    Raises:
        ValueError: an array is malformed.
        OSError: a file cannot be read.
    """
    if not isinstance(document, list):
        raise TypeError("memory is not a list of arrays")
    arrays: list[Array] = []
    for place, value in enumerate(document):
        arrays.append(_array(folder, value, place))
        check_memory(sum(len(one.data) for one in arrays))
    names = [one.name for one in arrays]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"two arrays have the name {twice}")
    free = max([FIRST, *(one.address + len(one.data) for one in arrays)])
    placed = []
    for one in arrays:
        address = one.address
        if not address:
            address = -(-free // APART) * APART
            free = address + len(one.data) + APART
        if address + len(one.data) > _ADDRESSES:
            raise ValueError(f"array {one.name} ends beyond the 48-bit address space")
        placed.append(Array(one.name, address, one.data, one.writable, one.type, one.shape))
    return tuple(placed)


def check_memory(size: int) -> None:
    """Check the bytes of all arrays of a launch.

    Raises:
        ValueError: they are too many.
    """
    if size > _MOST_MEMORY:
        raise ValueError(f"its arrays have more than {_MOST_MEMORY >> 30} GiB")


def _array(folder: Path, value: Any, place: int) -> Array:
    known = ("name", "address", "writable", "type", "shape", *_CONTENTS)
    document = fields(value, f"memory[{place}]", known)
    name = str(document.get("name", document.get("file", f"memory-{place}")))
    if not _NAME.fullmatch(name):
        raise ValueError(f"memory[{place}]: a name is letters, digits, '_', '.', '-', not {name!r}")
    writable = document.get("writable", False)
    if not isinstance(writable, bool):
        raise TypeError(f"array {name}: writable is true or false, not {writable!r}")
    kind, shape = document.get("type"), document.get("shape")
    data, kind, size = contents(folder, document, f"array {name}", kind, shape)
    address = whole(document.get("address", 0), f"array {name}: address")
    return Array(name, address, data, writable, kind, size)


def contents(
    folder: Path, document: Mapping[str, Any], what: str, kind: str | None, shape: Any
) -> tuple[bytes, str, tuple[int, ...]]:
    """The bytes, type and shape from a file, a list of values or one value.

    Raises:
        ValueError: none is given, or it does not have the type and shape.
        OSError: a file cannot be read.
    """
    keys = [key for key in _CONTENTS if key in document]
    if len(keys) != 1:
        raise ValueError(f"{what} has {' and '.join(keys) or 'none'} of {', '.join(_CONTENTS)}")
    if kind is not None and kind not in TYPES:
        raise ValueError(f"{what}: type {kind!r} is not known; types are {', '.join(TYPES)}")
    sizes = None if shape is None else _shape(shape, what, TYPES[kind or "u8"].itemsize)
    if keys == ["file"]:
        data, actual, size = _from_file(folder / str(document["file"]), kind, what)
    else:
        if kind is None:
            raise ValueError(f"{what} has no type; types are {', '.join(TYPES)}")
        values = document[keys[0]]
        if keys == ["fill"]:
            if sizes is None:
                raise ValueError(f"{what} has no shape to fill")
            one = encoded(values, kind, what)
            if one.size != 1:
                raise ValueError(f"{what} is filled with {one.size} values")
            data, actual, size = one.tobytes() * math.prod(sizes), kind, sizes
        else:
            array = encoded(values, kind, what)
            data, actual, size = array.tobytes(), kind, array.shape
    if not data and sizes is not None:
        raise ValueError(f"{what} is empty")
    if sizes is not None and int(np.prod(sizes)) * TYPES[actual].itemsize != len(data):
        raise ValueError(f"{what}: {len(data)} bytes are not {list(sizes)} elements of {actual}")
    return data, actual, size if sizes is None else sizes


def _shape(shape: Any, what: str, each: int) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise TypeError(f"{what}: shape is not a list of numbers")
    sizes = tuple(whole(size, f"{what}: a size", 1) for size in shape)
    count = 1
    for size in sizes:
        count *= min(size, _MOST_BYTES + 1)
        if count * each > _MOST_BYTES:
            raise ValueError(f"{what} has more than {_MOST_BYTES} bytes")
    return sizes


def _from_file(path: Path, kind: str | None, what: str) -> tuple[bytes, str, tuple[int, ...]]:
    try:
        data = read_regular(path, _MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"{what}: {path.name}: {error}") from None
    if path.suffix != ".npy":
        actual = kind or "u8"
        count, rest = divmod(len(data), TYPES[actual].itemsize)
        if rest:
            raise ValueError(f"{what}: {len(data)} bytes are not a whole number of {actual}")
        return data, actual, (count,)
    try:
        array = _npy_array(data)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{what}: {path.name} is not an .npy file: {error}") from None
    element = array.dtype.newbyteorder("<")
    own = next((name for name, dtype in TYPES.items() if dtype == element), None)
    if own is None or TYPES[kind or own] != element:
        raise ValueError(f"{what}: {path.name} holds {array.dtype}, not {kind or 'a known type'}")
    return np.ascontiguousarray(array.astype(element)).tobytes(), kind or own, array.shape


def _npy_array(data: bytes) -> NDArray[Any]:
    """The array in an .npy file, of as many bytes as its header says.

    Raises:
        ValueError: it is another file.
    """
    file = io.BytesIO(data)
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        raise ValueError("it begins otherwise")
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"version {version}")
    shape, _, dtype = read[version](file)
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"{len(data) - file.tell()} bytes are not an array of shape {shape}")
    file.seek(0)
    array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


def encoded(values: Any, kind: str, what: str) -> NDArray[Any]:
    """Numbers encoded in a type.

    Raises:
        ValueError: they are not numbers, or the type cannot represent them.
    """
    if kind not in TYPES:
        raise ValueError(f"{what}: type {kind!r} is not known; types are {', '.join(TYPES)}")
    numbers, dtype = np.array(values), TYPES[kind]
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"{what}: these are not numbers: {str(values)[:60]}")
    with np.errstate(over="ignore"):
        if kind == "bf16":
            return to_bf16(np.atleast_1d(numbers.astype(np.float32))).astype(dtype)
        if dtype.kind == "f":
            return np.atleast_1d(numbers.astype(dtype))
    limits = np.iinfo(dtype)
    if numbers.size and (numbers.dtype.kind == "f" or numbers.min() < limits.min):
        raise ValueError(f"{what}: {kind} cannot represent {str(values)[:60]}")
    if numbers.size and numbers.max() > limits.max:
        raise ValueError(f"{what}: {kind} cannot represent {str(values)[:60]}")
    return np.atleast_1d(numbers.astype(dtype))


def as_numbers(data: bytes, kind: str) -> NDArray[np.float64]:
    """The values in bytes of a type."""
    elements = np.frombuffer(data, TYPES[kind])
    return (from_bf16(elements) if kind == "bf16" else elements).astype(np.float64)


def parameter(value: Any, place: int, arrays: Sequence[Array]) -> bytes:
    """One parameter: bytes in hexadecimal, the address of an array, or a number of a type.

    Raises:
        ValueError: it is something else.
    """
    what = f"parameters[{place}]"
    if isinstance(value, str):
        return bytes.fromhex(value)
    document = fields(value, what, ("array", "offset", "type", "value"))
    if "array" not in document:
        if not {"type", "value"} <= set(document) or "offset" in document:
            raise ValueError(f"{what} has not an array, or a type and a value")
        number = encoded(document["value"], str(document["type"]), what)
        if number.size != 1:
            raise ValueError(f"{what} has {number.size} values")
        return number.tobytes()
    if set(document) - {"array", "offset"}:
        raise ValueError(f"{what} has an array, and a type or a value")
    return (
        array_named(document["array"], what, arrays).address
        + whole(document.get("offset", 0), f"{what}: offset")
    ).to_bytes(8, "little")


def array_named(name: Any, what: str, arrays: Sequence[Array]) -> Array:
    """The array of a name.

    Raises:
        ValueError: it does not exist.
    """
    array = next((one for one in arrays if one.name == name), None)
    if array is None:
        names = [one.name for one in arrays]
        suggestion = did_you_mean(str(name), names) or f"; there is {', '.join(names) or 'none'}"
        raise ValueError(f"{what} names an array {name!r}{suggestion}")
    return array


# --------------------------------------------------------------------------------------- the launch


SCHEMA = 1
_KEYS = (
    "schema", "name", "ptx", "kernel", "grid", "block", "cluster", "shared", "parameters", "memory",
    "result",
)  # fmt: skip
#: Threads of a block (CUDA C++ Programming Guide, "Technical Specifications").
MOST_THREADS = 1024
#: Blocks of a cluster that every GPU can run (CUDA C++ Programming Guide, "Thread Block Clusters").
MOST_OF_CLUSTER = 8
#: The most blocks: all of them exist at once.  Our choice.
MOST_BLOCKS = 4096


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
        place, value, exact, bound = self.worst
        nans = f", {self.nans} of them NaN" if self.nans else ""
        where = ",".join(map(str, place))
        return (
            f"{self.wrong} of {self.values} values wrong{nans}; worst at [{where}]: {value:.7g} "
            f"instead of {exact:.7g} +- {bound:.2g}"
        )


def compare(actual: NDArray[np.float64], expected: ExpectedResult) -> Comparison:
    """Compare each value with its bound."""
    nans = int(np.isnan(actual).sum())
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(actual), np.abs(actual - expected.exact), np.inf)
        over = ~(error <= expected.bound)  # where either is no number, too
    wrong = int(over.sum())
    if not wrong:
        return Comparison(actual.size, 0, nans)
    excess = np.where(over, error - expected.bound, -1.0)
    place = tuple(int(n) for n in np.unravel_index(int(excess.argmax()), actual.shape))
    worst = (
        place,
        float(actual[place]),
        float(expected.exact[place]),
        float(expected.bound[place]),
    )
    return Comparison(actual.size, wrong, nans, worst)


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
    #: blocks of a cluster along each axis, if the launch says so
    cluster: tuple[int, int, int] | None = None

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
        return Launch(self.grid, self.block, self.shared, bytes(space), self._cluster(kernel))

    def _cluster(self, kernel: Kernel) -> tuple[int, int, int]:
        """The cluster of the launch, or the kernel's own.

        Raises:
            UsageError: they differ, or the grid is not of whole clusters.
        """
        own, name = kernel.cluster, kernel.name[:60]
        if own and self.cluster not in (None, own):
            raise UsageError(f"{self.name}: clusters of {self.cluster}; {name} has {own}")
        size = self.cluster or own
        if size is None and kernel.explicit_cluster:
            raise UsageError(
                f"{self.name}: {name} has .explicitcluster, and the launch no cluster",
                hint='say how many blocks a cluster has, such as "cluster": [2, 1, 1]',
            )
        size = size or (1, 1, 1)
        if any(blocks % one for blocks, one in zip(self.grid, size, strict=True)):
            raise UsageError(f"{self.name}: a grid of {self.grid} is not of clusters of {size}")
        return size

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
        document = fields(json.loads(read_regular(path, _MOST_TEXT)), "it", _KEYS)
        if document["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema {document['schema']}, not {SCHEMA}")
        memory = read_arrays(path.parent, document["memory"])
        parameters = document["parameters"]
        if not isinstance(parameters, list):
            raise TypeError("parameters is not a list")
        return LaunchFile(
            name=str(document.get("name", path.name)),
            ptx=read_text(ptx or path.parent / document["ptx"]),
            kernel=str(document.get("kernel", "")),
            grid=_triple(document["grid"], "grid", MOST_BLOCKS),
            block=_triple(document["block"], "block", MOST_THREADS),
            shared=_shared(document.get("shared", 0)),
            cluster=_triple(document["cluster"], "cluster", MOST_OF_CLUSTER)
            if "cluster" in document
            else None,
            parameters=tuple(parameter(one, place, memory) for place, one in enumerate(parameters)),
            memory=memory,
            expected=_expected(path.parent, document["result"], memory)
            if document.get("result")
            else None,
        )
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        message = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a launch: {message}") from None


def read_text(path: Path) -> str:
    """The text of PTX.

    Raises:
        UsageError: the file cannot be read, or is not text.
    """
    try:
        return read_regular(path, _MOST_TEXT).decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not PTX: it is not UTF-8 text") from None
    except ValueError as error:
        raise UsageError(f"{path} is not PTX: {error}") from None


def _triple(value: Any, what: str, most: int) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{what} is not a list of three numbers: {str(value)[:60]}")
    x, y, z = (whole(size, f"a size of {what}", 1) for size in value)
    if x * y * z > most:
        raise ValueError(f"{what} {value} is {x * y * z}; {most} are the most")
    return x, y, z


def _shared(value: Any) -> int:
    if whole(value, "shared") > MOST_SHARED:
        raise ValueError(f"shared is {value} bytes; a block has at most {MOST_SHARED}")
    return int(value)


def _expected(folder: Path, value: Any, memory: tuple[Array, ...]) -> ExpectedResult:
    document = fields(value, "result", ("array", "address", "type", "shape", "exact", "bound"))
    if "array" in document:
        array = array_named(document["array"], "result", memory)
        source = fields(document["exact"], "result's exact", ("file", "values", "fill"))
        shape = list(array.shape)
        if math.prod(shape) > _MOST_RESULT:
            raise ValueError(f"a result of more than {_MOST_RESULT} values")
        data, kind, _ = contents(folder, source, "result's exact", array.type, shape)
        allowed = float(document.get("bound", 0))
        if not 0 <= allowed < np.inf:
            raise ValueError(f"result's bound is not a number of at least 0: {allowed}")
        exact = as_numbers(data, kind).reshape(array.shape)
        bound = np.broadcast_to(np.float64(allowed), array.shape)
        return ExpectedResult(array.address, array.shape, exact, bound, kind)
    shape = [whole(size, "a size of the result", 1) for size in document["shape"]]
    if document["type"] not in TYPES:
        raise ValueError(f"results of type {document['type']} are not known")
    exact, bound = (
        np.frombuffer(read_regular(folder / document[name], _MOST_BYTES)).reshape(shape)
        for name in ("exact", "bound")
    )
    kind, address = str(document["type"]), whole(document["address"], "result's address")
    end = address + math.prod(shape) * TYPES[kind].itemsize
    if not any(a.address <= address and end <= a.address + len(a.data) for a in memory):
        raise ValueError(f"the result at {address:#x} is in no array")
    return ExpectedResult(address, tuple(shape), exact, bound, kind)
