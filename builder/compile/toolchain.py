"""The tools to compile for a platform: nvcc, installed or from wheels, the host compiler, headers.

A machine with vLLM's environment has all headers; elsewhere they are read from released wheels by
range, pinned by their sha256 on the index, and nothing is installed.  The wheels of one toolkit
release are always the same: its metadata on the package index pins every part, and each is checked
against its sha256 before a file of it is used.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from builder import settings
from builder.applier.states import Target
from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.document import load_toml
from builder.common.leftovers import making
from builder.common.paths import cache_dir
from builder.common.plan import Input, Platform
from builder.common.pypi import download
from builder.common.wheels import RemoteWheel
from builder.compile.executor import (
    LocalExecutor,
    compiler_versions,
    find_nvcc,
    has_library_headers,
    installed_nvcc,
)
from builder.compile.host import NATIVE, TARGETS, HostCompiler, host_compiler
from builder.compile.link import toolkit_libraries
from builder.errors import EngineError, RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.common.pypi import PackageIndex, WheelFile
    from builder.compile.executor import ContainerExecutor, Executor, ToolkitChoice

# ------------------------------------------------------------------------ nvcc from released wheels


#: The toolkit release, with which everything in docs/compiling.md was measured.
#: with.  Its nvcc is 13.0.88.
RELEASE = "13.0.2"
#: Folder of files in the wheels of a CUDA 13 toolkit.
_PREFIX = "nvidia/cu13/"
#: Programs for this machine, and files to compile with: part -> folders.
_PROGRAMS = {"nvidia-cuda-nvcc": ("bin/",), "nvidia-nvvm": ("nvvm/",)}
_LIBRARIES = {
    "nvidia-cuda-nvcc": ("include/",),
    "nvidia-cuda-crt": ("include/",),
    "nvidia-cuda-cccl": ("include/",),
    "nvidia-cuda-runtime": ("include/", "lib/"),
}
#: Files that compiling and linking require.
_NEEDED = (
    "bin/nvcc", "bin/nvcc.profile", "bin/cudafe++", "bin/fatbinary", "bin/ptxas", "nvvm/bin/cicc",
    "nvvm/libdevice/libdevice.10.bc",
)  # fmt: skip
_NEEDED_OF_TARGET = (
    "include/cuda_runtime.h", "include/fatbinary_section.h", "include/crt/host_config.h",
    "include/cccl/cuda/std/version", "lib/libcudart.so.13", "lib/libcudart_static.a",
)  # fmt: skip
_NONE = SpecifierSet("<0")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Folders of a wheel, and their place in the toolkit."""

    file: WheelFile
    folders: tuple[str, ...]
    below: str = ""


