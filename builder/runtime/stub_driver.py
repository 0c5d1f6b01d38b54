"""A stand-in for ``libcuda.so.1``, written byte by byte: no compiler, no toolkit, no driver.

vLLM's extension modules are linked against the CUDA driver, so without one they do not load, and
what their host functions would answer stays unknown.  A library of that name whose functions all
refuse is enough for loading: kernel selection calls none of them.  CUDA's toolkit has such a stub
for the same purpose, but few images carry it.

Standard library only, and deterministic: the same names give the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SONAME = "libcuda.so.1"
#: What every function returns: ``CUDA_ERROR_STUB_LIBRARY`` of cuda.h, as those of CUDA's own stub.
REFUSAL = 34
#: Functions of the driver, by cuda.h's naming; those of the runtime are ``cudaXyz``.
DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")
#: What libcudart looks up; the extension modules at hand say what else is needed.
FUNCTIONS = ("cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2")

# Numbers of the ELF format: System V gABI, chapters 4 and 5, and its processor supplements.
_MACHINES = {"x86_64": 62, "aarch64": 183}
_EHDR, _PHDR, _SYM, _DYN = 64, 56, 24, 16
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_EXECUTE, _WRITE, _READ = 1, 2, 4
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 4, 5, 6, 10, 11, 14
_SHT_DYNAMIC, _SHT_DYNSYM, _DT_NEEDED, _WEAK = 6, 11, 1, 2
_GLOBAL_FUNCTION = 1 << 4 | 2
#: The largest page of either processor: what is written to begins on a page of its own.
_PAGE = 0x10000
#: A landing pad, then ``return REFUSAL``: endbr64, mov eax, ret; bti c, mov w0, ret.
_CODE = {
    "x86_64": b"\xf3\x0f\x1e\xfa\xb8" + struct.pack("<I", REFUSAL) + b"\xc3",
    "aarch64": struct.pack("<III", 0xD503245F, 0x52800000 | REFUSAL << 5, 0xD65F03C0),
}


class UnknownMachineError(Exception):
    """No code is known for this processor."""


def sysv_hash(name: str) -> int:
    """The hash function of ``DT_HASH`` (gABI, chapter 5)."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value


def _hash_table(names: list[str]) -> bytes:
    """``DT_HASH`` with one bucket a symbol; symbol 0 is the undefined one."""
    size = len(names) + 1
    buckets, chains = [0] * size, [0] * size
    for index, name in enumerate(names, start=1):
        bucket = sysv_hash(name) % size
        chains[index], buckets[bucket] = buckets[bucket], index
    return struct.pack(f"<{2 + 2 * size}I", size, size, *buckets, *chains)


class _Image:
    """Parts one after the other, each aligned to 8 bytes, at addresses that are their offsets."""

    def __init__(self, start: int) -> None:
        self.data = bytearray(start)

    def add(self, part: bytes) -> int:
        """Append a part and give its offset."""
        self.data += bytes(-len(self.data) % 8)
        offset = len(self.data)
        self.data += part
        return offset


