"""Checks whether a library can be loaded with a prebuilt extension: symbols, versions, libraries.

Nothing is executed.  The rule: an extension wheel may only need symbols and versions that the
base's extension needs too, or that one of its libraries provides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.runtime.stub_driver import DRIVER_FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.machinecode.elf import ElfFacts

#: Libraries of glibc and the compiler, for which only versions are compared.
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux-[\w-]+)\.so\.\d+")
#: A version that is a family and a number: GLIBC_2.14, GLIBCXX_3.4.21, CXXABI_1.3.9, GCC_3.0.
_NUMBERED = re.compile(r"([A-Z]+)_(\d+(?:\.\d+)*)")
#: CPython's functions and data; an extension wheel must not need any.
_PYTHON = re.compile(r"_?Py[A-Z_]\w*")
#: Functions of torch that return a ``cudaDeviceProp``, whose layout changed in CUDA 13.
_LAYOUT = re.compile(r"_ZN\w*(getCurrentDeviceProperties|getDeviceProperties)E")
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, kw_only=True)
class AbiBase:
    """The base that an extension wheel is checked against.

    ``extension`` is the base's module, which is known to load.  ``libraries`` are its dependencies
    that were read: soname -> facts.
    """

    extension: ElfFacts
    libraries: Mapping[str, ElfFacts]
    #: soname missing in the base -> the file that was read instead
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    #: sonames that the extension needs and the base has not
    missing: tuple[str, ...] = ()

    @property
    def needed(self) -> frozenset[str]:
        """Libraries that the extension loads into a process."""
        below = (name for library in self.libraries.values() for name in library.needed)
        return frozenset([*self.extension.needed, *below])

    def allowed(self, library: str) -> set[str]:
        """Versions of a library that the extension or its dependencies require."""
        every = [self.extension, *self.libraries.values()]
        return {version for facts in every for version in facts.versions.get(library, ())}

    def newest(self, family: str) -> tuple[int, ...]:
        """The newest required version of a version family."""
        every = [self.extension, *self.libraries.values()]
        found = (
            _number(version)[1]
            for facts in every
            for versions in facts.versions.values()
            for version in versions
            if _number(version)[0] == family
        )
        return max(found, default=())

    def source_of(self, symbol: str) -> str:
        """The library that has a symbol, or ``""``."""
        for name, facts in self.libraries.items():
            if symbol in facts.exported:
                return name
        driver = DRIVER in self.extension.needed and symbol in self.extension.undefined
        return DRIVER if driver and DRIVER_FUNCTION.fullmatch(symbol) else ""


@dataclass(frozen=True, kw_only=True)
class AbiProof:
    """The result: what was compared, and a message for every fault."""

    symbols: Mapping[str, int]
    needed: tuple[str, ...]
    versions: Mapping[str, str]
    faults: tuple[str, ...]
    #: unresolved symbols
    open: tuple[str, ...] = ()


def check_abi(built: ElfFacts, base: AbiBase, *, own_runtime: bool = False) -> AbiProof:
    """Check an extension wheel against a base.

    Args:
        built: the linked library.
        base: the base.
        own_runtime: the library includes a CUDA runtime of another version than the base's.
    """
    counted: dict[str, int] = {}
    unknown = []
    for symbol, (library, _) in sorted(built.undefined.items()):
        source = library if SYSTEM.fullmatch(library) else base.source_of(symbol)
        counted[source] = counted.get(source, 0) + 1
        if not source:
            unknown.append(symbol)
    counted.pop("", None)
    return AbiProof(
        symbols=dict(sorted(counted.items())),
        needed=built.needed,
        versions=_newest(built),
        faults=tuple(_faults(built, base, own_runtime=own_runtime)),
        open=tuple(unknown),
    )


def _faults(built: ElfFacts, base: AbiBase, *, own_runtime: bool) -> Iterator[str]:
    if built.machine != base.extension.machine:
        yield f"it is for {built.machine}, the base is for {base.extension.machine}"
    yield from _library_faults(built, base)
    for symbol, (library, version) in sorted(built.undefined.items()):
        if _PYTHON.fullmatch(symbol):
            yield f"it uses {symbol} of CPython, so it works with one Python version only"
        elif own_runtime and _LAYOUT.search(symbol):
            yield f"it uses a cudaDeviceProp from {symbol}, which belongs to another CUDA version"
        elif not SYSTEM.fullmatch(library) and not base.source_of(symbol):
            asked = f" (of {library}, {version})" if library else ""
            yield f"it uses {symbol}{asked}, which no library of the base's extension provides"
    for library, versions in sorted(built.versions.items()):
        for version in versions:
            yield from _version_fault(base, library, version)


def _library_faults(built: ElfFacts, base: AbiBase) -> Iterator[str]:
    for library in base.missing:
        yield f"the base lacks {library}, which its own extension needs: is its torch a CPU build?"
    for library in built.needed:
        if library not in base.needed:
            yield f"it needs {library}, which the base's extension does not need"


def _version_fault(base: AbiBase, library: str, version: str) -> Iterator[str]:
    if version in base.allowed(library):
        return
    family, number = _number(version)
    newest = base.newest(family)
    if not number or number > newest:
        shown = f"{family}_{'.'.join(map(str, newest))}" if newest else "none of that name"
        yield f"it needs {version} of {library}; the base needs {shown} at most"


def too_new(built: ElfFacts, base: AbiBase) -> dict[str, tuple[str, str]]:
    """Symbols required in a newer version than the base requires."""
    return {
        symbol: (library, version)
        for symbol, (library, version) in built.undefined.items()
        if SYSTEM.fullmatch(library) and list(_version_fault(base, library, version))
    }


def _number(version: str) -> tuple[str, tuple[int, ...]]:
    found = _NUMBERED.fullmatch(version)
    return (found[1], tuple(map(int, found[2].split(".")))) if found else (version, ())


def _newest(facts: ElfFacts) -> dict[str, str]:
    newest: dict[str, tuple[int, ...]] = {}
    for versions in facts.versions.values():
        for family, number in map(_number, versions):
            if number:
                newest[family] = max(newest.get(family, ()), number)
    return {family: ".".join(map(str, number)) for family, number in sorted(newest.items())}