@dataclass(frozen=True, kw_only=True)
class WheelToolkit:
    """A compiler from wheels.  ``version`` is nvcc's, such as ``13.0.88``."""

    version: str
    target: str
    parts: tuple[_Part, ...]

    @property
    def pins(self) -> tuple[Input, ...]:
        """Its wheels, by file name and sha256."""
        files = {part.file.filename: part.file for part in self.parts}
        return tuple(
            Input(
                distribution=file.distribution,
                version=file.version,
                filename=name,
                sha256=file.sha256,
            )
            for name, file in sorted(files.items())
        )

    @property
    def cuda(self) -> str:
        """Its CUDA release: ``13.0``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def folder(self) -> Path:
        """The folder where it is or will be unpacked."""
        rows = [[p.file.sha256, list(p.folders), p.below] for p in self.parts]
        return cache_dir() / "toolkits" / sha256_hex(canonical_json(rows))[:32]

    @property
    def nvcc(self) -> Path:
        """The path of nvcc, which exists after unpacking."""
        return self.folder / "bin" / "nvcc"

    def lay_out(self, index: PackageIndex) -> None:
        """Download and unpack the wheels, once.

        Raises:
            EngineError: the wheels lack a part of the compiler.
            RemoteError: a download fails, or its sha256 does not match.
            UsageError: the disk is too small.
        """
        final = self.folder
        with locked(f"toolkit {final.name}"):
            if final.is_dir():
                return
            console.say(f"  nvcc {self.version} out of released wheels")
            archives = {part.file.sha256: download(part.file, index) for part in self.parts}
            final.parent.mkdir(parents=True, exist_ok=True)
            with making(final) as work:
                for part in self.parts:
                    _unpack(archives[part.file.sha256], part, work)
                self._complete(work)
                work.rename(final)
            for archive in archives.values():
                archive.unlink()

    def _complete(self, folder: Path) -> None:
        needed = (*_NEEDED, *(f"{self.target}/{name}" for name in _NEEDED_OF_TARGET))
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise EngineError(
                f"the released wheels of nvcc {self.version} lack {', '.join(missing)}",
                hint="install the CUDA toolkit 13, or name its compiler with --nvcc",
            )
        runtime = folder / self.target / "lib"
        (runtime / "libcudart.so").symlink_to("libcudart.so.13")  # what the linker looks for


def released_toolkit(index: PackageIndex, here: str, platform: str) -> WheelToolkit:
    """The compiler of ``RELEASE`` on the package index; downloads only pages.

    Args:
        index: where the wheels are.
        here: the platform to run on, such as ``linux/amd64``.
        platform: the target platform.

    Raises:
        UsageError: the index lacks a wheel.
        RemoteError: the index does not respond.
    """
    target = f"targets/{TARGETS[Platform.parse(platform).oci]}"
    versions = toolkit_parts(index, RELEASE, {**_PROGRAMS, **_LIBRARIES})
    parts = []
    for table, runs_on, below in ((_PROGRAMS, here, ""), (_LIBRARIES, platform, target)):
        for project, folders in table.items():
            # the header in nvcc's own wheel is the same for all
            of = here if project in _PROGRAMS else runs_on
            file = index.choose(project, versions[project], Platform.parse(of))
            parts.append(_Part(file=file, folders=folders, below=below))
    return WheelToolkit(version=versions["nvidia-cuda-nvcc"], target=target, parts=tuple(parts))


def toolkit_parts(index: PackageIndex, release: str, projects: Iterable[str]) -> dict[str, str]:
    """Part -> its version in a toolkit release, from the metadata of ``cuda-toolkit``.

    Raises:
        UsageError: the release or one of its parts is not on the index.
        RemoteError: the index does not respond.
    """
    # it has only metadata, and is the same for all platforms
    file = index.choose("cuda-toolkit", release, Platform.parse("linux/amd64"))
    toolkit = RemoteWheel(file, index)
    try:
        rows = [Requirement(r) for r in toolkit.metadata().get_all("Requires-Dist", [])]
    except (InvalidRequirement, ValueError, RecursionError) as error:
        raise RemoteError(f"{file.filename}: its metadata is malformed: {error}") from None
    pins = {row.name: row.specifier for row in rows}
    chosen = {}
    for project in projects:
        fitting = [v for v in index.releases(project) if pins.get(project, _NONE).contains(v)]
        if not fitting:
            raise UsageError(f"cuda-toolkit {release} needs {project}, which is not on the index")
        # the oldest, because the metadata allows newer ones and the choice must not change
        chosen[project] = fitting[0]
    return chosen


def _unpack(archive: Path, part: _Part, toolkit: Path) -> None:
    """Unpack files; those in program folders are executable, whatever the wheel says."""
    wanted = tuple(_PREFIX + folder for folder in part.folders)
    try:
        wheel = zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise RemoteError(f"{archive.name} is not a wheel: {error}") from None
    with wheel:
        for info in wheel.infolist():
            path = PurePosixPath(info.filename)
            if info.is_dir() or not info.filename.startswith(wanted) or ".." in path.parts:
                continue
            target = toolkit / part.below / path.relative_to(_PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(info) as stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out)
            target.chmod(0o755 if path.parent.name == "bin" else 0o644)


# ------------------------------------------------------------------------------------ the compilers


#: Value of ``--nvcc`` and ``SPARK_BUILD_NVCC`` for the compiler from released wheels.
WHEELS = "wheels"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """nvcc, and the host compiler that it calls.

    ``cuda`` is its release, such as ``13.0``; ``versions`` are the exact versions of both.
    ``toolkit`` is the set of wheels it comes from, ``container`` the image that has it; both None
    if installed.
    """

    nvcc: Path
    cuda: str
    versions: dict[str, str]
    host: HostCompiler = NATIVE
    toolkit: WheelToolkit | None = None
    container: ContainerExecutor | None = None

    @property
    def where(self) -> Executor:
        """Where it runs."""
        return self.container or LocalExecutor(self.host)

    @property
    def libraries(self) -> Path:
        """The folder with the CUDA runtime to link; with wheels, after they are unpacked.

        Raises:
            EngineError: the folder is missing or unknown.
        """
        return (
            self.container.libraries if self.container else toolkit_libraries(self.nvcc, self.host)
        )

    @property
    def has_library_headers(self) -> bool:
        """Whether it includes headers of CUDA libraries such as cuSPARSE."""
        if self.container is not None:
            return self.container.toolkit.library_headers
        return has_library_headers(self.nvcc)

    def at_once(self, jobs: int | None) -> int | None:
        """Number of parallel compilations: 1 if the memory is unknown; None means by memory."""
        return jobs or (1 if self.where.alone else None)

    @property
    def pins(self) -> tuple[Input, ...]:
        """Its wheels, by file name and sha256; empty if it is installed."""
        return self.toolkit.pins if self.toolkit else ()

    def ready(self, index: PackageIndex) -> None:
        """Make it available: wheels, about 105 MB, are downloaded now and cached.

        Raises:
            EngineError: the wheels lack a part, or the compiler does not run here.
            RemoteError: a download fails, or its sha256 does not match.
            UsageError: the disk is too small.
        """
        if self.toolkit is not None:
            self.toolkit.lay_out(index)
            find_nvcc(self.nvcc)


def find_compiler(
    index: PackageIndex,
    platform: str,
    named: str | None = None,
    image: ToolkitChoice | None = None,
) -> Compiler:
    """Find the compiler for a platform, without large downloads.

    An installed nvcc comes first.  If there is none, or its toolkit has no headers and no
    runtime for the target platform, it is the one from released wheels.  A given image
    has its own.

    Args:
        index: where wheels are.
        platform: the target, such as ``linux/arm64``.
        named: the path of a compiler, or ``wheels``; None means ``SPARK_BUILD_NVCC``.
        image: the image to compile in, instead of on this machine.

    Raises:
        EngineError: there is no host compiler for the platform, no such nvcc, or none at all.
        RemoteError: the package index does not respond, or the image is not available.
        UsageError: both a local compiler and an image are given.
    """
    if image is not None:
        if named:
            raise UsageError(
                f"--nvcc {named} is a path on this machine, but --toolkit names an image"
            )
        inside = image.open(platform)
        return Compiler(
            nvcc=inside.nvcc,
            cuda=inside.toolkit.cuda,
            versions=inside.toolkit.versions,
            container=inside,
        )
    host = host_compiler(platform)
    named = named or settings.NVCC.value
    if named != WHEELS and (named or installed_nvcc()):
        nvcc, cuda = find_nvcc(Path(named) if named else None)
        if _serves(nvcc, host):
            versions = compiler_versions(nvcc, host)
            return Compiler(nvcc=nvcc, cuda=cuda, versions=versions, host=host)
        if named:
            raise EngineError(
                f"{nvcc} cannot compile for {platform}: its toolkit has no targets/{host.target} "
                "(the nvcc from released wheels has)",
                hint="--nvcc wheels",
            )
    try:
        toolkit = released_toolkit(index, Target.here().platform, platform)
    except UsageError as error:
        missing = "" if named else f"no nvcc for {platform} on PATH or in /usr/local/cuda, and "
        raise EngineError(
            f"{missing}the package index has no wheels of nvcc: {error}",
            hint="install the CUDA toolkit 13, name its compiler with --nvcc, or an image that has "
            "it with --toolkit",
        ) from None
    return Compiler(
        nvcc=toolkit.nvcc,
        cuda=toolkit.cuda,
        versions={**compiler_versions(None, host), "nvcc": toolkit.version},
        host=host,
        toolkit=toolkit,
    )


def _serves(nvcc: Path, host: HostCompiler) -> bool:
    """Whether the toolkit of an installed nvcc also supports a host compiler's platform."""
    if host == NATIVE:
        return True
    try:
        return toolkit_libraries(nvcc, host).parent.name == host.target
    except EngineError:
        return False


