"""Finds and removes files of killed runs.

Every unfinished file has a name with the identity of its process, and a note in the cache
(``locks/runs/IDENTITY/``) until it is finished or removed.  A run reads the notes of earlier
runs, and removes files whose process has ended.  A note is a symbolic link whose
target is the note's text, so it is never half-written.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Folder of notes below the cache.
_RUNS = Path("locks", "runs")
#: Name pattern of a run's temporary folder.
_TEMPORARY = "spark-build-run-"
#: Seconds to keep the note of an upload.  Registries drop
#: unfinished uploads themselves: distribution's ``uploadpurging`` after 168 hours.
_UPLOAD_AGE = 7 * 24 * 3600.0
#: Seconds during which a new folder may not be locked yet.
_SETTLING = 60.0
_WORDS = re.compile(r"([0-9]+)-([0-9]+)-([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]+)")
_UPLOAD = "upload "
_numbers = itertools.count()


@dataclass(frozen=True)
class Owner:
    """The unique identity of a process.

    A process ID is valid in one PID namespace (a container has its own), between two boots
    of a machine, and IDs are reused.
    """

    pid: int
    #: start time of the process, in ticks since boot
    start: int
    machine: str
    boot: str
    namespace: str

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.machine}-{self.boot}-{self.namespace}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The owner in a text."""
        match = _WORDS.search(text)
        return None if match is None else cls(int(match[1]), int(match[2]), *match.groups()[2:])

    def has_ended(self, path: Path) -> bool:
        """Whether it has certainly ended; ``path`` is a folder it held."""
        here = identity()
        if here is None:
            return False
        if (self.boot, self.namespace) == (here.boot, here.namespace):
            return _start_of(self.pid) not in (self.start, None) and not self._has_children()
        try:
            changed = path.lstat().st_mtime
        except OSError:
            return False
        if self.boot == here.boot:  # another namespace of this kernel, which knows who holds what
            return time.time() - changed > _SETTLING and not _in_use(path)
        if self.machine != here.machine:  # of which nothing is known
            return False
        # before this machine's boot, or on a copy with the same name: check twice
        return changed < time.time() - _uptime() and not _in_use(path)

    def _has_children(self) -> bool:
        """Whether a child is still running: one with its folder as ``TMPDIR``."""
        mark = f"{_TEMPORARY}{self}".encode()
        for process in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in process.read_bytes():
                    return True
        return False


@functools.cache
def _identity(pid: int) -> Owner | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        start = _start_of(pid)
    except (OSError, ValueError):
        return None
    if not start:
        return None
    try:
        machine = Path("/etc/machine-id").read_text("ascii").strip()
    except (OSError, ValueError):
        machine = ""
    machine = machine or f"boot {boot}"  # then it is no other machine's, and not ours tomorrow
    short = hashlib.sha256(machine.encode()).hexdigest()[:8]
    return Owner(pid, start, short, boot.replace("-", "")[:8], f"{namespace:x}")


def identity() -> Owner | None:
    """The identity of this process; None without ``/proc``."""
    return _identity(os.getpid())


def _start_of(pid: int) -> int | None:
    """Start time of a process; 0 if it does not exist, None if unknown."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return 0
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text("ascii").split()[0])


def _in_use(folder: Path) -> bool:
    """Whether a process in any container on this kernel holds a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def hold(folder: Path) -> int | None:
    """Hold a folder until this process ends, so that other containers see it in use."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a file system without such locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return handle


# ------------------------------------------------------------------------------- temporary folders


def temporary_name() -> str:
    """An unpredictable name for this run's temporary folder."""
    return f"{_TEMPORARY}{identity() or os.getpid()}-{os.urandom(4).hex()}"


def sweep_temporary(parent: Path) -> None:
    """Remove the folders of ended runs."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in list(entries):
            if entry.name.startswith(_TEMPORARY) and (owner := Owner.parse(entry.name)):
                path = Path(entry.path)
                if owner.has_ended(path):
                    _remove(path)


def _remove(path: Path) -> bool:
    """Remove a file or folder; returns whether it is completely gone."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if info.st_uid != os.geteuid():
        return False
    if stat.S_ISDIR(info.st_mode):
        if _mounted(path):
            return False
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    return not os.path.lexists(path)


def _mounted(folder: Path) -> bool:
    """Whether something is mounted at or below a folder, which must then not be removed."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return True
    real = os.fsencode(folder.resolve())
    places = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines]
    return any(place == real or place.startswith(real + b"/") for place in places)


# ------------------------------------------------------------------------------------------- notes


class _Notes:
    """The notes of this process in one cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cache: Path | None = None
        self._folder: Path | None = None
        self._handle: int | None = None

    def use(self, cache: Path) -> bool:
        """Set the folder of notes; returns whether it changed."""
        with self._lock:
            if cache == self.cache:
                return False
            self._close()
            self.cache = cache
            return True

    def _close(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):  # with notes in it, it is for the next run
                self._folder.rmdir()
        handle, self._folder, self._handle = self._handle, None, None
        if handle is not None:
            os.close(handle)

    def close(self) -> None:
        """At the end of a run."""
        with self._lock:
            self._close()
            self.cache = None

    def put(self, name: str, text: str) -> Path | None:
        """Write a note; None if it cannot be written."""
        owner = identity()
        with self._lock:
            if self.cache is None or owner is None:
                return None
            folder = self.cache / _RUNS / str(owner)
            try:
                if folder != self._folder:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._handle, self._folder = hold(folder), folder
                note = folder / name
                note.symlink_to(text)
            except OSError:
                return None
            return note


