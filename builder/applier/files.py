"""Files that other people made: only regular files of a bounded size are opened."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

#: Bytes of a text or a document: a configuration, a lock, evidence, a file of a layer.
DOCUMENT = 64 << 20

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class UnusableFile(OSError, ValueError):
    """A file that is not read: it is no regular file, or larger than its kind may be."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(
    path: Path | str, most: int | None = None, *, links: bool = True
) -> BufferedReader:
    """Open a regular file for reading, at once; ``most`` limits its bytes.

    A link to a regular file is followed unless ``links`` is false.  A pipe, a device or a socket
    is never waited for or read.

    Raises:
        OSError: it cannot be opened, is no regular file, or is too large; it names the file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

    def opened(name: str, _flags: int) -> int:
        """A checked file descriptor, which nothing else owns yet."""
        try:
            handle = os.open(name, flags if links else flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise _not_regular("a socket", path) from None
            raise
        try:
            _check(os.fstat(handle), path, most)
        except BaseException:
            os.close(handle)
            raise
        return handle

    # An interruption may come at any instruction: who closes a descriptor that a file object
    # already owns closes it twice, and the second time may be another thread's file.
    return open(path, "rb", opener=opened)


def _check(info: os.stat_result, path: Path | str, most: int | None) -> None:
    """Whether an open file is a regular one, and small enough."""
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(info.st_mode):
        kinds = (name for holds, name in _KINDS if holds(info.st_mode))
        raise _not_regular(next(kinds, "something else"), path)
    if most is not None and info.st_size > most:
        raise _too_large(most, path)


def read_regular(path: Path | str, most: int, *, links: bool = True) -> bytes:
    """The bytes of a regular file, as :func:`open_regular` opens it.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most`` bytes.
    """
    with open_regular(path, most, links=links) as stream:
        data = stream.read(most + 1)  # a file of /proc has no size
    if len(data) > most:
        raise _too_large(most, path)
    return data


def _not_regular(kind: str, path: Path | str) -> UnusableFile:
    return UnusableFile(errno.EINVAL, f"it is not a regular file but {kind}", str(path))


def _too_large(most: int, path: Path | str) -> UnusableFile:
    limit = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return UnusableFile(errno.EFBIG, f"it has more than {limit}, which is the limit", str(path))
