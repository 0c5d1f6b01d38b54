"""Frees space in the cache: least recently used entries first, never one in use."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.common.cache.scan import CacheEntry, entries, measure
from builder.common.leftovers import making
from builder.common.paths import in_use_lock
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.common.cache.kinds import CacheKind

#: Seconds for which an entry is kept while other runs may read it: file systems that record
#: accesses once a day (``relatime``) are not more precise.
IN_USE = 24 * 3600.0
_LOCK = re.compile(r"[0-9a-f]{16}\.lock")


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """What to remove: entries unused for ``older_than`` seconds, or down to ``keep_bytes``."""

    kinds: tuple[CacheKind, ...]
    older_than: float | None = None
    keep_bytes: int | None = None


@dataclass(frozen=True)
class Pruned:
    """Removed entries, remaining ones, and those kept because other runs are active."""

    removed: Sequence[CacheEntry]
    kept_bytes: int
    in_use: int
    alone: bool

    @property
    def freed(self) -> int:
        """Removed bytes."""
        return sum(entry.bytes for entry in self.removed)


def check_ours(cache: Path) -> None:
    """Refuse a directory that spark-build did not make its cache.

    Raises:
        UsageError: it does not exist, or is not marked as spark-build's cache.
    """
    if not cache.is_dir():
        raise UsageError(f"there is no cache at {cache}", hint="spark-build config show")
    locks = cache / "locks"
    ours = not locks.is_symlink() and any(
        _LOCK.fullmatch(path.name) for path in (locks.iterdir() if locks.is_dir() else ())
    )
    if not ours:
        raise UsageError(
            f"{cache} is not a cache of spark-build (it has no locks folder), so nothing was "
            f"removed",
            hint="unset SPARK_BUILD_CACHE, or set it to the right directory",
        )


def prune(cache: Path, request: PruneRequest, *, dry_run: bool = False) -> Pruned:
    """Remove entries as requested; an entry is removed completely or not at all.

    While other runs use the cache, entries used in the last day are kept.

    Raises:
        UsageError: the directory is not spark-build's, or is not writable.
    """
    check_ours(cache)
    with _alone(cache) as alone:
        now = time.time()
        found = sorted(entries(cache, request.kinds), key=lambda entry: (entry.used, entry.path))
        total = sum(entry.bytes for entry in found)
        removed: list[CacheEntry] = []
        in_use = 0
        for entry in found:
            if request.older_than is not None and now - entry.used < request.older_than:
                continue
            if request.keep_bytes is not None and total <= request.keep_bytes:
                break
            if not alone and now - entry.used < IN_USE:
                in_use += 1
                continue
            if dry_run or _remove(entry):
                removed.append(entry)
                total -= entry.bytes
    return Pruned(removed, total, in_use, alone)


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[bool]:
    """Whether no other run uses the cache; then none can start during the block."""
    descriptor = in_use_lock(cache)
    if descriptor is None:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):  # a failed change of the lock has let go of it
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _remove(entry: CacheEntry) -> bool:
    """Rename an entry, then delete it; one that was used meanwhile is kept."""
    try:
        with making(entry.path) as gone:
            return _removed(entry, gone)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"cannot remove {entry.path}: {error.strerror}") from error


def _removed(entry: CacheEntry, gone: Path) -> bool:
    if measure(entry.kind, entry.path).used > entry.used:
        return False
    entry.path.rename(gone)
    if measure(entry.kind, gone).used > entry.used:
        gone.rename(entry.path)
        return False
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone)
    else:
        gone.unlink()
    return True
