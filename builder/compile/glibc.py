"""Links against older symbol versions of glibc, so that a library loads on older systems.

A library linked on a new system requires the newest version of a function, and fails to load
on an older system that has the function under an older version.  glibc keeps the old versions.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.compile.abi import AbiBase

_GLIBC = re.compile(r"GLIBC_(\d+(?:\.\d+)*)")
#: Jump instructions by architecture.
_JUMP = {"x86_64": "jmp {}@PLT", "aarch64": "b {}"}
#: A hint of glibc 2.32: non-zero while there is only one thread.  Zero is always safe.
_HINT = "__libc_single_threaded"


def older_versions(
    symbols: Mapping[str, tuple[str, str]], base: AbiBase, library: Path
) -> dict[str, str]:
    """Function -> its newest version that a base already requires.

    Args:
        symbols: functions required in a version that is too new for the base.
        base: determines the newest allowed version.
        library: the C library to link with.
    """
    limit = base.newest("GLIBC")
    kept = _library_versions(library)
    found = {}
    for symbol, (_, version) in symbols.items():
        fitting = [
            (number, name)
            for name in kept.get(symbol, ())
            if (match := _GLIBC.fullmatch(name))
            and (number := tuple(map(int, match[1].split(".")))) <= limit
        ]
        if _GLIBC.fullmatch(version) and fitting:
            found[symbol] = max(fitting)[1]
    return found


def shim_source(older: Mapping[str, str], machine: str) -> str:
    """Assembly for ``--wrap``: each function jumps to its older version.

    It defines glibc's single-thread hint as false, because C++ headers use it.
    """
    rows = [f".globl {_HINT}", f".hidden {_HINT}", f".type {_HINT}, %object", f".size {_HINT}, 1"]
    rows += [".section .rodata", f"{_HINT}: .byte 0", ".text"]
    for symbol, version in sorted(older.items()):
        rows += [
            f".symver older_{symbol}, {symbol}@{version}",
            f".globl __wrap_{symbol}",
            f".hidden __wrap_{symbol}",
            f".type __wrap_{symbol}, %function",
            f"__wrap_{symbol}:",
            f"    {_JUMP[machine].format(f'older_{symbol}')}",
        ]
    return "\n".join([*rows, '.section .note.GNU-stack,"",%progbits', ""])


@cache
def _library_versions(library: Path) -> dict[str, tuple[str, ...]]:
    """Function of a C library -> all its versions."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as stream:
        file: Any = ELFFile(stream)
        names = {
            version.entry.vd_ndx: next(rows).name
            for version, rows in file.get_section_by_name(".gnu.version_d").iter_versions()
        }
        marks = file.get_section_by_name(".gnu.version")
        found: dict[str, list[str]] = {}
        for number, symbol in enumerate(file.get_section_by_name(".dynsym").iter_symbols()):
            mark = marks.get_symbol(number)["ndx"]
            if symbol["st_shndx"] != "SHN_UNDEF" and isinstance(mark, int):
                name = names.get(mark & 0x7FFF)
                if name:
                    found.setdefault(symbol.name, []).append(name)
    return {symbol: tuple(versions) for symbol, versions in found.items()}
