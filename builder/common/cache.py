"""The local cache: locks between runs on one machine, its contents, and how space is freed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.applier.values import sha256_hex
from builder.common.background import acquire
from builder.common.console import console
from builder.common.document import Count, Document, Moment, Part, Text, moment
from builder.common.hints import CACHE, os_hint
from builder.common.leftovers import making
from builder.common.paths import cache_dir, first_began, in_use_lock
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


# -------------------------------------------------------------------------- locks between runs


@contextlib.contextmanager
def locked(subject: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a subject (a path, a wheel) during the block.

    Other threads of this process wait without a message; one that was cancelled does not.

    Raises:
        UsageError: another run holds it and ``wait`` is false, or the cache cannot be written.
    """
    path = cache_dir() / "locks" / f"{sha256_hex(subject.encode())[:16]}.lock"
    own = _of_threads.setdefault(path, threading.Lock())
    acquire(own)
    try:
        with _of_processes(subject, path, wait=wait):
            yield
    finally:
        own.release()


#: The lock of a subject between threads of this process, by the file of that between processes.
_of_threads: dict[Path, threading.Lock] = {}


@contextlib.contextmanager
def _of_processes(subject: str, path: Path, *, wait: bool) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        in_use_lock(path.parent.parent)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise UsageError(
                    f"another spark-build is writing {subject}",
                    hint="wait for it to end, then run the same command again",
                ) from None
            console.say(f"  waiting for another spark-build that works on {subject}")
            lock.acquire()
    except OSError as error:
        raise UsageError(
            f"cannot write below {path.parent}: {error.strerror}",
            hint=os_hint(error, CACHE),
        ) from error
    try:
        yield
    finally:
        lock.release()


# -------------------------------------------------------------------------------- kinds of entries

#: Entries are named by a hash of their content or inputs.
_HASHED = re.compile(r"(?:[\w.+-]*-)?[0-9a-f]{12,64}(?:\.[\w.-]+)?")
_PAGE = re.compile(r"[a-z0-9][\w.-]*\.json(?:\.[\w.-]+\.part)?")
_VERSIONED = re.compile(r"[0-9a-f]{64}-\d+\.json")
_HEADERS = re.compile(rf"own|{_HASHED.pattern}")


@dataclass(frozen=True)
class CacheKind:
    """Entries of one kind: their parent folders, and their name pattern."""

    name: str
    folders: tuple[str, ...]
    meaning: str
    entry: re.Pattern[str] | None = _HASHED

    @property
    def prunable(self) -> bool:
        """Whether ``cache prune`` and ``cache clean`` may remove entries."""
        return self.entry is not None


KINDS = (
    CacheKind("wheels", ("wheels",), "released wheels, whole and checked"),
    CacheKind("ranges", ("ranges",), "files read by range out of wheels, for each index"),
    CacheKind("index", ("index",), "pages of the package index", _PAGE),
    CacheKind(
        "pulls", ("forge/diffs", "forge/pins"), "pull requests: diffs and their state when fetched"
    ),
    CacheKind("decisions", ("decisions",), "states of layers on releases, for matrix"),
    CacheKind("judged", ("judged",), "how the layers of plans were judged"),
    CacheKind("evidence", ("evidence",), "complete passes of verification"),
    CacheKind("layers", ("layers",), "indexes of base image layers"),
    CacheKind("blobs", ("blobs",), "finished image layers"),
    CacheKind("sandboxes", ("sandbox",), "environments for verification"),
    CacheKind("markers", ("markers",), "log lines that images of a release are checked for"),
    CacheKind("programs", ("programs",), "programs of spark-build for other interpreters"),
    CacheKind("trees", ("trees",), "extracted Python files of targets"),
    CacheKind(
        "dsl", ("dsl/mirrors", "dsl/libraries"), "CuTe DSLs of targets, adapted to this machine"
    ),
    CacheKind("dispatch", ("dispatch",), "replies of vLLM about the kernels that it selects"),
    CacheKind(
        "preflight",
        ("preflight", "preflight/models"),
        "answers about whole models, and their configurations",
    ),
    CacheKind("codegen", ("codegen",), "results of compiled kernels"),
    CacheKind("numbers", ("numbers",), "results of kernels run without a GPU"),
    CacheKind("launches", ("launches",), "launches of kernels, recorded to be run without a GPU"),
    CacheKind("interfaces", ("interfaces",), "what `vllm serve` of releases understands"),
    CacheKind("binaries", ("binaries",), "summaries of compiled modules"),
    CacheKind("operators", ("operators",), "operator libraries from wheels"),
    CacheKind("sources", ("sources",), "source archives of releases"),
    CacheKind("headers", ("headers",), "headers for compiling", _HEADERS),
    CacheKind(
        "toolkits", ("toolkits",), "CUDA compilers from wheels, and facts about toolkit images"
    ),
    CacheKind("objects", ("objects",), "compiled units"),
    CacheKind("companions", ("companions",), "wheels with rebuilt kernels"),
    CacheKind(
        "elf",
        ("elf",),
        "symbols of libraries that extension wheels are checked against",
        _VERSIONED,
    ),
    CacheKind("engine-tests", ("engine-tests",), "the test suite's Docker Engine and images", None),
)
#: Other folders in the cache, which are not entries.
LOCKS, SERVERS = "locks", "servers"
OTHER = CacheKind("other", (), "unknown files", None)


