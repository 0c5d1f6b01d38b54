"""Runs unknown code isolated from this machine's network, files and settings.

It tries two ways in order: ``bwrap`` (user namespaces, no root needed), and a container of an
empty image if a local Docker Engine responds.  In both, the program sees this machine's
``/usr`` and the given folders, read-only, and an empty ``/tmp`` that is also its HOME.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.errors import SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The environment of a program, without facts about this machine; torch needs a user name.
ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 (its own)
    "TMPDIR": "/tmp",  # noqa: S108
    "USER": "nobody",
    "LOGNAME": "nobody",
    "LANG": "C.UTF-8",
}
#: The user ID of ``nobody`` in Debian and Docker.
_NOBODY = 65534
#: Folders that are links into ``/usr`` on a merged-usr system, and real folders elsewhere.
_SYSTEM = ("bin", "sbin", "lib", "lib64")
#: Files of the dynamic loader, and the links of Debian's alternatives.
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")
#: Size limit of its ``/tmp``, which is in memory.
_SCRATCH = 4 << 30
_PROCESSES = 4096
#: Size limit of its output; a compile result has a few megabytes.
_PRINTED = 256 << 20
#: Timeout in seconds of the trial run.
_PATIENCE = 60


class Isolation(Protocol):
    """A way to run a program isolated from this machine."""

    @property
    def name(self) -> str:
        """Its name in the evidence."""

    def run(
        self, words: Sequence[str], stdin: str, readable: Sequence[Path], timeout: float
    ) -> str:
        """Run a program; returns its output.  ``readable`` is mounted read-only at the same paths.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
            SparkBuildError: it cannot be started.
        """


@cache
def find_isolation() -> Isolation | str:
    """The way that works on this machine, or why none works."""
    said = []
    for way in (Bubblewrap(), Container()):
        try:
            way.run(["/usr/bin/env", "true"], "", (), _PATIENCE)
        except (SparkBuildError, OSError, subprocess.SubprocessError) as error:
            said.append(f"{way.name}: {error}")
        else:
            return way
    return "; ".join(said)


def interpreter_folders(python: Path) -> tuple[Path, ...]:
    """Folders that an interpreter needs besides ``/usr``: environment and base installation."""
    own = python.parents[1]
    real = Path(os.path.realpath(python)).parents[1]
    return (own, *(folder for folder in (real, Path(sys.base_prefix)) if len(folder.parts) > 1))


def _not_in_usr(readable: Sequence[Path]) -> list[Path]:
    """Folders without duplicates and without those already visible."""
    paths = dict.fromkeys(path.absolute() for path in readable)
    return [path for path in paths if not path.is_relative_to("/usr")]


@dataclass(frozen=True)
class Bubblewrap:
    """``bwrap``: user namespaces."""

    name: str = "bwrap"

    def command(self, words: Sequence[str], readable: Sequence[Path]) -> list[str]:
        """The command line."""
        program = shutil.which("bwrap")
        if program is None:
            raise SparkBuildError("it is not installed")
        who = ("--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL")
        made = [program, "--unshare-all", *who, "--die-with-parent", "--new-session", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            made += ["--setenv", name, value]
        made += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        made += ["--size", str(_SCRATCH), "--tmpfs", "/tmp"]  # noqa: S108
        for folder in map(Path, (f"/{name}" for name in _SYSTEM)):
            if folder.is_symlink():
                made += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.exists():
                made += ["--ro-bind", str(folder), str(folder)]
        for path in (*_SETTINGS, *map(str, _not_in_usr(readable))):
            made += ["--ro-bind-try", path, path]
        return [*made, "--remount-ro", "/", "--chdir", "/tmp", "--", *words]  # noqa: S108

    def run(
        self, words: Sequence[str], stdin: str, readable: Sequence[Path], timeout: float
    ) -> str:
        """See `Isolation`."""
        command = self.command(["/usr/bin/prlimit", f"--fsize={_PRINTED}", "--", *words], readable)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
            done = subprocess.run(
                command, input=stdin.encode(), stdout=out, stderr=said,
                timeout=timeout, env={}, check=False,
            )  # fmt: skip
            out.seek(0)
            said.seek(0)
            first = said.readline(1000).decode("utf-8", "replace").strip()
            if done.returncode and first.startswith("bwrap: "):
                raise SparkBuildError(first.removeprefix("bwrap: "))
            return out.read().decode("utf-8", "replace")


#: Runs a Python program with a variable as its standard input.
_FED = (
    "import io, os, runpy, sys; sys.stdin = io.StringIO(os.environ.pop('SPARK_BUILD_REQUEST')); "
    "sys.argv.pop(0); sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class Container:
    """A container of an empty image, on a Docker Engine on this machine."""

    name: str = "a container"

    def run(
        self, words: Sequence[str], stdin: str, readable: Sequence[Path], timeout: float
    ) -> str:
        """See `Isolation`."""
        from builder.images.engines import docker

        if stdin:
            words = [words[0], "-c", _FED, *words[1:]]
        links = {
            name: str(Path(f"/{name}").readlink())
            for name in _SYSTEM
            if Path(f"/{name}").is_symlink()
        }
        own = [Path("/", name) for name in _SYSTEM if name not in links]
        shown = [Path("/usr"), *own, *map(Path, _SETTINGS), *_not_in_usr(readable)]
        with contextlib.closing(docker.connect_here()) as client:
            return docker.run_isolated(
                client,
                words,
                docker.IsolatedEnvironment(
                    env={**ENVIRONMENT, "SPARK_BUILD_REQUEST": stdin},
                    links=links,
                    shown=tuple(path for path in shown if path.exists()),
                    user=os.getuid() or _NOBODY,
                    scratch=_SCRATCH,
                    processes=_PROCESSES,
                    printed=_PRINTED,
                ),
                timeout,
            )
