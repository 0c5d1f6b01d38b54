"""Links object files into a library that is loaded with a prebuilt extension.

The base's libraries need not exist here: the linker uses stub libraries with the symbols that the
real ones export, so missing symbols are detected.  A library linked on a new system requires the
newest version of a function of glibc, and fails to load on an older system that has the function
under an older version.  glibc keeps the old versions, so the link asks for those.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from builder.common.machinecode import read_elf
from builder.compile.abi import DRIVER, SYSTEM, AbiProof, check_abi, too_new
from builder.compile.executor import LocalExecutor, Step
from builder.compile.host import NATIVE
from builder.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.compile.abi import AbiBase, InstalledLibraries
    from builder.compile.executor import Executor
    from builder.compile.host import HostCompiler

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
        against = base.held_against(module, open_symbols)
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
        last = Step(words=(*words, *inputs, "-o", target), said="the linker refused")
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
            steps += [step, Step(words=(*words, object_file, "-o", target), said=message)]
            libraries.append(target)
        return libraries, steps

    def assemble(self, name: str, text: str) -> tuple[str, Step]:
        """An object from assembly, and the step that builds it."""
        source, target = f"{name}.s", f"{name}.o"
        (self.folder / source).write_text(text)
        words = (self.where.host.command, "-c", source, "-o", target)
        return target, Step(words=words, said=f"cannot assemble {name}")
