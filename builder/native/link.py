"""Linking objects into a library that goes beside a prebuilt extension.

The base's libraries need not be here: the linker sees stand-ins of the same names with the symbols
that the real ones export, so a symbol that none of them has stays open and is found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import BuildFailed, EngineError
from builder.native.abi import DRIVER, SYSTEM, AbiProof, check_abi, too_new
from builder.native.elf import read_elf
from builder.native.glibc import older_versions, shim_source
from builder.native.host import NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.native.abi import AbiBase
    from builder.native.base import NativeBase
    from builder.native.host import HostCompiler

#: Nothing is exported: the library is loaded for what it registers.
_EXPORTS = "{ local: *; };\n"
_LINK = ("-s", "-z", "now", "-z", "noexecstack", "--build-id=sha1", "--as-needed")


@dataclass(frozen=True, kw_only=True)
class Linked:
    """The library, and what holding it against the base gave."""

    data: bytes
    #: ``shared``: the base's own CUDA runtime; ``static``: one of its own
    runtime: str
    proof: AbiProof
    base: AbiBase
    #: functions of the C library that are asked for in an older version than this machine's
    older: Mapping[str, str]


def toolkit_libraries(nvcc: Path, host: HostCompiler = NATIVE) -> Path:
    """The folder with the CUDA runtime that this compiler links, for the platform of ``host``.

    Raises:
        EngineError: it does not say, or there is none.
    """
    words = [str(nvcc), *host.words, "--dryrun", "-shared", "x.o"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in re.findall(r"LIBRARIES=(.*)", done.stderr + done.stdout):
        for folder in re.findall(r'-L"?([^"\s]+)', line):
            if any(Path(folder).glob("libcudart*")):
                return Path(folder).resolve()
    raise EngineError(
        f"{nvcc} names no folder that has libcudart: the toolkit is incomplete",
        hint="install the CUDA runtime's development files of the same version",
    )


def link(
    objects: Sequence[Path],
    base: NativeBase,
    module: str,
    nvcc: Path,
    cuda: str,
    host: HostCompiler = NATIVE,
) -> Linked:
    """Link objects for a base, and hold the result against it.

    Args:
        objects: what is linked.
        base: where it will be loaded.
        module: the base's extension that it goes with.
        nvcc: the compiler, which knows the host's linker and its own runtime.
        cuda: its version.
        host: the compiler of the base's platform.

    Raises:
        BuildFailed: the linker refuses.
        EngineError: there is no host compiler, or no CUDA runtime to link.
        UsageError: the base lacks the extension, or a library cannot be read.
        RemoteError: a wheel of the base cannot be read.
    """
    shared = f"libcudart.so.{cuda.partition('.')[0]}" in base.facts(module).needed
    runtime = "shared" if shared else "static"
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        run = _Linker(nvcc=nvcc, host=host, folder=Path(scratch), runtime=runtime)
        first = read_elf(run.link("first", objects))
        open_symbols = [s for s, (lib, _) in first.undefined.items() if not SYSTEM.fullmatch(lib)]
        against = base.held_against(module, open_symbols)
        stand_ins = run.stand_ins(_offers(against, open_symbols))
        library = run.link("second", [*objects, *stand_ins])
        facts = read_elf(library)
        newer = too_new(facts, against)
        older = older_versions(newer, against, host.command)
        if newer:
            # what the base's own libraries bring along need not come from a newer system
            stand_ins = run.stand_ins(_offers(against, [*open_symbols, *(set(newer) - set(older))]))
            shim = run.assemble("older", shim_source(older, against.extension.machine))
            library = run.link("third", [*objects, shim, *stand_ins], wrap=sorted(older))
            facts = read_elf(library)
        return Linked(
            data=library.read_bytes(),
            runtime=runtime,
            proof=check_abi(facts, against, own_runtime=not shared),
            base=against,
            older=older,
        )


def _offers(base: AbiBase, symbols: Iterable[str]) -> dict[str, list[str]]:
    """Library of the base -> the symbols that it is asked for."""
    offers: dict[str, list[str]] = {}
    for symbol in sorted(symbols):
        source = base.source_of(symbol)
        if source and not source.startswith("libcudart."):
            offers.setdefault(source, []).append(symbol)
    assert all(name == DRIVER or name in base.libraries for name in offers)
    return offers


@dataclass(frozen=True, kw_only=True)
class _Linker:
    nvcc: Path
    host: HostCompiler
    folder: Path
    runtime: str

    def link(self, name: str, inputs: Sequence[Path], wrap: Sequence[str] = ()) -> Path:
        target = self.folder / f"{name}.so"
        script = self.folder / "exports"
        script.write_text(_EXPORTS)
        options = [*_LINK, f"--version-script={script}", *(f"--wrap={symbol}" for symbol in wrap)]
        words = [str(self.nvcc), *self.host.words, "-shared", "--no-device-link"]
        words.append(f"-cudart={self.runtime}")
        for option in options:
            words += ["-Xlinker", option]
        self._run([*words, *map(str, inputs), "-o", str(target)], "the linker refused")
        return target

    def stand_ins(self, offers: Mapping[str, Sequence[str]]) -> list[Path]:
        """Libraries by the names of the base's, with symbols and nothing behind them."""
        made = []
        for soname, symbols in offers.items():
            rows = [f".globl {s}\n.type {s}, %function\n{s}:" for s in symbols]
            object_file = self.assemble(soname, "\n".join([".text", *rows, ""]))
            target = self.folder / f"{soname}.stand-in.so"  # nvcc takes no name like lib.so.1
            words = [*_host_compiler(self.host), "-shared", "-nostdlib", f"-Wl,-soname,{soname}"]
            self._run([*words, str(object_file), "-o", str(target)], f"no stand-in for {soname}")
            made.append(target)
        return made

    def assemble(self, name: str, text: str) -> Path:
        source, target = self.folder / f"{name}.s", self.folder / f"{name}.o"
        source.write_text(text)
        self._run(
            [*_host_compiler(self.host), "-c", str(source), "-o", str(target)],
            f"cannot assemble {name}",
        )
        return target

    @staticmethod
    def _run(words: Sequence[str], said: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildFailed(f"{said}: {(done.stderr or done.stdout).strip()[-800:]}")


def _host_compiler(host: HostCompiler) -> list[str]:
    found = shutil.which(host.command)
    if found is None:
        raise EngineError(f"no host compiler ({host.command}) here: objects are linked with it")
    return [found]
