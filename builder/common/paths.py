"""The locations of packaged data files and of the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings
from builder.common import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGE = Path(__file__).resolve().parent.parent


def data_dir(name: str) -> Path:
    """``patches``, ``dockerfiles`` or ``mods``: inside an installed wheel, or in the checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def project_file(name: str) -> Path:
    """``LICENSE`` or ``NOTICE``: inside an installed wheel, or in the checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_file() else _PACKAGE.parent / name


def in_checkout() -> bool:
    """Whether this is a checkout and not an installed package."""
    return not (_PACKAGE / "_data").is_dir()


def package_file(*parts: str) -> Path:
    """A file that ships inside the ``builder`` package."""
    return _PACKAGE.joinpath(*parts)


def code_digest(patterns: Iterable[str]) -> str:
    """The sha256 of the text of some modules, named by patterns below the ``builder`` package."""
    paths = sorted(path for pattern in patterns for path in _PACKAGE.glob(pattern))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def cache_dir() -> Path:
    """``SPARK_BUILD_CACHE``, or the platform's user cache directory."""
    named = settings.CACHE.value
    if named:
        path = Path(named).expanduser()
    else:
        import platformdirs

        path = Path(platformdirs.user_cache_dir("spark-build"))
    leftovers.use(path)
    in_use_lock(path)
    return path


#: The cache in use by this process, and the open file with the lock.
_in_use: dict[Path, int] = {}
_in_use_lock = threading.Lock()


def in_use_lock(cache: Path) -> int | None:
    """The open file that holds the shared lock of a cache until this process ends.

    ``cache prune`` needs the exclusive lock, so it knows whether others are running; a process
    that starts meanwhile waits here.  None if there is no cache, or it is not writable.
    """
    with _in_use_lock:  # of two threads' open files, one would be closed under the other
        if cache in _in_use:
            return _in_use[cache]
        try:
            descriptor = os.open(cache / "locks" / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            return None
        for other in _in_use.values():  # a process has one cache; tests have one after the other
            os.close(other)
        _in_use.clear()
        _in_use[cache] = descriptor
        with suppress(OSError):  # a file system without such locks
            _share(descriptor)
        return descriptor


def _share(descriptor: int) -> None:
    """Take the shared lock; the first of several runs leaves the time at which it began."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # others are running
        pass
    else:
        os.utime(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def first_began(cache: Path) -> float:
    """When the first of the runs that use a cache now began, by the clock of that time."""
    descriptor = in_use_lock(cache)
    return 0.0 if descriptor is None else os.fstat(descriptor).st_mtime
