"""The compilers for a platform: nvcc, installed or from wheels, and the host compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.applier.outcomes import Target
from builder.compile.executor import LocalExecutor
from builder.compile.host import NATIVE, HostCompiler, host_compiler
from builder.compile.link import toolkit_libraries
from builder.compile.nvcc import compiler_versions, find_nvcc, has_library_headers, installed_nvcc
from builder.compile.toolkit import released_toolkit
from builder.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.compile.container import ContainerExecutor, ToolkitChoice
    from builder.compile.executor import Executor
    from builder.compile.toolkit import WheelToolkit
    from builder.documents.compiled import Input
    from builder.pypi.index import PackageIndex

#: Value of ``--nvcc`` and ``SPARK_BUILD_NVCC`` for the compiler from released wheels.
WHEELS = "wheels"


#: Name of a stage's input that belongs to such a compiler.
MEMBER = "compiler"


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


def of_wheels(inputs: Iterable[Input]) -> bool:
    """Whether a stage with these inputs uses the compiler from released wheels."""
    return any(row.member == MEMBER for row in inputs)


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