def kinds_named(names: Sequence[str]) -> tuple[CacheKind, ...]:
    """The kinds with these names that may be pruned; all if no name is given.

    Raises:
        UsageError: the kind does not exist, or must not be removed.
    """
    known = {kind.name: kind for kind in KINDS}
    prunable = [kind.name for kind in KINDS if kind.prunable]
    for name in names:
        if name not in known:
            raise UsageError(
                f"no kind {name!r} in the cache{did_you_mean(name, known)}",
                hint=f"kinds: {', '.join(prunable)}",
            )
        if not known[name].prunable:
            raise UsageError(
                f"{name} are not removed by spark-build because a Docker Engine may be using them",
                hint="end the tests, then remove the folder that 'cache show' names by hand",
            )
    return tuple(known[name] for name in names or prunable)


# ----------------------------------------------------------------------------------------- entries


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
        if path.name not in tops and path.name not in (LOCKS, SERVERS) and path.is_dir():
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
            with os.scandir(pending.pop()) as items:
                for item in items:
                    info = item.stat(follow_symlinks=False)
                    if info.st_dev != top.st_dev:
                        continue
                    yield info
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(item.path)
        except OSError:  # gone meanwhile, or an unknown file
            continue


# ----------------------------------------------------------------------------------- freeing space

#: Seconds for which an entry is kept while other runs may read it: file systems that record
#: accesses once a day (``relatime``) are not more precise.
IN_USE = 24 * 3600.0
_LOCK = re.compile(r"[0-9a-f]{16}\.lock")
#: Beside the locks: the folder of what runs are writing (:mod:`builder.common.leftovers`).
_NOTES = "runs"


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
    locks = cache / LOCKS
    ours = not locks.is_symlink() and any(
        path.name == _NOTES or _LOCK.fullmatch(path.name)
        for path in (locks.iterdir() if locks.is_dir() else ())
    )
    if not ours:
        raise UsageError(
            f"{cache} is not a cache of spark-build (its folder of locks is missing, or is "
            f"another's), so nothing was removed",
            hint="unset SPARK_BUILD_CACHE, or set it to the right directory",
        )


def prune(cache: Path, request: PruneRequest, *, dry_run: bool = False) -> Pruned:
    """Remove entries as requested; an entry is removed completely or not at all.

    While other runs use the cache, entries used in the last day are kept, and those used since a
    day before the first of these runs began: it may be long ago, or the clock was set.

    Raises:
        UsageError: the directory is not spark-build's, or is not writable.
    """
    check_ours(cache)
    if not dry_run and not os.access(cache, os.W_OK):
        raise UsageError(
            f"cannot write to {cache}, so nothing was removed",
            hint="make it writable for this user, or remount it if it is mounted read-only",
        )
    with _alone(cache) as alone:
        now = time.time()
        recent = min(now, first_began(cache)) - IN_USE
        oldest_first = sorted(
            entries(cache, request.kinds), key=lambda entry: (entry.used, entry.path)
        )
        total = sum(entry.bytes for entry in oldest_first)
        removed: list[CacheEntry] = []
        in_use = 0
        for entry in oldest_first:
            if request.older_than is not None and now - entry.used < request.older_than:
                continue
            if request.keep_bytes is not None and total <= request.keep_bytes:
                break
            if not alone and entry.used > recent:
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


# --------------------------------------------------------------------------------------- documents


class KindRow(Part, frozen=True, kw_only=True):
    """All entries of one kind."""

    kind: Text
    meaning: Text
    paths: tuple[Text, ...]
    entries: Count
    bytes: Count
    oldest_use: Annotated[
        Moment | None, Meta(description="last use of the least recently used entry")
    ]
    last_use: Moment | None
    prunable: bool

    @classmethod
    def of(cls, kind: CacheKind, entries: Sequence[CacheEntry], cache: Path) -> KindRow:
        """The row for a kind of entries."""
        used = sorted(entry.used for entry in entries)
        folders = kind.folders or sorted(str(entry.path.relative_to(cache)) for entry in entries)
        return cls(
            kind=kind.name,
            meaning=kind.meaning,
            paths=tuple(str(cache / folder) for folder in folders),
            entries=len(entries),
            bytes=sum(entry.bytes for entry in entries),
            oldest_use=moment(used[0]) if used else None,
            last_use=moment(used[-1]) if used else None,
            prunable=kind.prunable,
        )


class CacheContents(Document, frozen=True, kw_only=True):
    """The contents of the cache."""

    cache: Text
    bytes: Count
    kinds: tuple[KindRow, ...]


class RemovedEntry(Part, frozen=True, kw_only=True):
    """An entry that was or would be removed."""

    kind: Text
    path: Text
    bytes: Count
    last_use: Moment


class Removal(Document, frozen=True, kw_only=True):
    """The entries removed from the cache."""

    cache: Text
    dry_run: bool
    removed: Annotated[tuple[RemovedEntry, ...], Meta(min_length=1)]
    freed_bytes: Count
    kept_bytes: Annotated[Count, Meta(description="bytes of the same kinds that are kept")]
    in_use: Annotated[
        Count, Meta(description="entries that were kept because other runs may be using them")
    ]

    @classmethod
    def of(cls, done: Pruned, cache: Path, *, dry_run: bool) -> Removal:
        """The document for a run of ``prune``."""
        rows = (
            RemovedEntry(
                kind=entry.kind.name, path=str(entry.path), bytes=entry.bytes,
                last_use=moment(entry.used),
            )
            for entry in done.removed
        )  # fmt: skip
        return cls(
            cache=str(cache),
            dry_run=dry_run,
            removed=tuple(rows),
            freed_bytes=done.freed,
            kept_bytes=done.kept_bytes,
            in_use=done.in_use,
        )
