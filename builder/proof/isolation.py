"""Runs unknown code isolated from this machine's network, files and settings; installs packages.

It tries two ways in order: ``bwrap`` (user namespaces, no root needed), and a container of an
empty image if a local Docker Engine responds.  In both, the program sees this machine's
``/usr`` and the given folders, read-only, and an empty ``/tmp`` that is also its HOME.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from builder.common.background import check_cancelled
from builder.common.cache import locked
from builder.common.console import console
from builder.common.leftovers import making
from builder.common.paths import cache_dir, package_file
from builder.common.pypi import PackageIndex, pip_index_url, pip_setting
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
#: Size limits of its ``/tmp`` and its ``/dev/shm``, which are in memory.
_SCRATCH, _SHARED = 4 << 30, 1 << 30
_PROCESSES = 4096
#: Size limit of its output; a compile result has a few megabytes.
_PRINTED = 256 << 20
#: Bytes, lines, and characters of a line of its messages that are shown.
_ERRORS, _SHOWN, _LONGEST = 1 << 20, 60, 300
#: Lines of a traceback that show no place: markers, and the import system's own.
_SAYS_NOTHING = re.compile(r"^[\s^~]*$|<frozen importlib")
#: What a shell and ``bwrap`` add to the number of a signal that ended a program.
_SIGNALLED = 128
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
    #: folders in memory that the program can write to, and the bytes of each; they hide this
    #: machine's own
    writable: Mapping[str, int] = field(
        default_factory=lambda: {"/tmp": _SCRATCH, "/dev/shm": _SHARED}  # noqa: S108 (its own)
    )
    #: its number inside; outside it is the caller, without capabilities
    user: int = _NOBODY

    def command(self, words: Sequence[str], readable: Sequence[Path]) -> list[str]:
        """The command line."""
        program = shutil.which("bwrap")
        if program is None:
            raise SparkBuildError("it is not installed")
        user = str(self.user)
        who = ("--unshare-user", "--uid", user, "--gid", user, "--cap-drop", "ALL")
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
        for place, size in self.writable.items():
            arguments += ["--size", str(size), "--tmpfs", place]
        for folder in map(Path, (f"/{name}" for name in _SYSTEM)):
            if folder.is_symlink():
                arguments += ["--symlink", str(folder.readlink()), str(folder)]
            elif folder.exists():
                arguments += ["--ro-bind", str(folder), str(folder)]
        for path in (*_SETTINGS, *map(str, self._shown(readable))):
            arguments += ["--ro-bind-try", path, path]
        # of root's namespace the files of /proc/sys are root's, so they could be written
        for place in ("/proc", "/dev", "/"):
            arguments += ["--remount-ro", place]
        return [*arguments, "--chdir", "/tmp", "--", *words]  # noqa: S108

    def _shown(self, readable: Sequence[Path]) -> list[Path]:
        """What is not visible in ``/usr``: what is elsewhere, or in a folder that is hidden."""
        hidden = [path for path in readable if any(map(path.is_relative_to, self.writable))]
        return [*_not_in_usr(readable), *(path for path in hidden if path.is_relative_to("/usr"))]

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
            said = errors.read(_ERRORS).decode("utf-8", "replace")
            first = said.partition("\n")[0].strip()
            if done.returncode and first.startswith("bwrap: "):
                raise SparkBuildError(first.removeprefix("bwrap: "))
            return checked_output(
                done.returncode, out.read().decode("utf-8", "replace"), said, "the isolated program"
            )


def checked_output(status: int, output: str, errors: str, name: str) -> str:
    """The output of a program that ended; ``--verbose`` shows its messages.

    Raises:
        SandboxUnavailable: it failed and printed nothing; the message says how it ended.
    """
    lines = [line for line in errors.splitlines() if not _SAYS_NOTHING.search(line)]
    for line in lines[-_SHOWN:]:
        console.detail(f"  {line[:_LONGEST]}")
    if not status or output.strip():
        return output
    last = f": {lines[-1].strip()[:_LONGEST]}" if lines else ""
    raise SandboxUnavailable(f"{name} gave no result: it {how_ended(status)}{last}")


def how_ended(status: int) -> str:
    """How a program ended, in words: ``was ended by signal 9``."""
    number = -status if status < 0 else status - _SIGNALLED
    if 0 < number < signal.NSIG:
        killed = "; Linux does this where memory runs out" if number == signal.SIGKILL else ""
        return f"was ended by signal {number}{killed}"
    return f"ended with exit status {status}"


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
    """A command with additional environment variables, and what to run if it fails."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    instead: Command | None = None


