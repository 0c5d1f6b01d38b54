"""Stores pinned inputs in the mod's folder, or in a cache that containers share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from builder.applier.failures import EXIT_MISSING, EXIT_REMOTE, ApplyError, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: The folder that spark-vllm-docker mounts into every container (its ``launch-cluster.sh``).
_VLLM_CACHE = Path("/root/.cache/vllm")
#: The folder of a vendored mod with its pinned inputs.
VENDORED = "wheels"
_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def cache_folders(env: Mapping[str, str], vllm_cache: Path = _VLLM_CACHE) -> list[Path]:
    """Cache folders for a mod's downloads, best first.

    sparkrun names the container's side of its runtime cache to the hooks of a launch, mods among
    them (``sparkrun/orchestration/hooks.py``), and nothing if it is off.
    """
    folders = [Path(env["SPARK_BUILD_CACHE"])] if env.get("SPARK_BUILD_CACHE") else []
    if env.get("SPARKRUN_RUNTIME_CACHE_DIR"):
        folders.append(Path(env["SPARKRUN_RUNTIME_CACHE_DIR"], "spark-build"))
    with contextlib.suppress(OSError):  # below a /root that only root may look into
        if vllm_cache.is_dir():
            folders.append(vllm_cache / "spark-build")
    folders.append(Path(env.get("TMPDIR") or "/tmp", "spark-build-wheels"))  # noqa: S108
    return folders


class Keeper:
    """Files by name and sha256, read from a folder or downloaded.

    A file is hashed and read through the same open file, so it cannot change in between.
    """

    def __init__(self, folders: Sequence[Path], vendored: Path | None = None) -> None:
        self._folders, self._vendored = folders, vendored

    def open(self, name: str, sha256: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
        """Open a file with that sha256; ``fetch`` downloads it if it is missing.

        Raises:
            ApplyError: the download has another sha256, or no folder is writable.
        """
        for folder in ([self._vendored] if self._vendored else []) + list(self._folders):
            kept = _checked(folder / name, sha256, aloud=True)
            if kept is not None:
                return kept
        refused = []
        for folder in self._folders:
            try:
                with _locked(folder, name):
                    # another container may have downloaded it while this one waited
                    kept = _checked(folder / name, sha256)
                    return kept if kept is not None else _fetched(folder, name, sha256, fetch)
            except _NotWritableError as error:
                refused.append(f"{folder}: {error}")
        raise ApplyError(
            f"{name} cannot be kept anywhere: {'; '.join(refused)}",
            EXIT_MISSING,
            "set SPARK_BUILD_CACHE to a folder that can be written to",
        )


class _NotWritableError(Exception):
    """A folder is not writable."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotWritableError(error.strerror or str(error)) from error


def _checked(path: Path, sha256: str, *, aloud: bool = False) -> BinaryIO | None:
    """The file, if it exists with that sha256."""
    try:
        stream = path.open("rb")
    except OSError:
        return None
    digest = hashlib.sha256()
    try:
        while block := stream.read(_BLOCK):
            digest.update(block)
        stream.seek(0)
    except OSError as error:
        stream.close()
        say(f"warning: {path} cannot be read: {error.strerror}")
        return None
    if digest.hexdigest() == sha256:
        return stream
    stream.close()
    if aloud:
        say(f"warning: {path} is damaged (sha256 {digest.hexdigest()}, pinned is {sha256})")
    return None


def _make(folder: Path) -> None:
    """Make a folder and those above it, each for whom the one around it belongs to.

    Mods run as root in containers whose caches are a user's: it is the user who clears them out.
    """
    if folder.is_dir():
        return
    _make(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():  # else another container was first
            raise
        return
    owner = folder.parent.stat()
    with contextlib.suppress(OSError):  # not root, or a file system without owners
        os.chown(folder, owner.st_uid, owner.st_gid, follow_symlinks=False)


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Lock a download, so that one process downloads a file; without locks each does."""
    with _writing():
        _make(folder)
    lock: int | None = None
    with contextlib.suppress(OSError):
        lock = os.open(folder / f"{name}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {name}, which another container is downloading")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                os.close(lock)
                lock = None
        if lock is not None:
            for partial in folder.glob(f"{name}.*.part"):  # of a container that was killed
                with contextlib.suppress(OSError):
                    partial.unlink()
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _fetched(folder: Path, name: str, sha256: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
    """Download a file into a folder; the name never has a partial file."""
    with _writing():
        number, text = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
    partial = Path(text)
    try:
        with os.fdopen(number, "wb") as stream:
            try:
                fetch(stream)
                stream.flush()
            except OSError as error:
                if error.errno in _FULL:
                    raise _NotWritableError(error.strerror) from error
                raise
        kept = _checked(partial, sha256)
        if kept is None:
            raise ApplyError(
                f"{name}: what was downloaded has another sha256 than the pinned {sha256}",
                EXIT_REMOTE,
                "check the package index, which may have another file of that name",
            )
        with _writing():
            owner = folder.stat()
            with contextlib.suppress(OSError):
                os.fchown(kept.fileno(), owner.st_uid, owner.st_gid)
            partial.chmod(0o644)  # the next container may run as another user
            partial.replace(folder / name)
        return kept
    finally:
        partial.unlink(missing_ok=True)
