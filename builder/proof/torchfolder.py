"""A torch that can be imported without CUDA, in a cache folder.

Linux wheels of torch on the package index are CUDA builds: with their dependencies they take
gigabytes, and alone they do not load.  Kernel selection is host code.  So the wheel is read by
range without the parts that selection never loads, and each linked CUDA library gets a
generated stub (`builder.probes.stub_driver`).  If the index has a CPU build, it is used.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from builder import settings
from builder.applier.digests import sha256_hex
from builder.common.console import console
from builder.common.diskspace import Need, check_room
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.machinecode import read_elf
from builder.common.model.platform import Platform
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.errors import SparkBuildError, UsageError
from builder.images.bases.pypi import requirements_of
from builder.probes.stub_driver import NO_DEVICE, UnknownMachineError, shared_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.applier.trees import Tree
    from builder.common.machinecode import ElfFacts
    from builder.common.pypi import WheelFile

#: The torch version if neither the target nor vLLM's metadata has one.
DEFAULT = "2.13.0"
#: Maximum size of a CUDA build: measured 0.61 GB for 2.11.0 on x86-64 and 0.67 GB for
#: 2.10.0.
ON_DISK = 1_300_000_000
#: Version of the folders in the cache.
_FORM = 1
#: File in a folder with the sha256 of the RECORD that its files were held against.
_RECORD = "spark-build-record.txt"
#: Parts that selection never loads: solvers, NVSHMEM, headers, tests, compilers, static libraries.
_LEFT_OUT = re.compile(
    r"torch/lib/lib(torch_cuda_linalg|caffe2_nvrtc)\.so|torch/(include|share|test)/.*"
    r"|torch/bin/(?!torch_shm_manager).*|.*\.(a|pyi)"
)
#: Libraries that every glibc system has (PEP 600's policy for manylinux), and torch's own OpenMP.
_SYSTEM = re.compile(
    r"(lib(c|m|dl|rt|pthread|util|nsl|resolv|gcc_s|stdc\+\+|atomic|z|gomp)|ld-linux[-\w]*)\.so.*"
)
#: Those of them that a system may lack: soname and Debian package.
_CPP_RUNTIME = {"libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1"}
#: Undefined symbols that the interpreter or the C++ runtime provides.
_NOT_CUDA = ("_Z", "Py", "_Py")
#: ``fallocate(2)``: keep the size, make a hole.
_PUNCH = 1 | 2


@dataclass(frozen=True, kw_only=True)
class Torch:
    """An unpacked torch: put ``folder`` on ``sys.path``."""

    folder: Path
    version: str
    #: text in the evidence
    what: str


def wanted_torch(tree: Tree, packages: Mapping[str, str]) -> str:
    """The target's torch version, else the one that its vLLM pins."""
    if named := settings.TORCH.value:
        return named
    installed = packages.get("torch")
    with suppress(InvalidVersion):
        if installed:
            return Version(installed).public
    vllm = tree.distributions().get("vllm")
    text = (tree.read(f"{vllm.info_dir}/METADATA") or b"") if vllm else b""
    pins = (
        spec.version
        for requirement in requirements_of(text)
        if requirement.name == "torch"
        for spec in requirement.specifier
        if spec.operator == "=="
    )
    return next(pins, DEFAULT)


def torch_folder(wanted: str) -> Torch:
    """An importable torch of a version for this machine and interpreter, created once.

    Raises:
        SparkBuildError: the index has none or does not respond, or the disk is full.
    """
    _check_cpp_runtime()
    index = PackageIndex(settings.TORCH_INDEX.value or None)
    file = _choose(index, wanted)
    wheel = RemoteWheel(file, index)
    key = sha256_hex(f"{file.sha256} {_FORM}".encode())[:12]
    folder = cache_dir() / "sandbox" / f"torch-{file.version}-{key}"
    with locked(str(folder)):
        # what is unpacked is held against RECORD, not against the wheel's sha256: with a RECORD
        # from another index, or of an older spark-build, it is unpacked again
        if not _is_of(folder, wheel.record):
            with making(folder) as partial, making(folder) as old:
                _unpack(wheel, partial)
                (partial / _RECORD).write_text(wheel.record, "ascii")
                with suppress(FileNotFoundError):
                    folder.rename(old)
                partial.rename(folder)
        os.utime(folder)
    return Torch(folder=folder, version=file.version, what=_what(file, folder, wanted))


def _is_of(folder: Path, record: str) -> bool:
    with suppress(OSError):
        return (folder / _RECORD).read_text("ascii") == record
    return False


def _check_cpp_runtime() -> None:
    """Check for the only system library besides glibc that torch needs; containers may lack it."""
    for library, package in _CPP_RUNTIME.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            raise SparkBuildError(
                f"torch needs {library}, which this machine does not have",
                hint=f"apt-get install {package}",
            ) from None


def torch_need(wanted: str) -> Need | None:
    """The disk space that `torch_folder` may need; None if that version already exists."""
    kept = cache_dir() / "sandbox"
    if any(kept.glob(f"torch-{wanted}-*")) or any(kept.glob(f"torch-{wanted}+*-*")):
        return None
    return Need.cache(ON_DISK, f"torch {wanted}, which verification imports")