def environment_command(root: Path) -> Command:
    """Create a virtual environment with this interpreter."""
    own = ("--without-pip",) if _pip_here() else ()  # unpacking pip takes as long as its use
    venv = Command((sys.executable, "-m", "venv", *own, str(root)))
    if program := uv():
        words = ("venv", "--quiet", "--no-project", "--python", sys.executable, str(root))
        return _with_uv(program, words, venv)
    return venv


def install_command(
    python: Path, packages: Iterable[str], into: Path | None = None, *, fresh: bool = False
) -> Command:
    """Install exactly these packages for an interpreter, or ``into`` a folder.

    With ``fresh``, nothing of the installer's cache is used.
    """
    what = ("--no-deps", *(("--target", str(into)) if into else ()), *packages)
    pip = (sys.executable, "-m", "pip", "--python") if _pip_here() else ()
    run = (*pip, str(python)) if pip else (str(python), "-m", "pip")
    # compiling everything takes most of the time; imported modules are compiled on import
    no_cache = ("--no-cache-dir",) if fresh else ()
    with_pip = Command((*run, "install", "-q", "--no-compile", *no_cache, *what))
    if program := uv():
        words = ("pip", "install", "--quiet", "--no-config", "--python", str(python))
        no_cache = ("--no-cache",) if fresh else ()
        return _with_uv(program, (*words, *no_cache, *uv_index(), *what), with_pip)
    return with_pip


def _with_uv(program: str, words: Sequence[str], with_pip: Command) -> Command:
    """A command of uv; one from the index, which nobody here chose, has pip behind it."""
    env = uv_environment()
    own = Path(program).parent
    if own != _uv_pin()[0]:
        return Command((program, *words), env)
    if not os.environ.get("UV_CACHE_DIR"):  # HOME need not be writable; removed with the program
        env["UV_CACHE_DIR"] = str(own / "cache")
    return Command((program, *words), env, with_pip if _pip_here() else None)


def installs_here() -> bool:
    """Whether packages can be installed without a pip in the environment that gets them."""
    return uv() is not None or _pip_here()


def _pip_here() -> bool:
    return importlib.util.find_spec("pip") is not None


#: One thread asks the index for uv, and the others wait for it.
_asking = threading.Lock()


def uv() -> str | None:
    """The program uv: on PATH, beside this interpreter, or in a pinned version from the index.

    None if the index has none for this machine or it does not run here; then pip is used.
    """
    beside = Path(sys.executable).with_name("uv")
    if program := shutil.which("uv") or shutil.which(str(beside)):
        return program
    with _asking:
        return _uv_of_index(*_uv_pin())


def _uv_pin() -> tuple[Path, str, str]:
    """The folder, the version, and the sha256 of the wheel for this machine, "" without one."""
    pins = tomllib.loads(package_file("data", "sandbox-requirements.toml").read_text("utf-8"))["uv"]
    version, sha256 = pins["version"], pins["wheels"].get(platform.machine(), "")
    return cache_dir() / "sandbox" / f"uv-{version}-{sha256[:12]}", version, sha256


@cache
def _uv_of_index(folder: Path, version: str, sha256: str) -> str | None:
    program = folder / "uv"
    try:
        if not program.exists():
            with locked(str(folder)):
                if not program.exists():
                    _fetch_uv(folder, version, sha256)
    except (SparkBuildError, OSError, subprocess.SubprocessError) as error:
        console.detail(f"pip installs, because uv {version} is not available here: {error}")
        return None
    return str(program)