_notes = _Notes()


def use(cache: Path) -> None:
    """Use this cache for notes, and remove files of ended runs."""
    if _notes.use(cache):
        _sweep(cache)


def close() -> None:
    """This run no longer creates anything."""
    _notes.close()


def _ended(cache: Path) -> Iterator[tuple[str, Path]]:
    """The identities of ended runs, and the folders of their notes."""
    try:
        folders = sorted((cache / _RUNS).iterdir())
    except OSError:
        return
    for folder in folders:
        owner = Owner.parse(folder.name)
        if owner is not None and str(owner) == folder.name and owner.has_ended(folder):
            yield folder.name, folder


def _texts(folder: Path) -> Iterator[tuple[Path, str]]:
    with contextlib.suppress(OSError):
        for note in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                yield note, os.readlink(note)  # noqa: PTH115 - a Path is no text


def _sweep(cache: Path) -> None:
    for name, folder in _ended(cache):
        for note, text in _texts(folder):
            if text.startswith(_UPLOAD):
                with contextlib.suppress(OSError):
                    if time.time() - note.lstat().st_mtime > _UPLOAD_AGE:
                        note.unlink()
            elif name in Path(text).name and _remove(Path(text)):
                with contextlib.suppress(OSError):
                    note.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


# ------------------------------------------------------------------------------- what is being made


@contextlib.contextmanager
def making(final: Path) -> Iterator[Path]:
    """A temporary path next to ``final``, to be renamed to it; removed afterwards."""
    owner = identity() or os.getpid()
    partial = final.with_name(f"{final.name}.{owner}.{next(_numbers)}.part")
    with noted(partial):
        yield partial


@contextlib.contextmanager
def noted(path: Path) -> Iterator[None]:
    """A temporary file or folder with the process identity in its name, removed at the end."""
    absolute = path.absolute()
    note = _notes.put(f"made-{next(_numbers)}", str(absolute))
    try:
        yield
    finally:
        _remove(absolute)
        if note is not None:
            with contextlib.suppress(OSError):
                note.unlink()


def keep_latest(
    paths: Iterable[Path],
    *,
    most: int | None = None,
    most_bytes: int | None = None,
    size: Callable[[Path], int] = lambda path: path.stat().st_size,
    unused_for: float | None = None,
) -> None:
    """Remove the least recently used of cached files or folders: each whole, or not at all.

    The latest stay: ``most`` of them, and as many as have ``most_bytes`` together.  So does what
    another run may be reading, because it was used in the last ``unused_for`` seconds.
    """
    total = 0
    for number, (used, path, own) in enumerate(sorted(_by_use(paths, size), reverse=True)):
        total += own
        fits = most is None or number < most
        fits &= most_bytes is None or total <= most_bytes
        if not fits and (unused_for is None or used < time.time() - unused_for):
            with contextlib.suppress(OSError), making(path) as gone:  # another run was first
                path.rename(gone)  # never leave half of it under its name


def _by_use(
    paths: Iterable[Path], size: Callable[[Path], int]
) -> Iterator[tuple[float, Path, int]]:
    """When each was used last, and its size; another run may remove some meanwhile."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_mtime, path, size(path)


# ----------------------------------------------------------------------------------------- uploads


def _upload_note(repository: str, address: str) -> tuple[str, str]:
    name = hashlib.sha256(f"{repository} {address}".encode()).hexdigest()[:16]
    return f"upload-{name}", f"{_UPLOAD}{repository} {address}"


def note_upload(repository: str, address: str) -> None:
    """Note an upload session of a repository (``HOST/NAME``)."""
    _notes.put(*_upload_note(repository, address))


def forget_upload(repository: str, address: str) -> None:
    """Remove the note of an upload session."""
    owner, cache = identity(), _notes.cache
    if owner is not None and cache is not None:
        name, _ = _upload_note(repository, address)
        with contextlib.suppress(OSError):
            (cache / _RUNS / str(owner) / name).unlink()


def abandoned_uploads(repository: str) -> Iterator[str]:
    """URLs of upload sessions that earlier runs left in a repository, each returned once."""
    if _notes.cache is None:
        return
    for _, folder in _ended(_notes.cache):
        for note, text in _texts(folder):
            words = text.removeprefix(_UPLOAD).split(" ", 1)
            if text.startswith(_UPLOAD) and words[0] == repository:
                with contextlib.suppress(OSError):
                    note.unlink()
                    yield words[1]
        with contextlib.suppress(OSError):
            folder.rmdir()
