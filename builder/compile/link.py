"""Links object files into a library that is loaded with the prebuilt extension of a base.

Nothing is executed.  The rule: an extension wheel may only need symbols and versions that the
base's extension needs too, or that one of its libraries provides.  A library has 1 MB to 1 GB and
may be in a wheel on the index, so each is read once; the facts are cached by its sha256.

The base's libraries need not exist here: the linker uses stub libraries with the symbols that the
real ones export, so missing symbols are detected.  A library linked on a new system requires the
newest version of a function of glibc, and fails to load on an older system that has the function
under an older version.  glibc keeps the old versions, so the link asks for those.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from builder.common.document import read
from builder.common.files import write_atomically
from builder.common.machinecode import ElfFacts, on_disk, read_elf
from builder.common.paths import cache_dir
from builder.compile.executor import LocalExecutor, Step
from builder.compile.host import NATIVE
from builder.errors import EngineError, UsageError
from builder.probes.stub_driver import DRIVER_FUNCTION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.compile.executor import Executor
    from builder.compile.host import HostCompiler


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
            UsageError: the distribution is not installed.
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

    def abi_base(self, module: str, symbols: Iterable[str]) -> AbiBase:
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
            UsageError: the base has no such extension module.
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


# ------------------------------------------------------------------- older symbol versions of glibc


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
    available = _library_versions(library)
    older = {}
    for symbol, (_, version) in symbols.items():
        fitting = [
            (number, name)
            for name in available.get(symbol, ())
            if (match := _GLIBC.fullmatch(name))
            and (number := tuple(map(int, match[1].split(".")))) <= limit
        ]
        if _GLIBC.fullmatch(version) and fitting:
            older[symbol] = max(fitting)[1]
    return older


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
        by_function: dict[str, list[str]] = {}
        for number, symbol in enumerate(file.get_section_by_name(".dynsym").iter_symbols()):
            mark = marks.get_symbol(number)["ndx"]
            if symbol["st_shndx"] != "SHN_UNDEF" and isinstance(mark, int):
                name = names.get(mark & 0x7FFF)
                if name:
                    by_function.setdefault(symbol.name, []).append(name)
    return {symbol: tuple(versions) for symbol, versions in by_function.items()}


# ----------------------------------------------------------------------------------------- the link


#: Nothing is exported: the library only registers operators.
_EXPORTS = "{ local: *; };\n"
_LINK = ("-s", "-z", "now", "-z", "noexecstack", "--build-id=sha1", "--as-needed")


Runtime = Literal["shared", "static"]


@dataclass(frozen=True, kw_only=True)
class Linked:
    """The library, and the result of its ABI check."""

    data: bytes
    #: ``shared``: the base's CUDA runtime; ``static``: its own
    runtime: Runtime
    proof: AbiProof
    base: AbiBase
    #: functions of the C library that use an older version than this machine's
    older: Mapping[str, str]


def toolkit_libraries(nvcc: Path, host: HostCompiler = NATIVE) -> Path:
    """The folder with this compiler's CUDA runtime, for the platform of ``host``.

    Raises:
        EngineError: the folder is missing or unknown.
    """
    words = [str(nvcc), *host.words, "--dryrun", "-shared", "x.o"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in re.findall(r"LIBRARIES=(.*)", done.stderr + done.stdout):
        for folder in re.findall(r'-L"?([^"\s]+)', line):
            if any(Path(folder).glob("libcudart*")):
                return Path(folder).resolve()
    raise EngineError(
        f"{nvcc} has no libcudart in its toolkit, so the toolkit is incomplete",
        hint="install the CUDA runtime's development files of the same version",
    )


def link(
    objects: Sequence[Path],
    base: InstalledLibraries,
    module: str,
    nvcc: Path,
    cuda: str,
    where: Executor | None = None,
) -> Linked:
    """Link objects for a base, and check the result against it.

    Args:
        objects: the object files.
        base: the base that loads it.
        module: the base's extension that it extends.
        nvcc: the compiler, which calls the linker and has the runtime.
        cuda: its version.
        where: the executor; None means this machine.

    Raises:
        BuildFailed: linking fails.
        EngineError: there is no host compiler, or no CUDA runtime to link.
        UsageError: the base lacks the extension, or a library cannot be read.
        RemoteError: a wheel of the base cannot be read.
    """
    shared = f"libcudart.so.{cuda.partition('.')[0]}" in base.facts(module).needed
    runtime: Runtime = "shared" if shared else "static"
    there = where or LocalExecutor()
    if isinstance(there, LocalExecutor) and shutil.which(there.host.command) is None:
        raise EngineError(
            f"no host compiler ({there.host.command}) on this machine; it is needed for linking"
        )
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        run = _Linker(nvcc=str(nvcc), folder=Path(scratch), runtime=runtime, where=there)
        inputs = run.take(objects)
        first = read_elf(run.link("first", inputs))
        open_symbols = [s for s, (lib, _) in first.undefined.items() if not SYSTEM.fullmatch(lib)]
        against = base.abi_base(module, open_symbols)
        stand_ins, before = run.stand_ins(_offers(against, open_symbols))
        library = run.link("second", [*inputs, *stand_ins], before)
        facts = read_elf(library)
        newer = too_new(facts, against)
        older = older_versions(newer, against, there.c_library) if newer else {}
        if newer:
            # requirements of the base's own libraries are always met
            offers = _offers(against, [*open_symbols, *(set(newer) - set(older))])
            stand_ins, before = run.stand_ins(offers)
            shim, step = run.assemble("older", shim_source(older, against.extension.machine))
            wrapped = sorted(older)
            library = run.link("third", [*inputs, shim, *stand_ins], [*before, step], wrapped)
            facts = read_elf(library)
        return Linked(
            data=library.read_bytes(),
            runtime=runtime,
            proof=check_abi(facts, against, own_runtime=not shared),
            base=against,
            older=older,
        )


def _offers(base: AbiBase, symbols: Iterable[str]) -> dict[str, list[str]]:
    """Library of the base -> symbols required from it."""
    offers: dict[str, list[str]] = {}
    for symbol in sorted(symbols):
        source = base.source_of(symbol)
        if source and not source.startswith("libcudart."):
            offers.setdefault(source, []).append(symbol)
    assert all(name == DRIVER or name in base.libraries for name in offers)
    return offers


@dataclass(frozen=True, kw_only=True)
class _Linker:
    """The linker; paths are relative, because the folder's path differs where it runs."""

    nvcc: str
    folder: Path
    runtime: str
    where: Executor

    def take(self, objects: Sequence[Path]) -> list[str]:
        """Copy objects under simple names, in order."""
        names = [f"{number}.o" for number in range(len(objects))]
        for name, path in zip(names, objects, strict=True):
            shutil.copyfile(path, self.folder / name)
        return names

    def link(
        self,
        name: str,
        inputs: Sequence[str],
        before: Sequence[Step] = (),
        wrap: Sequence[str] = (),
    ) -> Path:
        """Link after some other steps; returns the library."""
        target = f"{name}.so"
        (self.folder / "exports").write_text(_EXPORTS)
        options = [*_LINK, "--version-script=exports", *(f"--wrap={symbol}" for symbol in wrap)]
        words = [self.nvcc, *self.where.host.words, "-shared", "--no-device-link"]
        words.append(f"-cudart={self.runtime}")
        for option in options:
            words += ["-Xlinker", option]
        last = Step(words=(*words, *inputs, "-o", target), failure="the linker refused")
        self.where.run(self.folder, [*before, last], [target])
        return self.folder / target

    def stand_ins(self, offers: Mapping[str, Sequence[str]]) -> tuple[list[str], list[Step]]:
        """Stub libraries with the base's names and symbols."""
        libraries, steps = [], []
        for soname, symbols in offers.items():
            rows = [f".globl {s}\n.type {s}, %function\n{s}:" for s in symbols]
            object_file, step = self.assemble(soname, "\n".join([".text", *rows, ""]))
            target = f"{soname}.stand-in.so"  # nvcc takes no name like lib.so.1
            words = (self.where.host.command, "-shared", "-nostdlib", f"-Wl,-soname,{soname}")
            message = f"no stand-in for {soname}"
            steps += [step, Step(words=(*words, object_file, "-o", target), failure=message)]
            libraries.append(target)
        return libraries, steps

    def assemble(self, name: str, text: str) -> tuple[str, Step]:
        """An object from assembly, and the step that builds it."""
        source, target = f"{name}.s", f"{name}.o"
        (self.folder / source).write_text(text)
        words = (self.where.host.command, "-c", source, "-o", target)
        return target, Step(words=words, failure=f"cannot assemble {name}")