def _choose(index: PackageIndex, wanted: str) -> WheelFile:
    """The CPU build of a release, else its CUDA build; else the next release for this Python."""
    here = Platform.parse(platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    releases = [Version(release) for release in index.releases("torch")]
    same = [release for release in releases if release.public == wanted]
    if not same:
        index.choose("torch", wanted, here)  # says what there is
    same.sort(key=lambda release: (release.local != "cpu", release.local or ""))
    newer = [r for r in releases if r > Version(wanted) and not r.is_prerelease and not r.local]
    refusal: UsageError | None = None
    for release in (*same, *newer):
        try:
            return index.choose("torch", str(release), here)
        except UsageError as error:
            refusal = refusal or error
            if settings.TORCH.is_set and release == same[-1]:
                break
    assert refusal is not None
    raise refusal


def _what(file: WheelFile, folder: Path, wanted: str) -> str:
    cuda = (folder / "torch" / "lib" / STAND_INS).is_file()
    build = "CUDA build, with generated stand-ins for CUDA's libraries" if cuda else "CPU build"
    instead = (
        ""
        if Version(file.version).public == wanted
        else f" ({wanted} has no wheel for this Python)"
    )
    return f"torch {file.version} ({build}) and this machine's Python, in a sandbox{instead}"


# --- unpacking -----------------------------------------------------------------------------------

#: File with the names of the stubs, one a line.
STAND_INS = "spark-build-stand-ins.txt"


def _unpack(wheel: RemoteWheel, folder: Path) -> None:
    paths = [path for path in wheel.members if not _LEFT_OUT.fullmatch(path)]
    size = sum(wheel.packed_size(path) for path in paths)
    kept = sum(wheel.members[path].size for path in paths)
    check_room([Need.cache(kept, f"{wheel.file.filename}, unpacked")])
    version = wheel.file.version
    with console.progress(f"downloading torch {version} for verification", size) as bar:
        wheel.unpack(paths, folder, bar)
    metadata = (folder / wheel.info_dir / "METADATA").read_bytes()
    if _needs_cuda(metadata):
        write_stand_ins(folder)


def _needs_cuda(metadata: bytes) -> bool:
    """Whether torch's metadata requires CUDA packages on this machine."""
    return any(
        requirement.name.startswith(("nvidia-", "cuda-"))
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        for requirement in requirements_of(metadata)
    )


# --- stand-ins -----------------------------------------------------------------------------------


def write_stand_ins(folder: Path) -> list[str]:
    """Write a stub for each CUDA library that an unpacked torch links; returns their names.

    Raises:
        SparkBuildError: a library of torch cannot be read, or this machine's architecture is
        unsupported.
    """
    place = folder / "torch" / "lib"
    libraries = sorted(path for path in place.iterdir() if ".so" in path.name)
    wanted = wanted_of_cuda({path.name: read_elf(path) for path in libraries})
    for soname, versions in wanted.items():
        try:
            data = shared_library(soname, versions, platform.machine(), versions, NO_DEVICE)
        except UnknownMachineError as error:
            raise SparkBuildError(str(error)) from None
        (place / soname).write_bytes(data)
    for path in libraries:
        drop_device_code(path)
    (place / STAND_INS).write_text("".join(f"{name}\n" for name in wanted), "utf-8")
    return list(wanted)


def wanted_of_cuda(facts: Mapping[str, ElfFacts]) -> dict[str, dict[str, str]]:
    """Missing libraries that these need, each with the symbols that it must define.

    A symbol has its required version, or "".  A symbol without a library is assigned to
    the missing library with the same prefix, such as ``ncclAllGather`` to ``libnccl.so.2``.
    """
    exported = frozenset[str]().union(*(fact.exported for fact in facts.values()))
    wanted: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for fact in facts.values():
        missing = [n for n in fact.needed if n not in facts and not _SYSTEM.fullmatch(n)]
        for soname in missing:
            wanted[soname]  # also one that nothing is asked of
        for symbol, (library, version) in fact.undefined.items():
            if library in missing:
                wanted[library][symbol] = version
            elif not missing or library or symbol in exported:
                continue
            elif not symbol.startswith(_NOT_CUDA):
                wanted[_owner(symbol, missing)].setdefault(symbol, "")
    return {soname: wanted[soname] for soname in sorted(wanted)}


def _owner(symbol: str, missing: list[str]) -> str:
    stems = {soname: soname.removeprefix("lib").split(".")[0].lower() for soname in missing}
    fitting = [soname for soname in missing if symbol.lower().startswith(stems[soname])]
    return max(fitting, key=lambda soname: len(stems[soname]), default=missing[0])


def drop_device_code(path: Path) -> None:
    """Free the disk space of a library's kernels, which are not used here.

    The file keeps its size, and the hole reads as zeros.  If the file system does not support
    holes, the file is unchanged.
    """
    from elftools.elf.elffile import ELFFile

    with path.open("r+b") as stream:
        section: Any = ELFFile(stream).get_section_by_name(".nv_fatbin")
        if section is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        offset, size = ctypes.c_int64(section["sh_offset"]), ctypes.c_int64(section["sh_size"])
        libc.fallocate(stream.fileno(), _PUNCH, offset, size)
