"""The prebuilt extension of a base, and whether a library can be loaded with it.

Nothing is executed.  The rule: an extension wheel may only need symbols and versions that the
base's extension needs too, or that one of its libraries provides.  A library has 1 MB to 1 GB and
may be in a wheel on the index, so each is read once; the facts are cached by its sha256.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from builder.common.document import read
from builder.common.machinecode import ElfFacts, on_disk, read_elf
from builder.common.paths import cache_dir
from builder.common.pypi import write_atomically
from builder.errors import UsageError
from builder.probes.stub_driver import DRIVER_FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from builder.applier.trees import Tree

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
        required = (
            _number(version)[1]
            for facts in every
            for versions in facts.versions.values()
            for version in versions
            if _number(version)[0] == family
        )
        return max(required, default=())

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
    match = _NUMBERED.fullmatch(version)
    return (match[1], tuple(map(int, match[2].split(".")))) if match else (version, ())


def _newest(facts: ElfFacts) -> dict[str, str]:
    newest: dict[str, tuple[int, ...]] = {}
    for versions in facts.versions.values():
        for family, number in map(_number, versions):
            if number:
                newest[family] = max(newest.get(family, ()), number)
    return {family: ".".join(map(str, number)) for family, number in sorted(newest.items())}


# -------------------------------------------------------------------------- the libraries of a base


#: Version of the records in the cache.
_SCHEMA = 1
#: Small libraries first: large ones are read only for symbols that these lack.
_ORDER = ("libc10.so", "libc10_cuda.so", "libcudart.so", "libtorch.so", "libtorch_cpu.so")
#: Distributions with the libraries of a base of released wheels.
DISTRIBUTIONS = (
    "vllm", "torch", "cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12",
)  # fmt: skip


class InstalledLibraries:
    """The extension modules and shared libraries below a site-packages."""

    def __init__(self, tree: Tree, toolkit: Path | None = None) -> None:
        """Read a tree.

        Args:
            tree: site-packages with vLLM and torch.
            toolkit: a folder with the CUDA runtime, for bases without it.
        """
        self._tree = tree
        self._toolkit = toolkit
        self._read: dict[str, ElfFacts] = {}
        self.stand_ins: dict[str, str] = {}

    def version(self, distribution: str) -> str:
        """The installed version of a distribution, without its local part (``+cu130``).

        Raises:
            UsageError: it is not installed.
        """
        installed = self._tree.distributions().get(distribution)
        if installed is None:
            raise UsageError(f"the base has no {distribution}")
        return installed.version.partition("+")[0]

    def wheel_platform(self) -> str:
        """The platform tag of vLLM's wheel: ``manylinux_2_31_aarch64``.

        Raises:
            UsageError: its ``WHEEL`` file has none.
        """
        installed = self._tree.distributions().get("vllm")
        data = self._tree.read(f"{installed.info_dir}/WHEEL") if installed else None
        tag = re.search(rb"^Tag: \S+-(\w+)\s*$", data or b"", re.MULTILINE)
        if tag is None:
            raise UsageError("the base's vllm has no wheel tag, so its platform is unknown")
        return tag[1].decode()

    def facts(self, path: str) -> ElfFacts:
        """The symbols and versions that a library of the tree requires and provides.

        Raises:
            UsageError: it does not exist, or it cannot be read.
            RemoteError: a wheel on the index cannot be read.
        """
        if path not in self._read:
            digest = self._tree.digest(path)
            if digest is None:
                raise UsageError(f"the base has no {path}")
            self._read[path] = self._cached(digest, path)
        return self._read[path]

    def _cached(self, digest: str, path: str) -> ElfFacts:
        file = cache_dir() / "elf" / f"{digest}-{_SCHEMA}.json"
        with contextlib.suppress(OSError, ValueError):
            return read(json.loads(file.read_bytes()), ElfFacts)
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            facts = read_elf(on_disk(self._tree, path, Path(scratch)))
        row = {**asdict(facts), "exported": sorted(facts.exported)}
        write_atomically(file, json.dumps(row).encode())
        return facts

    def library(self, soname: str) -> ElfFacts | None:
        """A library by its soname, or None."""
        for path in self._places(soname):
            if self._tree.digest(path) is not None:
                return self.facts(path)
        if soname.startswith("libcudart.so.") and self._toolkit is not None:
            file = self._toolkit / soname
            if file.is_file():
                self.stand_ins[soname] = str(file)
                return read_elf(file)
        return None

    def _places(self, soname: str) -> Iterable[str]:
        yield f"torch/lib/{soname}"
        for part in self._tree.children("nvidia"):
            yield f"nvidia/{part}/lib/{soname}"

    def held_against(self, module: str, symbols: Iterable[str]) -> AbiBase:
        """The base for an ABI check of these symbols.

        Args:
            module: the extension that the wheel extends, such as ``vllm/_C.abi3.so``.
            symbols: undefined symbols of the extension wheel.
        """
        extension = self.facts(module)
        libraries: dict[str, ElfFacts] = {}
        missing: list[str] = []
        open_symbols = set(symbols)
        for soname in sorted(extension.needed, key=_rank):
            if SYSTEM.fullmatch(soname) or soname == DRIVER:
                continue
            if _rank(soname)[0] == len(_ORDER) and not open_symbols:
                break
            facts = self.library(soname)
            if facts is None:
                missing.append(soname)
            else:
                libraries[soname] = facts
                open_symbols -= facts.exported
        return AbiBase(
            extension=extension,
            libraries=libraries,
            stand_ins=dict(self.stand_ins),
            missing=tuple(missing) if open_symbols else (),
        )

    def file(self, path: str, scratch: Path) -> Path:
        """A file of the tree on disk: in place, or copied to ``scratch``.

        Raises:
            RemoteError: a wheel on the index cannot be read.
        """
        return on_disk(self._tree, path, scratch)

    def module(self, pattern: str) -> str:
        """The path of an extension module: ``vllm/_C.abi3.so`` for ``vllm/_C``.

        Raises:
            UsageError: the base has none.
        """
        folder, _, stem = pattern.rpartition("/")
        for name in self._tree.children(folder):
            if PurePosixPath(name).name.partition(".")[0] == stem and name.endswith(".so"):
                return f"{folder}/{name}"
        raise UsageError(
            f"the base has no extension {pattern}: is vllm installed there, with its compiled code?"
        )


def _rank(soname: str) -> tuple[int, str]:
    place = next((i for i, name in enumerate(_ORDER) if soname.startswith(name)), len(_ORDER))
    return place, soname
