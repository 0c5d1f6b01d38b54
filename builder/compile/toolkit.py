"""The CUDA compiler from released wheels, extracted in the cache.

The wheels of one toolkit release are always the same: its metadata on the package index pins every
part, and each is checked against its sha256 before a file of it is used.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from builder.applier.digests import canonical_json, sha256_hex
from builder.compile.host import TARGETS
from builder.documents.compiled import Input
from builder.errors import EngineError, RemoteError, UsageError
from builder.model.platform import Platform
from builder.pypi.download import download
from builder.pypi.wheels import RemoteWheel
from builder.util.console import console
from builder.util.leftovers import making
from builder.util.locks import locked
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.pypi.index import PackageIndex, WheelFile

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
    metadata = toolkit.read(f"{toolkit.info_dir}/METADATA").decode()
    rows = [Requirement(r) for r in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
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