# ------------------------------------------------------------------------------------------ headers


#: CUTLASS for vLLM 0.20.0 to 0.22.1 (v4.4.2), in the wheel of this FlashInfer release;
#: vLLM's archive has none, because its build downloads it.
_CUTLASS_WHEEL = ("flashinfer-python", "0.6.9")
_CUTLASS = ("flashinfer/data/cutlass/include/", "flashinfer/data/cutlass/tools/util/include/")
#: CUDA toolkit parts with library headers that torch's CUDA headers include.
_CUDA_PARTS = ("nvidia-cublas", "nvidia-cusolver", "nvidia-cusparse", "nvidia-nvjitlink")
#: torch's CPU build lacks this generated header, which says that c10's CUDA part is a shared
#: library.
_CMAKE_MACROS = "c10/cuda/impl/cuda_cmake_macros.h"
_MACROS_TEXT = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """A compiler and header folders."""

    compiler: Compiler
    includes: tuple[Path, ...]


def make_toolchain(index: PackageIndex, torch: Path, compiler: Compiler) -> Toolchain:
    """A compiler, with torch's headers from ``torch`` and the rest from wheels.

    Args:
        index: where wheels are.
        torch: a site-packages with torch in it, of any build.
        compiler: from ``find_compiler``; unpacked if it comes from wheels.

    Raises:
        EngineError: the compiler cannot be unpacked, or does not run here.
        UsageError: ``torch`` holds no torch headers.
        RemoteError: the package index does not answer.
    """
    headers = torch / "torch" / "include"
    if not (headers / "torch" / "csrc").is_dir():
        raise UsageError(
            f"{torch} has no torch with headers",
            hint="name a site-packages that has torch with --torch",
        )
    includes = [headers, headers / "torch" / "csrc" / "api" / "include"]
    if not (headers / _CMAKE_MACROS).is_file():
        includes.append(_own_headers())
    compiler.ready(index)
    cutlass = wheel_headers(index, *_CUTLASS_WHEEL, prefixes=_CUTLASS)
    includes += [cutlass / prefix for prefix in _CUTLASS]
    if not compiler.has_library_headers:
        includes += _library_headers(index, compiler.cuda)
    return Toolchain(compiler=compiler, includes=tuple(includes))


