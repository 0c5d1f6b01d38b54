"""Arrays and parameters of a launch, as written in ``launch.json`` (docs/ptx.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.errors import did_you_mean
from builder.ptx.formats import from_bf16, to_bf16

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

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
_FIRST, _APART = 0x1000_0000, 0x1_0000
#: The largest array: every schedule copies all arrays.  Our choice.
_MOST_BYTES = 2**30
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


def fields(value: Any, what: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Check that a JSON object has no other keys than these.

    Raises:
        TypeError: it is malformed.
        ValueError: it has other keys.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{what} is not a JSON object: {str(value)[:60]}")
    for key in value:
        if key not in known:
            raise ValueError(
                f"{what} has a key {key!r} that is not known{did_you_mean(key, known)}"
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
    found = [_array(folder, one, place) for place, one in enumerate(document)]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"two arrays have the name {twice}")
    free = max([_FIRST, *(one.address + len(one.data) for one in found)])
    placed = []
    for one in found:
        address = one.address
        if not address:
            address = -(-free // _APART) * _APART
            free = address + len(one.data) + _APART
        if address + len(one.data) > _ADDRESSES:
            raise ValueError(f"array {one.name} ends beyond the 48-bit address space")
        placed.append(Array(one.name, address, one.data, one.writable, one.type, one.shape))
    return tuple(placed)


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
    given = [key for key in _CONTENTS if key in document]
    if len(given) != 1:
        raise ValueError(f"{what} has {' and '.join(given) or 'none'} of {', '.join(_CONTENTS)}")
    if kind is not None and kind not in TYPES:
        raise ValueError(f"{what}: type {kind!r} is not known; types are {', '.join(TYPES)}")
    sizes = None if shape is None else _shape(shape, what)
    if given == ["file"]:
        data, found, size = _from_file(folder / str(document["file"]), kind, what)
    else:
        if kind is None:
            raise ValueError(f"{what} has no type; types are {', '.join(TYPES)}")
        values = document[given[0]]
        if given == ["fill"]:
            if sizes is None:
                raise ValueError(f"{what} has no shape to fill")
            values = np.full(sizes, values)
        made = encoded(values, kind, what)
        data, found, size = made.tobytes(), kind, made.shape
    if not data and sizes is not None:
        raise ValueError(f"{what} is empty")
    if sizes is not None and int(np.prod(sizes)) * TYPES[found].itemsize != len(data):
        raise ValueError(f"{what}: {len(data)} bytes are not {list(sizes)} elements of {found}")
    return data, found, size if sizes is None else sizes


def _shape(shape: Any, what: str) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise TypeError(f"{what}: shape is not a list of numbers")
    sizes = tuple(whole(size, f"{what}: a size", 1) for size in shape)
    count = 1
    for size in sizes:
        count *= size
    if count > _MOST_BYTES:
        raise ValueError(f"{what}: {count} elements are more than a launch may have")
    return sizes


def _from_file(path: Path, kind: str | None, what: str) -> tuple[bytes, str, tuple[int, ...]]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{what}: {path.name} has more than {_MOST_BYTES} bytes")
    if path.suffix != ".npy":
        data, found = path.read_bytes(), kind or "u8"
        count, rest = divmod(len(data), TYPES[found].itemsize)
        if rest:
            raise ValueError(f"{what}: {len(data)} bytes are not a whole number of {found}")
        return data, found, (count,)
    try:
        with path.open("rb") as file:
            if file.read(6) != np.lib.format.MAGIC_PREFIX:
                raise ValueError("it begins otherwise")
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{what}: {path.name} is not an .npy file: {error}") from None
    held = array.dtype.newbyteorder("<")
    own = next((name for name, dtype in TYPES.items() if dtype == held), None)
    if own is None or TYPES[kind or own] != held:
        raise ValueError(f"{what}: {path.name} holds {array.dtype}, not {kind or 'a known type'}")
    return np.ascontiguousarray(array.astype(held)).tobytes(), kind or own, array.shape


def encoded(values: Any, kind: str, what: str) -> NDArray[Any]:
    """Numbers encoded in a type.

    Raises:
        ValueError: they are not numbers, or the type cannot represent them.
    """
    if kind not in TYPES:
        raise ValueError(f"{what}: type {kind!r} is not known; types are {', '.join(TYPES)}")
    given, dtype = np.array(values), TYPES[kind]
    if given.dtype.kind not in "iuf":
        raise ValueError(f"{what}: these are not numbers: {str(values)[:60]}")
    with np.errstate(over="ignore"):
        if kind == "bf16":
            return to_bf16(np.atleast_1d(given.astype(np.float32))).astype(dtype)
        if dtype.kind == "f":
            return np.atleast_1d(given.astype(dtype))
    limits = np.iinfo(dtype)
    if given.size and (given.dtype.kind == "f" or given.min() < limits.min):
        raise ValueError(f"{what}: {kind} cannot represent {str(values)[:60]}")
    if given.size and given.max() > limits.max:
        raise ValueError(f"{what}: {kind} cannot represent {str(values)[:60]}")
    return np.atleast_1d(given.astype(dtype))


def as_numbers(data: bytes, kind: str) -> NDArray[np.float64]:
    """The values in bytes of a type."""
    held = np.frombuffer(data, TYPES[kind])
    return (from_bf16(held) if kind == "bf16" else held).astype(np.float64)


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
    found = next((one for one in arrays if one.name == name), None)
    if found is None:
        names = [one.name for one in arrays]
        said = did_you_mean(str(name), names) or f"; there is {', '.join(names) or 'none'}"
        raise ValueError(f"{what} names an array {name!r}{said}")
    return found
