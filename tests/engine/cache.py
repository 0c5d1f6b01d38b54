"""The one directory where everything that these tests download or build is kept.

An entry is named after a hash of all that went into it, is made under another name and then
renamed: it is either absent or whole, and an entry of older inputs is never picked up.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LOCK_TIMEOUT = 1800.0
_STARTED = time.monotonic()


class MachineError(RuntimeError):
    """This machine could not be made ready; the message says what to do about it."""


def say(message: str) -> None:
    """Tell the reader of stderr what takes time, and since when."""
    print(
        f"[engine tests {time.monotonic() - _STARTED:6.1f}s] {message}", file=sys.stderr, flush=True
    )


def megabytes(path: Path) -> str:
    """The size of a file or a tree, as a reader wants it."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if not p.is_symlink()]
    return f"{sum(p.lstat().st_size for p in files if p.is_file()) / 1e6:.0f} MB"


def call(
    *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a command to its end; give its stdout, or an error that carries what it said."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, env=env, cwd=cwd, text=True, capture_output=True, check=False)
    except OSError as error:
        raise MachineError(f"cannot run {words[0]}: {error}") from error
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise MachineError(f"exit status {done.returncode} from: {' '.join(words)}\n{said}")
    return done.stdout


def root() -> Path:
    """Where the entries live: `$SPARK_BUILD_TEST_CACHE`, else a folder of the user's cache."""
    chosen = os.environ.get("SPARK_BUILD_TEST_CACHE")
    path = Path(chosen) if chosen else Path.home() / ".cache" / "spark-build" / "engine-tests"
    path = path.resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def key(*inputs: str | bytes | Sequence[str]) -> str:
    """A short name for all the inputs of an entry."""
    plain = [item.decode("latin-1") if isinstance(item, bytes) else item for item in inputs]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


@contextmanager
def locked(name: str, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold a lock between processes; the kernel lets go of it however this process ends."""
    path = root() / "locks" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as handle:
        _acquire(handle.fileno(), name, timeout)
        yield


def _acquire(descriptor: int, name: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise MachineError(f"another run has held the lock {name!r} too long") from None
            if not waiting:
                say(f"waiting for another run that holds {name!r}")
                waiting = True
            time.sleep(0.3)
        else:
            return


def entry(name: str, make: Callable[[Path], None]) -> Path:
    """The finished directory `name`; if it is absent, `make` fills it first."""
    final = root() / name
    if final.is_dir():
        return final
    with locked(name.replace("/", "-")):
        if not final.is_dir():
            with scratch(final.name) as work:
                made = work / "entry"
                made.mkdir()
                make(made)
                final.parent.mkdir(parents=True, exist_ok=True)
                made.rename(final)
    return final


@contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """A directory on the cache's disk (not in a small `/tmp`) that goes away again.

    Its lock tells the next run which ones a killed process has left behind.
    """
    parent = root() / "tmp"
    parent.mkdir(exist_ok=True)
    with locked("scratch"):
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=parent))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        remove_tree(path)
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    for path in parent.iterdir():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete a tree, but never through a mount point: that would delete what is mounted."""
    prefix = f"{path.resolve()}/"
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    below = [line.split()[1] for line in mounts if f"{line.split()[1]}/".startswith(prefix)]
    if below:
        raise MachineError(f"not deleting {path}: mounted below it: {', '.join(below)}")
    shutil.rmtree(path, ignore_errors=True)
