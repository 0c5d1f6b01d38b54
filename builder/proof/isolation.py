"""Runs unknown code isolated from this machine's network, files and settings; installs packages.

It tries two ways in order: ``bwrap`` (user namespaces, no root needed), and a container of an
empty image if a local Docker Engine responds.  In both, the program sees this machine's
``/usr`` and the given folders, read-only, and an empty ``/tmp`` that is also its HOME.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.common.background import check_cancelled
from builder.common.console import console
from builder.common.pypi import pip_index_url, pip_setting
from builder.errors import SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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
            SparkBuildError: the program cannot be started.
        """


@cache
def find_isolation() -> Isolation | str:
    """The way that works on this machine, or why none works."""
    failures = []
    for way in (Bubblewrap(), Container()):
        try:
            way.run(["/usr/bin/env", "true"], "", (), _PATIENCE)
        except (SparkBuildError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{way.name}: {error}")
        else:
            return way
    return "; ".join(failures)


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
        arguments = [
            program,
            "--unshare-all",
            *who,
            "--die-with-parent",
            "--new-session",
            "--clearenv",
        ]
        for name, value in ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        arguments += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        arguments += ["--size", str(_SCRATCH), "--tmpfs", "/tmp"]  # noqa: S108
        for folder in map(Path, (f"/{name}" for name in _SYSTEM)):
            if folder.is_symlink():
                arguments += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.exists():
                arguments += ["--ro-bind", str(folder), str(folder)]
        for path in (*_SETTINGS, *map(str, _not_in_usr(readable))):
            arguments += ["--ro-bind-try", path, path]
        return [*arguments, "--remount-ro", "/", "--chdir", "/tmp", "--", *words]  # noqa: S108

    def run(
        self, words: Sequence[str], stdin: str, readable: Sequence[Path], timeout: float
    ) -> str:
        """See `Isolation`."""
        command = self.command(["/usr/bin/prlimit", f"--fsize={_PRINTED}", "--", *words], readable)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                command, input=stdin.encode(), stdout=out, stderr=errors,
                timeout=timeout, env={}, check=False,
            )  # fmt: skip
            out.seek(0)
            errors.seek(0)
            first = errors.readline(1000).decode("utf-8", "replace").strip()
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


# ----------------------------------------------------------------------------- installing packages
#
# Both use pip's configured index and certificates: uv does not read pip's
# configuration, so it gets the settings as variables.

#: Seconds between checks for cancellation of an installation.
_LOOK = 0.2


class SandboxUnavailable(SparkBuildError):
    """The sandbox cannot be created here; the check that needs it is not run."""


@dataclass(frozen=True)
class Command:
    """A command with additional environment variables."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def environment_command(root: Path) -> Command:
    """Create a virtual environment with this interpreter."""
    if uv := shutil.which("uv"):
        words = ("venv", "--quiet", "--no-project", "--python", sys.executable, str(root))
        return Command((uv, *words), uv_environment())
    own = ("--without-pip",) if _pip_here() else ()  # unpacking pip takes as long as its use
    return Command((sys.executable, "-m", "venv", *own, str(root)))


def install_command(python: Path, packages: Iterable[str], into: Path | None = None) -> Command:
    """Install exactly these packages for an interpreter, or ``into`` a folder."""
    what = ("--no-deps", *(("--target", str(into)) if into else ()), *packages)
    if uv := shutil.which("uv"):
        words = ("pip", "install", "--quiet", "--no-config", "--python", str(python))
        return Command((uv, *words, *uv_index(), *what), uv_environment())
    pip = (sys.executable, "-m", "pip", "--python") if _pip_here() else ()
    run = (*pip, str(python)) if pip else (str(python), "-m", "pip")
    # compiling everything takes most of the time; imported modules are compiled on import
    return Command((*run, "install", "-q", "--no-compile", *what))


def _pip_here() -> bool:
    return importlib.util.find_spec("pip") is not None


def uv_index() -> list[str]:
    """Pip's indexes as options of uv, which must also choose the best version of all indexes."""
    words = []
    if index := pip_index_url():
        words += ["--default-index", index]
    if extra := (pip_setting("extra-index-url") or "").split():
        words += [word for url in extra for word in ("--index", url)]
        words += ["--index-strategy", "unsafe-best-match"]
    for place in (pip_setting("find-links") or "").split():
        words += ["--find-links", place]
    for host in (pip_setting("trusted-host") or "").split():
        words += ["--allow-insecure-host", host]
    if (pip_setting("no-index") or "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    return words


def uv_environment() -> dict[str, str]:
    """Pip's certificates and proxy as uv's environment variables."""
    env = {}
    if (cert := pip_setting("cert")) and not os.environ.get("SSL_CERT_FILE"):
        env["SSL_CERT_FILE"] = cert
    if proxy := pip_setting("proxy"):
        env |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    return env


def call(command: Command) -> str:
    """Run a command; returns its output.  Python imports nothing from the current folder.

    Raises:
        SandboxUnavailable: the command failed; the message has the end of its output.
    """
    words = command.words
    console.detail(f"+ {' '.join(words)}")
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **command.env},
    ) as process:
        try:
            out, err = _ended(process)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = (err or out).strip().splitlines()[-3:]
        raise SandboxUnavailable(
            f"{words[0]} {' '.join(words[1:4])} ... failed: {' | '.join(tail)}",
            hint="see --verbose; on Debian, apt-get install python3-venv",
        )
    return out


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    while True:
        try:
            return process.communicate(timeout=_LOOK)
        except subprocess.TimeoutExpired:
            check_cancelled()
