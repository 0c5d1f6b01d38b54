"""Read the cache: entries with their bytes and last use."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.common.cache.kinds import KINDS, LOCKS, OTHER, CacheKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class CacheEntry:
    """An entry, which is kept or removed as a whole.

    ``used`` is the newest access or change time of a file in it, in seconds since the epoch.
    Linux records an access once a day (``relatime``), and never on a ``noatime`` mount.
    """

    kind: CacheKind
    path: Path
    bytes: int
    used: float


def entries(cache: Path, kinds: Iterable[CacheKind] = KINDS) -> Iterator[CacheEntry]:
    """Entries of some kinds; does not follow links or enter other file systems."""
    seen: set[tuple[int, int]] = set()
    for kind in kinds:
        for folder in kind.folders:
            if any(part.is_symlink() for part in _parts(cache, folder)):
                continue
            for path in _children(cache / folder):
                if kind.entry is None or kind.entry.fullmatch(path.name):
                    entry = measure(kind, path, seen)
                    if entry.used:  # not gone meanwhile
                        yield entry


def _parts(cache: Path, folder: str) -> list[Path]:
    words = folder.split("/")
    return [cache.joinpath(*words[: depth + 1]) for depth in range(len(words))]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def unknown(cache: Path) -> Iterator[CacheEntry]:
    """Unknown files in the cache: whole folders, and single entries in known folders."""
    seen: set[tuple[int, int]] = set()
    tops = {folder.split("/")[0] for kind in KINDS for folder in kind.folders}
    for path in _children(cache):
        if path.name not in tops and path.name != LOCKS and path.is_dir():
            yield measure(OTHER, path, seen)
    for kind in KINDS:
        for folder in kind.folders:
            for path in _children(cache / folder):
                if kind.entry is not None and not kind.entry.fullmatch(path.name):
                    yield measure(OTHER, path, seen)


def measure(kind: CacheKind, path: Path, seen: set[tuple[int, int]] | None = None) -> CacheEntry:
    """Size and last use of one entry; a file with several hard links counts once."""
    seen = set() if seen is None else seen
    total, used, device = 0, 0.0, -1
    for info in _walk(path):
        if device < 0:
            device = info.st_dev
        if stat.S_ISDIR(info.st_mode):  # whose access time this walk sets
            used = max(used, info.st_mtime)
            continue
        used = max(used, info.st_mtime, info.st_atime)
        if (info.st_dev, info.st_ino) not in seen:
            seen.add((info.st_dev, info.st_ino))
            total += info.st_size
    return CacheEntry(kind, path, total, used)


def _walk(path: Path) -> Iterator[os.stat_result]:
    try:
        top = path.lstat()
    except OSError:  # gone meanwhile
        return
    yield top
    pending = [str(path)] if stat.S_ISDIR(top.st_mode) else []
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for item in found:
                    info = item.stat(follow_symlinks=False)
                    if info.st_dev != top.st_dev:
                        continue
                    yield info
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(item.path)
        except OSError:  # gone meanwhile, or an unknown file
            continue