def shared_library(soname: str, functions: Iterable[str], machine: str) -> bytes:
    """An ELF shared library in which every function returns `REFUSAL`.

    Raises:
        UnknownMachineError: there is no code for ``machine`` (as ``uname -m`` says it).
    """
    if machine not in _CODE:
        raise UnknownMachineError(f"no stub can be made for {machine}")
    names = sorted(set(functions))
    strings = bytearray(b"\0")
    places = []
    for text in (soname, *names):
        places.append(len(strings))
        strings += text.encode() + b"\0"
    image = _Image(_EHDR + 4 * _PHDR)
    code = image.add(_CODE[machine])
    symbols = bytes(_SYM) + b"".join(
        struct.pack("<IBBHQQ", place, _GLOBAL_FUNCTION, 0, 1, code, len(_CODE[machine]))
        for place in places[1:]
    )
    entries = {
        _DT_SONAME: places[0],
        _DT_HASH: image.add(_hash_table(names)),
        _DT_STRTAB: image.add(bytes(strings)),
        _DT_SYMTAB: image.add(symbols),
        _DT_STRSZ: len(strings),
        _DT_SYMENT: _SYM,
    }
    text_size = len(image.data)
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries.items()) + bytes(_DYN)
    offset = image.add(dynamic)
    address = offset + _PAGE  # the loader writes into the dynamic section: a page of its own
    segments = [
        (_PT_LOAD, _READ | _EXECUTE, 0, 0, text_size, _PAGE),
        (_PT_LOAD, _READ | _WRITE, offset, address, len(dynamic), _PAGE),
        (_PT_DYNAMIC, _READ | _WRITE, offset, address, len(dynamic), 8),
        (_PT_GNU_STACK, _READ | _WRITE, 0, 0, 0, 16),
    ]
    header = b"\x7fELF\2\1\1" + bytes(9)  # 64 bits, little-endian, version 1
    header += struct.pack("<HHIQQQ", 3, _MACHINES[machine], 1, 0, _EHDR, 0)
    header += struct.pack("<IHHHHHH", 0, _EHDR, _PHDR, len(segments), 64, 0, 0)
    for kind, flags, start, where, size, align in segments:
        header += struct.pack("<IIQQQQQQ", kind, flags, start, where, where, size, size, align)
    image.data[: len(header)] = header
    return bytes(image.data)


# --- reading what is needed ----------------------------------------------------------------------


class _Section(NamedTuple):
    """What is needed of a section header."""

    kind: int
    offset: int
    size: int
    link: int


def _tables(path: str, kind: int) -> Iterator[tuple[bytes, bytes]]:
    """Sections of a kind in a 64-bit little-endian ELF file, each with its strings.

    Nothing for other files.  Only these parts are read: extension modules take up hundreds of
    megabytes.
    """
    with open(path, "rb") as file:

        def part(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        header = part(0, _EHDR)
        if len(header) < _EHDR or header[:6] != b"\x7fELF\2\1":
            return
        (table,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        rows = part(table, size * count)
        sections = [
            _Section(*struct.unpack_from("<4xI16xQQI", rows, size * index))
            for index in range(count)
        ]
        for section in (s for s in sections if s.kind == kind):
            strings = sections[section.link]
            yield part(section.offset, section.size), part(strings.offset, strings.size)


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def undefined_symbols(path: str) -> set[str]:
    """Names that an ELF file leaves to other libraries and cannot do without."""
    return {
        _string(strings, name)
        for symbols, strings in _tables(path, _SHT_DYNSYM)
        for name, info, _, section in struct.iter_unpack("<IBBH16x", symbols)
        if name and section == 0 and info >> 4 != _WEAK
    }


def needed_libraries(path: str) -> list[str]:
    """The shared libraries that an ELF file names, in order."""
    return [
        _string(strings, value)
        for entries, strings in _tables(path, _SHT_DYNAMIC)
        for tag, value in struct.iter_unpack("<QQ", entries)
        if tag == _DT_NEEDED
    ]


def driver_functions(files: Iterable[str]) -> set[str]:
    """Functions of the driver that extension modules are linked against.

    A file that cannot be read or is damaged adds none: it will say so itself when it is loaded.
    """
    names: set[str] = set()
    for path in files:
        with contextlib.suppress(OSError, struct.error, IndexError, ValueError):
            names |= undefined_symbols(path)
    return {name for name in names if DRIVER_FUNCTION.fullmatch(name)}


# --- writing -------------------------------------------------------------------------------------


def write_library(folder: str, soname: str, functions: Iterable[str]) -> str:
    """Write a library for this machine; its path.

    Raises:
        UnknownMachineError: there is no code for this machine.
    """
    path = os.path.join(folder, soname)
    data = shared_library(soname, functions, platform.machine())
    with open(path, "wb") as file:
        file.write(data)
    return path


def write_stub(folder: str, modules: Iterable[str]) -> str:
    """Write the driver's stand-in for this machine, with what these modules need; its path.

    Raises:
        UnknownMachineError: there is no code for this machine.
    """
    return write_library(folder, SONAME, driver_functions(modules).union(FUNCTIONS))
