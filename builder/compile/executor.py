"""Runs compilers and linkers on this machine; ``container.py`` does it in a container.

Both have the same interface: run commands on files, and return the outputs.
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
    """A unit to compile: its path in the sources, and the compiler's arguments without files."""

    path: str
    words: tuple[str, ...]

    @property
    def object(self) -> str:
        """The object file's path relative to the work folder."""
        return f"{self.path}.o"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with relative paths; ``said`` is the start of its error message."""

    words: tuple[str, ...]
    said: str


class Executor(Protocol):
    """The interface of an executor of compilers and linkers."""

    @property
    def host(self) -> HostCompiler:
        """The host compiler for the target platform."""

    @property
    def c_library(self) -> Path:
        """That compiler's C library, as a local file."""

    def identity(self, headers: Sequence[Path]) -> tuple[str, ...]:
        """What objects depend on besides sources and command arguments."""

    @property
    def alone(self) -> bool:
        """Whether units are compiled one at a time by default, because memory is unknown."""

    @property
    def root(self) -> Path:
        """The root folder, which is removed from messages so that objects do not depend on it."""

    def source(self, work: Path) -> Path:
        """The path of a work folder's sources."""

    def folders(self, folders: Sequence[Path]) -> tuple[Path, ...]:
        """The paths of header folders."""

    def compile(
        self, work: Path, batch: Sequence[Compilation], at_once: int, headers: Sequence[Path]
    ) -> dict[str, float]:
        """Compile units into a work folder with the sources; returns seconds by object.

        Raises:
            BuildFailed: a unit does not compile; the message has its first error.
            EngineError: a tool is missing.
        """

    def run(self, folder: Path, steps: Sequence[Step], made: Sequence[str]) -> None:
        """Run commands in order on the files of a folder, which receives their outputs.

        Raises:
            BuildFailed: one of them fails.
        """


@dataclass(frozen=True)
class LocalExecutor:
    """Runs on this machine: ninja compiles, and continues after an interruption."""

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
    """The error for a unit that does not compile, with the compiler's first error."""
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    shown = "\n  ".join(lines[:3]) or output[-600:]
    return BuildFailed(f"the compiler refused a unit:\n  {shown}", hint=f"sources and log: {work}")


def failed(step: Step, output: str) -> BuildFailed:
    """The error for a failed command, with the end of its output."""
    return BuildFailed(f"{step.said}: {output.strip()[-800:]}")


def find_ninja() -> str:
    """The path of ninja: on PATH, or next to this Python.

    Raises:
        EngineError: it is missing.
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
    """Output -> seconds; ninja's log has start and end in milliseconds; the last entry counts."""
    found = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, output, *_ = line.split("\t")
        found[output] = (int(end) - int(start)) / 1000
    return found