def _fetch_uv(folder: Path, version: str, sha256: str) -> None:
    """Put uv out of its wheel into the cache, if the wheel has the pinned sha256 and uv runs here.

    Raises:
        SparkBuildError: the index has no such wheel, or does not respond.
        subprocess.SubprocessError: it does not run here.
    """
    from builder.common.plan import Platform
    from builder.common.wheels import RemoteWheel

    if not sha256:
        raise SparkBuildError(f"no wheel is pinned for {platform.machine()}")
    if _no_index():
        raise SparkBuildError("pip is configured with no-index")
    index = PackageIndex()
    here = Platform.parse(platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    file = index.choose("uv", version, here)
    if file.sha256 != sha256:
        raise SparkBuildError(
            f"{file.filename} on the package index has sha256 {file.sha256}, pinned is {sha256}"
        )
    data = RemoteWheel(file, index).read_whole(f"uv-{version}.data/scripts/uv")
    with making(folder) as partial:
        partial.mkdir(parents=True)
        program = partial / "uv"
        program.write_bytes(data)
        program.chmod(0o755)
        _check_runs(program)
        partial.rename(folder)


def _check_runs(program: Path) -> None:
    """Raise if it does not run here: another libc, or a cache that may not have programs."""
    subprocess.run([program, "--version"], check=True, capture_output=True, timeout=_PATIENCE)


def _no_index() -> bool:
    return (pip_setting("no-index") or "").lower() in ("1", "true", "yes", "on")


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
    if _no_index():
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
    """Run a command, or the one instead of it; returns its output.

    Python imports nothing from the current folder.

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
        out, err = ended(process)
    if process.returncode != 0:
        tail = (err or out).strip().splitlines()[-3:] or [f"it {how_ended(process.returncode)}"]
        message = f"{words[0]} {' '.join(words[1:4])} ... failed: {' | '.join(tail)}"
        if command.instead is not None:
            console.detail(message)
            return call(command.instead)
        raise SandboxUnavailable(
            message,
            hint="see --verbose; on Debian, apt-get install python3-venv",
        )
    return out


#: How many seconds of the clock count as one of processor time.  Our choice: also of a machine that
#: others use each program gets more than a tenth.
_WAITING = 10


def processor_time(pid: int) -> float:
    """Seconds of processor time of a process and of those that it started, ended or not.

    Raises:
        OSError: it has ended, or this system does not tell.
    """
    folder = Path("/proc") / str(pid)
    fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for task in (folder / "task").iterdir():
        for child in (task / "children").read_text("utf-8").split():
            with contextlib.suppress(OSError):  # it ends meanwhile, and its parent has its time
                total += processor_time(int(child))
    return total


class Clock:
    """Tells how long a process may still run: by the clock, or by its processor time.

    A process that waits for ever takes no processor time, so the clock counts too, at a tenth.
    """

    def __init__(self, process: subprocess.Popen[str], seconds: float, *, busy: bool) -> None:
        self._pid, self._busy, self._seconds = process.pid, busy, seconds
        self._began = time.monotonic()

    def is_over(self) -> bool:
        """Whether the time is over."""
        passed = time.monotonic() - self._began
        if not self._busy:
            return passed > self._seconds
        with contextlib.suppress(OSError):
            return max(processor_time(self._pid), passed / _WAITING) > self._seconds
        return passed > self._seconds


def ended(
    process: subprocess.Popen[str],
    text: str | None = None,
    timeout: float = math.inf,
    *,
    busy: bool = False,
) -> tuple[str, str]:
    """The output and errors of a process that reads ``text``; ``timeout`` is in seconds.

    It is killed if it takes longer, or if this work was cancelled.  ``busy``: as `Clock` says,
    seconds of processor time.

    Raises:
        subprocess.TimeoutExpired: it takes longer.
        WorkCancelled: the work of this thread was cancelled.
    """
    clock = Clock(process, timeout, busy=busy)
    try:
        while True:
            try:
                return process.communicate(text, timeout=_LOOK)
            except subprocess.TimeoutExpired:
                text = None  # which the process has, or still gets
                check_cancelled()
                if clock.is_over():
                    raise
    except BaseException:
        process.kill()
        raise