def pinned_torch(root: Path) -> str:
    """The torch version for a source tree: the pin in its ``pyproject.toml``.

    Raises:
        UsageError: the source tree pins no torch.
    """
    try:
        project = load_toml(root / "pyproject.toml")
        rows = [Requirement(row) for row in project["build-system"]["requires"]]
    except (OSError, ValueError, KeyError, InvalidRequirement) as error:
        raise UsageError(f"{root}: its torch version cannot be read: {error}") from None
    for row in rows:
        for pin in row.specifier if row.name == "torch" else ():
            if pin.operator == "==":
                return pin.version
    raise UsageError(f"{root}/pyproject.toml pins no torch", hint="name one with --torch")


def torch_headers(index: PackageIndex, version: str) -> Path:
    """A site-packages with only the headers of a torch release, read by range.

    C++ built with other headers may need symbols that the release lacks.

    Raises:
        UsageError: the release is not on the index.
        RemoteError: the package index does not answer.
    """
    return wheel_headers(index, "torch", version, prefixes=("torch/include/",))


def header_version(tools: Toolchain) -> str:
    """The torch version of the headers.

    Raises:
        UsageError: they do not have it.
    """
    for name in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        for folder in tools.includes:
            with contextlib.suppress(OSError):
                text = (folder / name).read_text("utf-8")
                parts = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
                if len(parts) == 3:
                    return ".".join(parts)
    raise UsageError(f"the headers in {tools.includes[0]} do not name their torch version")


def _own_headers() -> Path:
    folder = cache_dir() / "headers" / "own"
    target = folder / _CMAKE_MACROS
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_MACROS_TEXT)
    return folder


def header_wheels(index: PackageIndex, compiler: Compiler, torch: str) -> list[Input]:
    """The wheels with headers for units, by file name and sha256.

    Args:
        index: where wheels are.
        compiler: its toolkit may have the libraries' headers.
        torch: the torch release of the headers.
    """
    wanted = [_CUTLASS_WHEEL, ("torch", torch)]
    if not compiler.has_library_headers:
        wanted += _library_wheels(index, compiler.cuda)
    pins = []
    for project, version in wanted:
        file = _wheel(index, project, version).file
        pins.append(
            Input(distribution=project, version=version, filename=file.filename, sha256=file.sha256)
        )
    return pins


def _library_headers(index: PackageIndex, cuda: str) -> list[Path]:
    prefix = f"nvidia/cu{cuda.partition('.')[0]}/include/"
    return [
        wheel_headers(index, project, version, prefixes=(prefix,)) / prefix
        for project, version in _library_wheels(index, cuda)
    ]


def _library_wheels(index: PackageIndex, cuda: str) -> list[tuple[str, str]]:
    """Wheels of the newest toolkit release with nvcc's version; its metadata pins every part."""
    releases = [v for v in index.releases("cuda-toolkit") if v.startswith(f"{cuda}.")]
    if not releases:
        raise UsageError(f"the package index has no cuda-toolkit {cuda}, whose headers are needed")
    return list(toolkit_parts(index, releases[-1], _CUDA_PARTS).items())


def _wheel(index: PackageIndex, project: str, version: str) -> RemoteWheel:
    return RemoteWheel(index.choose(project, version, Platform.parse("linux/amd64", "3.12")), index)


def wheel_headers(
    index: PackageIndex, project: str, version: str, *, prefixes: Iterable[str]
) -> Path:
    """Unpack some folders of a wheel into the cache once; returns the folder.

    Raises:
        UsageError: the wheel has no such file.
    """
    chosen = tuple(prefixes)
    wheel = _wheel(index, project, version)
    final = cache_dir() / "headers" / wheel.record  # which every file is held against
    with locked(f"headers {wheel.record}"):
        if (final / "complete").is_file():
            return final
        names = sorted(name for name in wheel.members if name.startswith(chosen))
        if not names:
            raise UsageError(f"{wheel.file.filename} has nothing below {', '.join(chosen)}")
        console.detail(f"{len(names)} headers of {wheel.file.filename}")
        wheel.preload(names)
        for name in names:
            if name.endswith("/"):
                continue
            target = final / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(name))
        (final / "complete").touch()
    return final
