"""Stand-ins for CUDA's shared libraries, written byte by byte: no compiler, toolkit or driver.

vLLM's extension modules are linked against the CUDA driver, and torch against thirteen libraries of
CUDA, so without these they do not load.  A library of the right name whose functions all refuse is
enough for loading: kernel selection calls none of them.  CUDA's toolkit includes such a stub for
the driver, but few images carry it.

Standard library only, and deterministic: the same names give the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import platform
import re
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

SONAME = "libcuda.so.1"
#: The result of every function: ``CUDA_ERROR_STUB_LIBRARY`` of cuda.h, as in CUDA's own stub.
REFUSAL = 34
#: ``CUDA_ERROR_NO_DEVICE`` and ``cudaErrorNoDevice``: torch takes it for a machine without a GPU.
NO_DEVICE = 100
#: Functions of CUDA's libraries that return text; the driver's own return a code like the others.
TEXT_FUNCTION = re.compile(
    r"(?!cu[A-Z])\w+Get(?:Error|Status)(?:String|Name)|ncclGetLastError", re.ASCII
)
TEXT = b"no CUDA here: a generated stand-in for this library\0"
#: Functions of the driver, by cuda.h's naming; those of the runtime are ``cudaXyz``.
DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")
#: Functions that libcudart looks up; the extension modules determine the others.
FUNCTIONS = ("cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2")

#: The paths of the library in CUDA's toolkit, in its compatibility package and of a driver.
DRIVER_PLACES = (
    "/usr/local/cuda*/compat/libcuda.so.1",
    "/usr/local/cuda*/compat/lib*/libcuda.so.1",
    "/usr/local/cuda*/targets/*/lib/stubs/libcuda.so",
    "/usr/local/cuda*/lib64/stubs/libcuda.so",
    "/usr/lib/*-linux-gnu/libcuda.so.1",
)
#: Libraries of the CuTe DSL, below a folder of ``sys.path``: those for 64-bit Arm name the driver.
DSL_LIBRARIES = (
    "nvidia_cutlass_dsl/lib/*.so",
    "nvidia_cutlass_dsl/python_packages/cutlass/_mlir/_mlir_libs/*.so",
    # from 4.6 on
    "nvidia_cutlass_dsl/cu*/lib/*.so",
    "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/*.so",
)

# Numbers of the ELF format: System V gABI, chapters 4 and 5, and its processor supplements.
_MACHINES = {"x86_64": 62, "aarch64": 183}
_EHDR, _PHDR, SYMBOL, _DYN = 64, 56, 24, 16
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_EXECUTE, _WRITE, _READ = 1, 2, 4
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 4, 5, 6, 10, 11, 14
_SHT_DYNAMIC, _SHT_DYNSYM, _DT_NEEDED, _WEAK = 6, 11, 1, 2
# Symbol versions: Linux Standard Base core specification, "Symbol Versioning".
_DT_VERSYM, _DT_VERDEF, _DT_VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
_VERSION_BASE = 1
GLOBAL_FUNCTION = 1 << 4 | 2
#: The largest page of either processor: what is written to begins on a page of its own.
_PAGE = 0x10000
#: A landing pad, then the address of what follows: endbr64, lea rax, ret; bti c, adr x0, ret.
_TEXT_CODE = {
    "x86_64": b"\xf3\x0f\x1e\xfa\x48\x8d\x05\x01\0\0\0\xc3" + TEXT,
    "aarch64": struct.pack("<III", 0xD503245F, 0x10000040, 0xD65F03C0) + TEXT,
}


def _returning(answer: int, machine: str) -> bytes:
    """A landing pad, then ``return answer``: endbr64, mov eax, ret; bti c, mov w0, ret."""
    if machine == "x86_64":
        return b"\xf3\x0f\x1e\xfa\xb8" + struct.pack("<I", answer) + b"\xc3"
    return struct.pack("<III", 0xD503245F, 0x52800000 | answer << 5, 0xD65F03C0)


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


def hash_table(names: list[str]) -> bytes:
    """``DT_HASH`` with one bucket a symbol; symbol 0 is the undefined one."""
    size = len(names) + 1
    buckets, chains = [0] * size, [0] * size
    for index, name in enumerate(names, start=1):
        bucket = sysv_hash(name) % size
        chains[index], buckets[bucket] = buckets[bucket], index
    return struct.pack(f"<{2 + 2 * size}I", size, size, *buckets, *chains)


class Image:
    """Parts one after the other, each aligned to 8 bytes, at addresses that are their offsets."""

    def __init__(self, start: int) -> None:
        self.data = bytearray(start)

    @classmethod
    def of_header(cls) -> Image:
        """With room for the header and four segments."""
        return cls(_EHDR + 4 * _PHDR)

    def add(self, part: bytes) -> int:
        """Append a part and give its offset."""
        self.data += bytes(-len(self.data) % 8)
        offset = len(self.data)
        self.data += part
        return offset


def _version_definitions(names: list[int], hashes: list[int]) -> bytes:
    """``.gnu.version_d``: the library's own name, then each version, by their places as strings."""
    rows = b""
    for index, (name, value) in enumerate(zip(names, hashes, strict=True), start=1):
        following = 28 if index < len(names) else 0
        flags = _VERSION_BASE if index == 1 else 0
        rows += struct.pack("<HHHHIII", 1, flags, index, 1, value, 20, following)
        rows += struct.pack("<II", name, 0)
    return rows


