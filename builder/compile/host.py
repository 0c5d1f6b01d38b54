"""The host C++ compiler that nvcc uses for a platform."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from builder.applier.outcomes import Target
from builder.errors import EngineError

#: nvcc's own name for where the headers and the CUDA runtime of a platform are.
TARGETS = {"linux/amd64": "x86_64-linux", "linux/arm64": "sbsa-linux"}
#: What Debian and Ubuntu call the tools that compile for a platform.
_TRIPLETS = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}


@dataclass(frozen=True)
class HostCompiler:
    """A command, and for another platform than this machine's nvcc's name for that."""

    command: str = "g++"
    target: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What nvcc is told each time; nothing where it compiles for this machine."""
        return ("-ccbin", self.command, "-target-dir", self.target) if self.target else ()


#: The one of this machine.
NATIVE = HostCompiler()


def host_compiler(platform: str) -> HostCompiler:
    """The compiler for a platform such as ``linux/arm64``.

    Raises:
        EngineError: it is not on PATH.
    """
    found = _compiler(platform)
    if shutil.which(found.command):
        return found
    if found == NATIVE:
        raise EngineError("g++ is not on PATH; nvcc needs it", hint="apt-get install g++")
    spark = ", such as the Spark itself" if platform == "linux/arm64" else ""
    raise EngineError(
        f"the base is for {platform} and this machine is {Target.here().platform}: compiling for "
        f"it takes {found.command}, which is not on PATH",
        hint=f"{_install(platform)}, or run the same command on a {platform} machine{spark}",
    )


def where_to_compile(platform: str) -> str:
    """What to say of a command that compiles for a platform; nothing where it works here."""
    found = _compiler(platform)
    if found == NATIVE or shutil.which(found.command):
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
