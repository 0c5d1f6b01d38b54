"""Runs compilers and linkers on this machine; ``container.py`` does it in a container.

What is asked of either is the same: run these commands over these files, and leave those files.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.compile.host import NATIVE
from builder.errors import BuildFailed, EngineError
from builder.util.console import console
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.compile.host import HostCompiler

#: Folder of the sources below a work folder.
SOURCE = "source"


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A unit to compile: its path in the sources, and the compiler's words but for its files."""

    path: str
    words: tuple[str, ...]

    @property
    def object(self) -> str:
        """The object file, named from the work folder."""
        return f"{self.path}.o"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command whose files are named from the folder it runs in; ``said`` begins its failure."""

    words: tuple[str, ...]
    said: str


class Executor(Protocol):
    """A place that has a compiler and a linker."""

    @property
    def host(self) -> HostCompiler:
        """The host compiler there, for the platform that is compiled for."""

    @property
    def c_library(self) -> Path:
        """That compiler's C library, to be read here."""

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        """What objects depend on beside sources and the words of their commands."""

    @property
    def alone(self) -> bool:
        """Whether units are compiled one at a time unless told otherwise: memory is not known."""

    @property
    def root(self) -> Path:
        """The folder there that no message names: what is compiled must not depend on it."""

    def source(self, work: Path) -> Path:
        """What the sources of a work folder are called there."""

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        """What these folders of headers are called there."""

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        """Compile units into a work folder that holds the sources; seconds by object.

        Raises:
            BuildFailed: the compiler refuses a unit; its first error is in the message.
            EngineError: a tool is missing.
        """

    def run(self, folder: Path, steps: Sequence[Step], made: Sequence[str]) -> None:
        """Run commands one after the other on the files of a folder, which gets what they made.

        Raises:
            BuildFailed: one of them fails.
        """


@dataclass(frozen=True)
class LocalExecutor:
    """This machine: ninja compiles, and goes on where it was broken off."""

    host: HostCompiler = NATIVE

    alone = False

    @property
    def c_library(self) -> Path:
        words = [self.host.command, "-print-file-name=libc.so.6"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    @property
    def root(self) -> Path:
        return cache_dir()

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        del headers  # commands have their names
        return ()

    def source(self, work: Path) -> Path:
        return work / SOURCE

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(folders)

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        del headers  # they are where their names say
        ninja = find_ninja()
        _write_ninja(work, batch)
        began = time.monotonic()
        done = subprocess.run(
            [ninja, "-C", str(work), "-j", str(at_once), "--quiet"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        console.detail(f"ninja ended after {time.monotonic() - began:.0f} s")
        if done.returncode:
            raise refused(done.stdout, work)
        return _seconds(work / ".ninja_log")

    def run(self, folder: Path, steps: Sequence[Step], made: Sequence[str]) -> None:
        del made
        for step in steps:
            done = subprocess.run(
                step.words, cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise failed(step, done.stderr or done.stdout)


def refused(output: str, work: Path) -> BuildFailed:
    """A unit that the compiler refused, with its first error."""
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    shown = "\n  ".join(lines[:3]) or output[-600:]
    return BuildFailed(f"the compiler refused a unit:\n  {shown}", hint=f"sources and log: {work}")


def failed(step: Step, output: str) -> BuildFailed:
    """A command that failed, with the end of what it said."""
    return BuildFailed(f"{step.said}: {output.strip()[-800:]}")


def find_ninja() -> str:
    """Ninja: on PATH, or beside this Python.

    Raises:
        EngineError: it does not exist.
    """
    beside = Path(sys.executable).parent / "ninja"
    found = shutil.which("ninja") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise EngineError("ninja is not installed", hint="pip install 'spark-build[compile]'")
    return found


def _write_ninja(work: Path, batch: Sequence[Compilation]) -> None:
    launcher = shutil.which("ccache")
    prefix = f"{launcher} " if launcher else ""
    rows = ["ninja_required_version = 1.8"]
    for number, unit in enumerate(batch):
        words = shlex.join(unit.words).replace("$", "$$")
        rows += [
            f"rule unit{number}",
            f"  command = {prefix}{words} -c $in -o $out",
            f"  description = {unit.path}",
            f"build {unit.object}: unit{number} {SOURCE}/{unit.path}",
        ]
    (work / "build.ninja").write_text("\n".join(rows) + "\n")


def _seconds(log: Path) -> dict[str, float]:
    """Output -> seconds; ninja's log has start and end in milliseconds, the last entry counts."""
    found = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, *_ = line.split("\t")
        found[output] = (int(end) - int(start)) / 1000
    return found