class Strings:
    """A string table; the same text is kept once."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """The offset of a text."""
        if text not in self._places:
            self._places[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._places[text]


def shared_library(
    soname: str,
    functions: Iterable[str],
    machine: str,
    versions: Mapping[str, str] | None = None,
    answer: int = REFUSAL,
) -> bytes:
    """An ELF shared library in which every function returns ``answer``, or `TEXT` for a text.

    ``versions`` gives the symbol version of those functions that are asked for with one.

    Raises:
        UnknownMachineError: there is no code for ``machine`` (as ``uname -m`` prints it).
    """
    if machine not in _MACHINES:
        raise UnknownMachineError(f"no stub can be made for {machine}")
    names = sorted(set(functions))
    version_of = {name: (versions or {}).get(name, "") for name in names}
    known = sorted({version for version in version_of.values() if version})
    strings = Strings()
    places = [strings.place(name) for name in names]
    image = Image.of_header()
    number, text = _returning(answer, machine), _TEXT_CODE[machine]
    codes = {code: (image.add(code), len(code)) for code in (number, text)}
    symbols = bytearray(SYMBOL)
    for name, place in zip(names, places, strict=True):
        code = text if TEXT_FUNCTION.fullmatch(name) else number
        symbols += struct.pack("<IBBHQQ", place, GLOBAL_FUNCTION, 0, 1, *codes[code])
    entries = entries_of(strings, soname, image.add(bytes(symbols)), image.add(hash_table(names)))
    if known:
        defined = [soname, *known]
        indices = [known.index(v) + 2 if (v := version_of[name]) else 1 for name in names]
        entries[_DT_VERSYM] = image.add(struct.pack(f"<{len(names) + 1}H", 0, *indices))
        entries[_DT_VERDEF] = image.add(
            _version_definitions([strings.place(d) for d in defined], list(map(sysv_hash, defined)))
        )
        entries[_DT_VERDEFNUM] = len(defined)
    add_strings(image, strings, entries)
    return finished(image, entries, machine)


def entries_of(strings: Strings, soname: str, symbols: int, hashes: int) -> dict[int, int]:
    """The dynamic section's first entries; ``symbols`` and ``hashes``: where those tables are."""
    return {
        _DT_SONAME: strings.place(soname),
        _DT_HASH: hashes,
        _DT_SYMTAB: symbols,
        _DT_SYMENT: SYMBOL,
    }


def add_strings(image: Image, strings: Strings, entries: dict[int, int]) -> None:
    """Append the strings, the last part before the dynamic section."""
    entries[_DT_STRTAB] = image.add(bytes(strings.data))
    entries[_DT_STRSZ] = len(strings.data)


def writable_address(image: Image, entries: Mapping[int, int]) -> int:
    """Where the bytes behind the dynamic section will be."""
    return -(-len(image.data) // 8) * 8 + _DYN * (len(entries) + 1) + _PAGE


def finished(image: Image, entries: Mapping[int, int], machine: str, room: int = 0) -> bytes:
    """The image with its dynamic section, segments and header.

    ``room`` bytes behind the dynamic section are writable; a function may use them.
    """
    text_size = len(image.data)
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries.items()) + bytes(_DYN)
    offset = image.add(dynamic + bytes(room))
    address = offset + _PAGE  # the loader writes into the dynamic section: a page of its own
    size = len(dynamic) + room
    segments = [
        (_PT_LOAD, _READ | _EXECUTE, 0, 0, text_size, _PAGE),
        (_PT_LOAD, _READ | _WRITE, offset, address, size, _PAGE),
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
    """Symbols that an ELF file requires from other libraries."""
    return {
        _string(strings, name)
        for symbols, strings in _tables(path, _SHT_DYNSYM)
        for name, info, _, section in struct.iter_unpack("<IBBH16x", symbols)
        if name and section == 0 and info >> 4 != _WEAK
    }


def defined_symbols(path: str) -> set[str]:
    """Symbols that an ELF file exports."""
    return {
        _string(strings, name)
        for symbols, strings in _tables(path, _SHT_DYNSYM)
        for name, _, _, section in struct.iter_unpack("<IBBH16x", symbols)
        if name and section
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

    A file that cannot be read or is damaged adds none: loading it will show the error.
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


# --- loading -------------------------------------------------------------------------------------


def loads(library: str) -> bool:
    """Load a library for everything that is loaded later; return whether that worked."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        return True
    return False


def load_driver(note: Callable[[str], None], scratch: str, modules: Iterable[str]) -> None:
    """If no driver is installed, load a stand-in so that extension modules can load.

    The toolkit's stub and its compatibility library carry the driver's soname, as ours does, so a
    module that asks for it later finds it loaded.  Selection calls none of their functions.
    """
    if loads(SONAME):
        return
    installed = [path for place in DRIVER_PLACES for path in sorted(glob.glob(place))]
    for path in installed:
        if loads(path):
            note(f"driver: {path} in place of {SONAME}")
            return
    try:
        path = write_stub(scratch, modules)
    except UnknownMachineError as error:
        note(f"driver: none ({error})")
        return
    if loads(path):
        note(
            f"driver: a generated {SONAME} whose functions all return "
            f"CUDA_ERROR_STUB_LIBRARY ({REFUSAL})"
        )


def dsl_libraries() -> list[str]:
    """The installed CuTe DSL's libraries that do not load without the driver's."""
    libraries = []
    for folder, pattern in itertools.product(sys.path, DSL_LIBRARIES):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern))):
            with contextlib.suppress(OSError, struct.error, IndexError, ValueError):
                if SONAME in needed_libraries(path):
                    libraries.append(path)
    return libraries
