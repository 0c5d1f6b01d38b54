"""The compilers of this machine: the host C++ compiler, and an installed nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from builder.applier.outcomes import Target
from builder.errors import EngineError

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


# --------------------------------------------------------------------------------------------- nvcc


#: Folder of nvcc from the toolkit's packages.
_USUAL = Path("/usr/local/cuda/bin/nvcc")


def find_nvcc(named: Path | None = None) -> tuple[Path, str]:
    """Find nvcc and its CUDA version.

    Raises:
        EngineError: it is missing, or its version is unknown.
    """
    nvcc = named or installed_nvcc()
    if nvcc is None or not nvcc.is_file():
        raise EngineError(
            f"no nvcc {f'at {named}' if named else f'on PATH or at {_USUAL}'}",
            hint="install the CUDA toolkit 13, or name its compiler with --nvcc, or an image that "
            "has it with --toolkit",
        )
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{nvcc} does not run here: {error.strerror}") from None
    release = release_in(done.stdout)
    if not release:
        version_output = (done.stdout + done.stderr)[:200]
        raise EngineError(f"{nvcc} --version printed no release: {version_output!r}")
    return nvcc, release


def release_in(output: str) -> str:
    """The CUDA release in the output of ``nvcc --version``, such as ``13.0``, or ``""``."""
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else ""


def version_in(output: str) -> str:
    """The exact version in a compiler's output, such as ``13.0.88``."""
    match = re.search(r"\bV(\d+\.\d+\.\d+)|\b(\d+\.\d+\.\d+)\b", output)
    return (match[1] or match[2]) if match else "unknown"


def installed_nvcc() -> Path | None:
    """nvcc on PATH, or in the toolkit packages' folder; None if missing."""
    nvcc = Path(shutil.which("nvcc") or _USUAL)
    return nvcc if nvcc.is_file() else None


def compiler_versions(nvcc: Path | None, host: HostCompiler = NATIVE) -> dict[str, str]:
    """The exact versions of nvcc, if given, and of the host compiler.

    A cross compiler's name is included, because it may compile differently.
    """
    versions = {}
    for name, word in (("nvcc", nvcc), ("host", host.command)):
        if word is None:
            continue
        done = subprocess.run([word, "--version"], capture_output=True, text=True, check=False)
        versions[name] = version_in(done.stdout)
    if host != NATIVE:
        versions["host"] = f"{host.command} {versions['host']}"
    return versions


def has_library_headers(nvcc: Path) -> bool:
    """Whether nvcc's toolkit also has the library headers."""
    root = nvcc.resolve().parent.parent
    return any((root / folder / "cusparse.h").is_file() for folder in ("include", "targets"))
