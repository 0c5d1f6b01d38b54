"""The undefined and defined symbols of a shared library, from its dynamic symbol table."""

from __future__ import annotations

import struct
from collections.abc import Mapping  # noqa: TC003 - a cache reads the type
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Numbers of the ELF format (System V gABI, chapter 4): binding, and the index of a symbol's
#: version, whose highest bit means hidden.
_WEAK, _LOCAL = 2, 0
_VERSION_BITS = 0x7FFF
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True, kw_only=True)
class ElfFacts:
    """One shared library."""

    #: as in ``uname -m``
    machine: str
    #: sonames, in order
    needed: tuple[str, ...]
    #: required symbol -> its library and version, such as
    #: ``("libc.so.6", "GLIBC_2.14")``; empty strings without a version
    undefined: Mapping[str, tuple[str, str]]
    exported: frozenset[str]
    #: library -> required versions
    versions: Mapping[str, tuple[str, ...]]


def read_elf(path: Path) -> ElfFacts:
    """Read a shared library's dynamic section and symbols, but no code.

    Raises:
        UsageError: it is not a shared library that can be read.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            file: Any = ELFFile(stream)
            dynamic = file.get_section_by_name(".dynamic")
            if dynamic is None or file.elfclass != 64 or not file.little_endian:
                raise UsageError(f"{path} is not a shared library of a 64-bit machine")
            needed = tuple(
                tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"
            )
            versions, numbers = _versions(file)
            undefined, exported = _symbols(file, numbers)
            machine = _MACHINES.get(file["e_machine"], file["e_machine"])
    except (ELFError, OSError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path} is not a shared library that can be read: {error}") from None
    return ElfFacts(
        machine=machine,
        needed=needed,
        undefined=undefined,
        exported=frozenset(exported),
        versions=versions,
    )


def _versions(file: Any) -> tuple[dict[str, tuple[str, ...]], dict[int, tuple[str, str]]]:
    """Versions by library, and by version index."""
    section = file.get_section_by_name(".gnu.version_r")
    versions: dict[str, tuple[str, ...]] = {}
    numbers: dict[int, tuple[str, str]] = {}
    for library, rows in section.iter_versions() if section else ():
        found = [(row.name, row.entry.vna_other) for row in rows]
        versions[library.name] = tuple(sorted(name for name, _ in found))
        numbers.update({number: (library.name, name) for name, number in found})
    return versions, numbers


def _symbols(
    file: Any, numbers: Mapping[int, tuple[str, str]]
) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Undefined and exported symbols, parsed as bytes: a library of torch has 100 000."""
    table = file.get_section_by_name(".dynsym")
    if table is None:
        return {}, set()
    strings = file.get_section(table["sh_link"]).data()
    marks = file.get_section_by_name(".gnu.version")
    number = _numbers(marks.data() if marks else b"")
    undefined: dict[str, tuple[str, str]] = {}
    exported = set()
    for place, info, _, section in struct.iter_unpack("<IBBH16x", table.data()):
        mark = next(number)
        if not place or info >> 4 == _LOCAL:
            continue
        name = strings[place : strings.index(b"\0", place)].decode()
        if section:
            exported.add(name)
        elif info >> 4 != _WEAK:
            undefined[name] = numbers.get(mark & _VERSION_BITS, ("", ""))
    return undefined, exported


def _numbers(marks: bytes) -> Iterator[int]:
    yield from (mark for (mark,) in struct.iter_unpack("<H", marks))
    while True:
        yield 0
