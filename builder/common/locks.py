"""Locks between runs of spark-build on one machine, kept in the cache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from builder.applier.values import sha256_hex
from builder.common.console import console
from builder.common.hints import CACHE, os_hint
from builder.common.paths import cache_dir, in_use_lock
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def locked(subject: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a subject (a path, a wheel) during the block.

    Raises:
        UsageError: another run holds it and ``wait`` is false, or the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    path = cache_dir() / "locks" / f"{sha256_hex(subject.encode())[:16]}.lock"
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
