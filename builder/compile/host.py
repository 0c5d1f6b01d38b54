"""Which compilers a stage uses, told without running one, or where else to compile."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.states import Target
from builder.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.common.plan import Input

#: nvcc's folder names for platforms (``targets/NAME``).
TARGETS = {"linux/amd64": "x86_64-linux", "linux/arm64": "sbsa-linux"}
#: Prefixes of Debian's and Ubuntu's cross compilers.
_TRIPLETS = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}


@dataclass(frozen=True)
class HostCompiler:
    """A compiler command, and nvcc's name for its target if it is a cross compiler."""

    command: str = "g++"
    target: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments for nvcc; empty for this machine's platform."""
        return ("-ccbin", self.command, "-target-dir", self.target) if self.target else ()


#: The platform of this machine.
NATIVE = HostCompiler()


def host_compiler(platform: str) -> HostCompiler:
    """The compiler for a platform such as ``linux/arm64``.

    Raises:
        EngineError: it is not on PATH.
    """
    compiler = _compiler(platform)
    if shutil.which(compiler.command):
        return compiler
    if compiler == NATIVE:
        raise EngineError("g++ is not on PATH; nvcc needs it", hint="apt-get install g++")
    spark = ", such as the Spark itself" if platform == "linux/arm64" else ""
    raise EngineError(
        f"the base is for {platform} and this machine is {Target.here().platform}: compiling for "
        f"it takes {compiler.command}, which is not on PATH",
        hint=f"{_install(platform)}, or run the same command on a {platform} machine{spark}",
    )


def where_to_compile(platform: str) -> str:
    """A note that a command must run elsewhere to compile for a platform, or ``""``."""
    compiler = _compiler(platform)
    if compiler == NATIVE or shutil.which(compiler.command):
        return ""
    machine = "the Spark itself, or any" if platform == "linux/arm64" else "any"
    return (
        f"on {machine} {platform} machine; this one is {Target.here().platform}, and would need: "
        f"{_install(platform)}"
    )


def _compiler(platform: str) -> HostCompiler:
    if platform == Target.here().platform:
        return NATIVE
    return HostCompiler(f"{_TRIPLETS[platform]}-g++", TARGETS[platform])


def _install(platform: str) -> str:
    return f"apt-get install g++-{_TRIPLETS[platform].replace('_', '-')}"


#: Name of a stage's input that belongs to such a compiler.
MEMBER = "compiler"


def of_wheels(inputs: Iterable[Input]) -> bool:
    """Whether a stage with these inputs uses the compiler from released wheels."""
    return any(row.member == MEMBER for row in inputs)
