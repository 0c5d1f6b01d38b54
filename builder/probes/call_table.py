"""A shared library whose functions are Python callbacks, written without a compiler.

Each function jumps through a table of pointers, which Python fills with ctypes callbacks.
Code that was linked against CUDA's runtime, such as the host code that the CuTe DSL compiles,
then calls Python instead of a device.

Standard library only.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import TYPE_CHECKING, Any

from builder.probes import stub_driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


#: The table's name among the library's symbols.
TABLE = "spark_build_table"
_GLOBAL_OBJECT = 1 << 4 | 1
_POINTER = 8


def _jump(machine: str, distance: int) -> bytes:
    """A landing pad, then a jump to the address in the pointer ``distance`` bytes from here.

    endbr64, jmp [rip+x]; bti c, ldr x16 from pc+x, br x16.
    """
    if machine == "x86_64":
        return b"\xf3\x0f\x1e\xfa\xff\x25" + struct.pack("<i", distance - 10)
    if not -(1 << 20) <= distance - 4 < 1 << 20:
        raise ValueError(f"{distance} bytes are too far for one jump")
    load = 0x58000010 | ((distance - 4) // 4 & 0x7FFFF) << 5
    return struct.pack("<III", 0xD503245F, load, 0xD61F0200)


def call_table(soname: str, functions: Iterable[str], machine: str) -> bytes:
    """The library's bytes: functions and table entries are sorted by name.

    Raises:
        UnknownMachineError: there is no code for ``machine`` (as ``uname -m`` prints it).
    """
    names = sorted(set(functions))
    size = len(_jump(machine if machine == "x86_64" else "aarch64", 4096))
    image = stub_driver.Image.of_header()
    strings = stub_driver.Strings()
    places = [strings.place(name) for name in (*names, TABLE)]
    codes = [image.add(bytes(size)) for _ in names]
    rows = [
        struct.pack("<IBBHQQ", place, stub_driver.GLOBAL_FUNCTION, 0, 1, code, size)
        for place, code in zip(places, codes, strict=False)
    ]
    symbols = image.add(bytes(stub_driver.SYMBOL * (len(names) + 2)))
    hashes = image.add(stub_driver.hash_table([*names, TABLE]))
    entries = stub_driver.entries_of(strings, soname, symbols, hashes)
    stub_driver.add_strings(image, strings, entries)
    room = _POINTER * len(names)
    table = stub_driver.writable_address(image, entries)
    rows.append(struct.pack("<IBBHQQ", places[-1], _GLOBAL_OBJECT, 0, 2, table, room))
    for number, code in enumerate(codes):
        jump = _jump(machine, table + _POINTER * number - code)
        image.data[code : code + size] = jump
    begin = symbols + stub_driver.SYMBOL
    image.data[begin : begin + stub_driver.SYMBOL * len(rows)] = b"".join(rows)
    return stub_driver.finished(image, entries, machine, room)


class Library:
    """A loaded library of this kind, with its functions in Python."""

    def __init__(self, path: str, functions: Iterable[str]) -> None:
        self.path = path
        self.names = sorted(set(functions))
        self._kept: list[Any] = []
        with open(path, "wb") as file:
            file.write(call_table("libspark-build-calls.so", self.names, platform.machine()))

    def fill(self, answers: Mapping[str, Any]) -> None:
        """Set a ctypes callback for each function; those without one get ``answers[""](name)``.

        A call before this crashes.
        """
        loaded = ctypes.CDLL(self.path)
        table = (ctypes.c_void_p * len(self.names)).in_dll(loaded, TABLE)
        for number, name in enumerate(self.names):
            callback = answers[name] if name in answers else answers[""](name)
            table[number] = ctypes.cast(callback, ctypes.c_void_p).value
            self._kept.append(callback)
        self._kept.append(loaded)
